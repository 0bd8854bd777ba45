"""Webhook endpoints: where a project is told what became of its jobs, and how it knows that it was us.

Messages are signed as Standard Webhooks says, with a secret that is shown when it is made and never again.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from core import audit, paging, posting
from core.db import lock
from core.errors import InvalidRequest, NotFound
from core.keys import Account
from core.models import WebhookEndpoint, database_now, new_id
from core.paging import Page
from core.settings import Network
from core.states import TERMINAL

OPENAI, OURS = "fine_tuning.job", "job"
"""How types begin: of OpenAI's messages, for what its routes call fine-tunes, and of ours, for every job."""
EVENT_TYPES = tuple(f"{family}.{state}" for family in (OPENAI, OURS) for state in sorted(TERMINAL))
MOST_ENDPOINTS = 20
"""Of one project: each end of a job writes a row for each."""
OLD_SECRET_STAYS = timedelta(hours=24)
_PREFIX = "whsec_"


def create(
    session: Session, owner: Account, *, name: str, url: str, event_types: Sequence[str], networks: Sequence[Network]
) -> WebhookEndpoint:
    """An endpoint with a new secret."""
    posting.check_url(url, networks)
    lock(session, f"webhooks {owner.project_id}")
    there = session.scalar(select(func.count()).where(WebhookEndpoint.project_id == owner.project_id)) or 0
    if there >= MOST_ENDPOINTS:
        raise InvalidRequest(f"A project has at most {MOST_ENDPOINTS} webhook endpoints; delete one.")
    endpoint = WebhookEndpoint(
        id=new_id("whe"),
        project_id=owner.project_id,
        name=name,
        url=url,
        event_types=_checked(event_types),
        secret=_new_secret(),
    )
    session.add(endpoint)
    audit.record(session, owner, "webhook_endpoint.created", endpoint.id, name=name, event_types=endpoint.event_types)
    session.flush()
    return endpoint


def get(session: Session, owner: Account, endpoint_id: str) -> WebhookEndpoint:
    """An endpoint of the owner's project."""
    return _one(session, _own(owner).where(WebhookEndpoint.id == endpoint_id), endpoint_id)


def page(session: Session, owner: Account, *, after: str | None = None, limit: int = 20) -> Page[WebhookEndpoint]:
    """The project's endpoints, newest first."""
    return paging.by_age(
        session, _own(owner), WebhookEndpoint.created_at, WebhookEndpoint.id, after=after, limit=limit
    )  # fmt: skip


def change(
    session: Session, owner: Account, endpoint_id: str, wished: Mapping[str, Any], *, networks: Sequence[Network]
) -> WebhookEndpoint:
    """Set `name`, `url` or `event_types`. Messages that wait go to the URL that is then in force."""
    endpoint = _locked(session, owner, endpoint_id)
    if "url" in wished:
        posting.check_url(wished["url"], networks)
    if "event_types" in wished:
        wished = {**wished, "event_types": _checked(wished["event_types"])}
    changed = {field: value for field, value in wished.items() if getattr(endpoint, field) != value}
    if changed:
        for field, value in changed.items():
            setattr(endpoint, field, value)
        # A URL may hold a token.
        told = {field: value for field, value in changed.items() if field != "url"}
        audit.record(session, owner, "webhook_endpoint.changed", endpoint_id, fields=sorted(changed), **told)
        _touch(session, endpoint)
    return endpoint


def rotate(session: Session, owner: Account, endpoint_id: str, *, keep_old: bool) -> WebhookEndpoint:
    """Give it a new secret. With `keep_old` the one before signs too, for a day."""
    endpoint = _locked(session, owner, endpoint_id)
    now = session.scalar(select(database_now())) or 0.0
    endpoint.old_secret = endpoint.secret if keep_old else None
    endpoint.old_secret_until = now + OLD_SECRET_STAYS.total_seconds() if keep_old else None
    endpoint.secret = _new_secret()
    audit.record(session, owner, "webhook_endpoint.secret_rotated", endpoint_id, keep_old=keep_old)
    _touch(session, endpoint)
    return endpoint


def tried(session: Session, owner: Account, endpoint_id: str, event_type: str) -> WebhookEndpoint:
    """An endpoint that a sample is about to be sent to."""
    check_type(event_type, param="event_type")
    endpoint = get(session, owner, endpoint_id)
    audit.record(session, owner, "webhook_endpoint.tested", endpoint_id, event_type=event_type)
    return endpoint


def delete(session: Session, owner: Account, endpoint_id: str) -> None:
    """Remove an endpoint, with what was still to be told to it."""
    session.delete(_locked(session, owner, endpoint_id))
    audit.record(session, owner, "webhook_endpoint.deleted", endpoint_id)
    session.flush()


def hint(endpoint: WebhookEndpoint) -> str:
    """Enough of the secret to tell it from another."""
    return f"{_PREFIX}…{endpoint.secret[-4:]}"


def signed(endpoint: WebhookEndpoint, message_id: str, body: bytes) -> dict[str, str]:
    """The headers of a message that is sent now."""
    now = time.time()
    good = [endpoint.secret]
    if endpoint.old_secret is not None and (endpoint.old_secret_until or 0.0) > now:
        good.append(endpoint.old_secret)
    content = f"{message_id}.{int(now)}.".encode() + body
    return {
        "Content-Type": "application/json",
        "User-Agent": "Trainshed",
        "Webhook-Id": message_id,
        "Webhook-Timestamp": str(int(now)),
        "Webhook-Signature": " ".join(f"v1,{_signature(secret, content)}" for secret in good),
    }


def check_type(event_type: str, *, param: str) -> None:
    """Raise InvalidRequest unless something of this type can happen here."""
    if event_type not in EVENT_TYPES:
        raise InvalidRequest(
            f"Nothing of the type {event_type[:64]!r} happens here; there are {', '.join(EVENT_TYPES)}.", param=param
        )


def _checked(event_types: Sequence[str]) -> list[str]:
    for event_type in event_types:
        check_type(event_type, param="event_types")
    return list(dict.fromkeys(event_types))


def _new_secret() -> str:
    return _PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def _signature(secret: str, content: bytes) -> str:
    key = base64.b64decode(secret.removeprefix(_PREFIX))
    return base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()


def _touch(session: Session, endpoint: WebhookEndpoint) -> None:
    endpoint.updated_at = session.scalar(select(database_now())) or 0.0
    session.flush()


def _own(owner: Account) -> Select[WebhookEndpoint]:
    return select(WebhookEndpoint).where(WebhookEndpoint.project_id == owner.project_id)


def _locked(session: Session, owner: Account, endpoint_id: str) -> WebhookEndpoint:
    return _one(session, _own(owner).where(WebhookEndpoint.id == endpoint_id).with_for_update(), endpoint_id)


def _one(session: Session, query: Select[WebhookEndpoint], endpoint_id: str) -> WebhookEndpoint:
    endpoint = session.scalars(query.execution_options(populate_existing=True)).one_or_none()
    if endpoint is None:
        raise NotFound(f"There is no webhook endpoint {endpoint_id!r}.")
    return endpoint
