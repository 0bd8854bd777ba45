"""Webhook endpoints, in OpenAI's shapes: a project is told what became of its jobs."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Path, Request
from pydantic import ConfigDict, Field

from api.deps import AfterDep, LimitDep, OwnerDep, ReadingDep, ServicesDep, SessionDep, SubmitterDep
from api.errors import errors
from api.names import Name
from api.schemas import (
    DeletedOut,
    EventTypeList,
    WebhookDeliveryList,
    WebhookDeliveryOut,
    WebhookEndpointList,
    WebhookEndpointOut,
    WebhookEndpointWithSecretOut,
    WebhookTestOut,
)
from api.trips import OneTrip
from api.turns import Turns
from core import outbox, posting, webhooks
from core.described import Described
from core.errors import Forbidden, NotFound, Undelivered
from core.keys import Account
from core.models import new_id
from core.reach import UnreachableError
from core.services import Services

router = APIRouter(prefix="/v1", tags=["webhooks"], route_class=OneTrip)

EndpointId = Annotated[str, Path(description="Id of the webhook endpoint.", examples=["whe-4f1c09a1b2c3d4e5f6a7b8c9"])]
EventTypes = Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=64)]
Url = Annotated[str, Field(min_length=1, max_length=posting.LONGEST_URL)]


class Ask(Described):
    model_config = ConfigDict(strict=True, extra="forbid")


class NewEndpoint(Ask):
    """An endpoint to be made."""

    name: Name
    """What people call it."""
    url: Url
    """Where messages are sent: https://, or http:// within networks that you trust."""
    event_types: EventTypes
    """What to tell: see `GET /v1/webhook_event_types`."""


class EndpointChange(Ask):
    """What of an endpoint is to be another."""

    name: Name = ""
    """What people call it."""
    url: Url = ""
    """Where messages are sent from now on."""
    event_types: EventTypes = Field([])
    """All that is told from now on."""


class Rotation(Ask):
    """How to change the secret."""

    keep_old_secret_active_for_24_hours: bool = False
    """Whether messages are signed with the secret before, too, for a day."""


class Trial(Ask):
    """What to send."""

    event_type: str = Field(max_length=64)
    """The type of the sample."""


@router.post("/webhook_endpoints", responses=errors(Forbidden))
def create_endpoint(
    new: NewEndpoint, owner: SubmitterDep, session: SessionDep, services: ServicesDep
) -> WebhookEndpointWithSecretOut:
    """Make a webhook endpoint. The secret that signs its messages is in this answer, and in a rotation's, alone."""
    endpoint = webhooks.create(
        session,
        owner,
        name=new.name,
        url=new.url,
        event_types=new.event_types,
        networks=services.settings.reachable,
    )
    return WebhookEndpointWithSecretOut.made(endpoint)


@router.get("/webhook_endpoints", responses=errors(NotFound))
def list_endpoints(
    owner: OwnerDep, session: ReadingDep, after: AfterDep = None, limit: LimitDep = 20
) -> WebhookEndpointList:
    """List webhook endpoints, newest first."""
    page = webhooks.page(session, owner, after=after, limit=limit)
    return WebhookEndpointList(data=[WebhookEndpointOut.of(one) for one in page.data], has_more=page.has_more)


@router.get("/webhook_event_types", responses=errors())
def list_event_types(owner: OwnerDep) -> EventTypeList:
    """List what an endpoint can be told.

    `fine_tuning.job.…` are OpenAI's messages, with the job's id; `job.…` also say its name, labels, model and, of one
    that failed, the code of its error. The former are for jobs that have a base, the latter for every job.
    """
    return EventTypeList(data=list(webhooks.EVENT_TYPES))


@router.get("/webhook_endpoints/{endpoint_id}", responses=errors(NotFound))
def get_endpoint(endpoint_id: EndpointId, owner: OwnerDep, session: ReadingDep) -> WebhookEndpointOut:
    """Get a webhook endpoint."""
    return WebhookEndpointOut.of(webhooks.get(session, owner, endpoint_id))


@router.post("/webhook_endpoints/{endpoint_id}", responses=errors(NotFound, Forbidden))
def change_endpoint(
    endpoint_id: EndpointId, change: EndpointChange, owner: SubmitterDep, session: SessionDep, services: ServicesDep
) -> WebhookEndpointOut:
    """Change a webhook endpoint. What still waits goes to the URL that is in force then."""
    wished = change.model_dump(exclude_unset=True)
    endpoint = webhooks.change(session, owner, endpoint_id, wished, networks=services.settings.reachable)
    return WebhookEndpointOut.of(endpoint)


@router.delete("/webhook_endpoints/{endpoint_id}", responses=errors(NotFound, Forbidden))
def delete_endpoint(endpoint_id: EndpointId, owner: SubmitterDep, session: SessionDep) -> DeletedOut:
    """Delete a webhook endpoint, with what was still to be told to it."""
    webhooks.delete(session, owner, endpoint_id)
    return DeletedOut(id=endpoint_id, object="webhook_endpoint.deleted")


@router.post("/webhook_endpoints/{endpoint_id}/rotate_secret", responses=errors(NotFound, Forbidden))
def rotate_secret(
    endpoint_id: EndpointId, owner: SubmitterDep, session: SessionDep, rotation: Rotation | None = None
) -> WebhookEndpointWithSecretOut:
    """Give an endpoint a new secret. The one before ends at once, or signs too for 24 hours."""
    keep_old = rotation is not None and rotation.keep_old_secret_active_for_24_hours
    return WebhookEndpointWithSecretOut.made(webhooks.rotate(session, owner, endpoint_id, keep_old=keep_old))


@router.get("/webhook_endpoints/{endpoint_id}/deliveries", responses=errors(NotFound))
def list_deliveries(
    endpoint_id: EndpointId, owner: OwnerDep, session: ReadingDep, after: AfterDep = None, limit: LimitDep = 20
) -> WebhookDeliveryList:
    """List what was, and is still to be, told to an endpoint, newest first, and why it did not arrive. Kept a week."""
    page = outbox.page(session, owner, endpoint_id, after=after, limit=limit)
    return WebhookDeliveryList(data=[WebhookDeliveryOut.of(one) for one in page.data], has_more=page.has_more)


@router.post("/webhook_endpoints/{endpoint_id}/test", responses=errors(NotFound, Forbidden, Undelivered))
async def test_endpoint(
    endpoint_id: EndpointId, trial: Trial, request: Request, owner: SubmitterDep, services: ServicesDep
) -> WebhookTestOut:
    """Send a sample to an endpoint, once, and tell the status that it answers."""
    send = partial(_send_sample, services, owner, endpoint_id, trial.event_type)
    # Apart from the other endpoints' threads, and a few of each project: who answers slowly keeps nobody else waiting.
    turns: Turns = request.app.state.posting_turns
    async with turns.taken(owner.project_id):
        status = await to_thread.run_sync(send, limiter=request.app.state.posting)
    return WebhookTestOut(event_type=trial.event_type, status_code=status, webhook_endpoint_id=endpoint_id)


def _send_sample(services: Services, owner: Account, endpoint_id: str, event_type: str) -> int:
    with services.db.session() as session:
        endpoint = webhooks.tried(session, owner, endpoint_id, event_type)
    body = outbox.sample(event_type, time.time()).encode()
    headers = webhooks.signed(endpoint, new_id("msg"), body)
    try:
        return posting.post(endpoint.url, body=body, headers=headers, networks=services.settings.reachable)
    except UnreachableError as error:
        raise Undelivered(f"The endpoint could not be reached: {error}.", param="url") from error
