"""What is still to be told to webhook endpoints: written with what it tells, sent until it arrives or is too old.

A message is sent at least once, always under the same id. Any number of senders may look at once: an endpoint is one's
for a while, with one message, and another's after that if the first says nothing more. So its messages arrive in order,
but for those that it did not take at first: others go before they are sent again, and none waits for days behind one.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from core import paging, webhooks
from core.keys import Account
from core.models import Job, WebhookDelivery, WebhookEndpoint, database_now, new_id
from core.paging import Page

WAITS = (5.0, 30.0, 120.0, 600.0, 1800.0, 3600.0, 7200.0, 14400.0, 28800.0, 43200.0, 86400.0, 86400.0)
"""Seconds after each attempt that failed; together somewhat more than three days, then the message is given up."""
JITTER = 0.1
"""By how much of it a wait may be longer, so that what failed together does not come back together."""
HELD_SECONDS = 60.0
"""How long an endpoint, and the message on its way there, are one sender's."""
MOST_OF_A_PROJECT = 4
"""Messages of one project under way at once."""
KEPT_SECONDS = 7 * 24 * 3600.0
"""How long it can be seen what became of a message."""


# Writing


def announce(session: Session, job: Job) -> None:
    """A job has just ended: write a message to each endpoint of its project that wants to know."""
    # A job from scratch has no base, and so is none of OpenAI's.
    families = (webhooks.OURS,) if job.base_model is None else (webhooks.OPENAI, webhooks.OURS)
    types = {f"{family}.{job.state}" for family in families}
    bodies: dict[str, str] = {}
    listening = select(WebhookEndpoint.id, WebhookEndpoint.event_types).where(
        WebhookEndpoint.project_id == job.project_id
    )
    # One that is deleted at this moment is waited for, or waits: the end of a job must not fail for a missing endpoint.
    for endpoint_id, wanted in session.execute(listening.with_for_update(read=True, key_share=True)):
        for type_ in sorted(types.intersection(wanted)):
            body = bodies.setdefault(type_, _body(type_, _data(type_, job), int(job.finished_at or 0)))
            id_ = new_id("msg")
            session.add(WebhookDelivery(id=id_, endpoint_id=endpoint_id, type=type_, body=body, due_at=database_now()))


def sample(type_: str, now: float) -> str:
    """A message as `announce` writes it, of no job."""
    data = {"id": "job-000000000000000000000000"}
    if not type_.startswith(webhooks.OPENAI):
        data |= {"state": type_.rpartition(".")[2]}
    return _body(type_, data, int(now))


def _data(type_: str, job: Job) -> dict[str, Any]:
    if type_.startswith(webhooks.OPENAI):
        return {"id": job.id}
    return {
        "id": job.id,
        "kind": job.kind,
        "name": job.name,
        "labels": job.labels,
        "state": job.state.value,
        "model": job.result_model,
        "error_code": (job.error or {}).get("code"),
    }


def _body(type_: str, data: dict[str, Any], created_at: int) -> str:
    event = {"id": new_id("evt"), "object": "event", "created_at": created_at, "type": type_, "data": data}
    return json.dumps(event, separators=(",", ":"))


# Sending


@dataclass(frozen=True)
class Errand:
    """A message that this sender is to take to its endpoint, now."""

    id: str
    attempt: int
    endpoint: WebhookEndpoint
    body: bytes
    held_until: float
    """Also the fence: who comes back later does not end what another holds by then."""


def take(session: Session, *, busy: Collection[str], most: int) -> list[Errand]:
    """Messages whose time has come, the oldest of each endpoint that is not `busy` and that no other sender holds.

    One an endpoint: so its messages arrive in order as long as all is well, and one that is slow delays only its own.
    A few a project: so those of one that answer nothing leave places to the others.
    """
    due = WebhookDelivery.due_at <= database_now()
    is_free = WebhookEndpoint.held_until.is_(None) | (WebhookEndpoint.held_until <= database_now())
    waiting = (
        select(WebhookDelivery.endpoint_id, WebhookEndpoint.project_id)
        .join(WebhookEndpoint)
        .where(due, is_free, WebhookDelivery.endpoint_id.not_in(busy))
        .group_by(WebhookDelivery.endpoint_id, WebhookEndpoint.project_id)
        .order_by(func.min(WebhookDelivery.due_at))
    )
    under_way = select(WebhookEndpoint.project_id).where(WebhookEndpoint.id.in_(busy) | ~is_free)
    taken, errands = Counter(session.scalars(under_way)), list[Errand]()
    for endpoint_id, project_id in session.execute(waiting).all():
        if len(errands) == most:
            break
        if taken[project_id] == MOST_OF_A_PROJECT:
            continue
        endpoint = session.scalars(
            select(WebhookEndpoint)
            .where(WebhookEndpoint.id == endpoint_id, is_free)
            .with_for_update(skip_locked=True, key_share=True)
            .execution_options(populate_existing=True)
        ).one_or_none()
        if endpoint is None:
            # Another sender was first, or somebody changes it at this moment.
            continue
        oldest = (
            select(WebhookDelivery)
            .where(due, WebhookDelivery.endpoint_id == endpoint_id)
            .order_by(WebhookDelivery.created_at, WebhookDelivery.id)
            .limit(1)
        )
        message = session.scalars(oldest.with_for_update(skip_locked=True)).first()
        if message is not None:
            taken[project_id] += 1
            held_until = (session.scalar(select(database_now())) or 0.0) + HELD_SECONDS
            message.attempts += 1
            message.due_at = endpoint.held_until = held_until
            errands.append(Errand(message.id, message.attempts, endpoint, message.body.encode(), held_until))
    session.flush()
    return errands


def delivered(session: Session, errand: Errand) -> None:
    """It has arrived."""
    _settle(session, errand, due_at=None, delivered_at=database_now(), last_error=None)


def failed(session: Session, errand: Errand, reason: str, *, for_good: bool = False) -> bool:
    """It has not: it is sent again later, but never `for_good` or after too many times. Whether it will be."""
    again = not for_good and errand.attempt <= len(WAITS)
    wait = wait_after(errand.attempt, random.random()) if again else 0.0
    _settle(session, errand, due_at=database_now() + wait if again else None, last_error=reason)
    return again


def wait_after(attempt: int, chance: float) -> float:
    """Seconds to wait after that many attempts; `chance` is in 0..1."""
    return WAITS[attempt - 1] * (1 + JITTER * chance)


def _settle(session: Session, errand: Errand, **values: Any) -> None:
    session.execute(
        update(WebhookEndpoint)
        .where(WebhookEndpoint.id == errand.endpoint.id, WebhookEndpoint.held_until == errand.held_until)
        .values(held_until=None)
        .execution_options(synchronize_session=False)
    )
    session.execute(
        update(WebhookDelivery)
        .where(WebhookDelivery.id == errand.id, WebhookDelivery.attempts == errand.attempt)
        .values(values)
        .execution_options(synchronize_session=False)
    )


# Looking, and keeping up


def page(
    session: Session, owner: Account, endpoint_id: str, *, after: str | None = None, limit: int = 20
) -> Page[WebhookDelivery]:
    """What was, and is to be, told to an endpoint, newest first."""
    webhooks.get(session, owner, endpoint_id)
    query = select(WebhookDelivery).where(WebhookDelivery.endpoint_id == endpoint_id)
    return paging.by_age(
        session, query, WebhookDelivery.created_at, WebhookDelivery.id, after=after, limit=limit
    )  # fmt: skip


def forget(session: Session) -> None:
    """Let go of what was delivered or given up a week ago."""
    old = WebhookDelivery.created_at < database_now() - KEPT_SECONDS
    session.execute(delete(WebhookDelivery).where(WebhookDelivery.due_at.is_(None), old))
