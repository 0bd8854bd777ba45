"""Readers of a job's history. Who writes it is `jobs`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import get_args

from sqlalchemy import select
from sqlalchemy.orm import Session

from core import paging
from core.errors import InvalidRequest
from core.models import Job, JobEvent
from core.paging import Order, Page
from engine.events import Event

TYPES = frozenset({"state", "changed"} | {kind.model_fields["type"].default for kind in get_args(get_args(Event)[0])})
"""What an event can be of: the service's own, and those that the engine tells."""


def page(
    session: Session,
    job: Job,
    *,
    after: int | None = None,
    limit: int = 20,
    order: Order = "desc",
    types: Collection[str] = (),
) -> Page[JobEvent]:
    """Events in order of `seq`, those beyond `after` in that direction; of these types only, where some are named.

    Raises InvalidRequest for a type of which there is never any.
    """
    if unknown := sorted(set(types) - TYPES):
        raise InvalidRequest(
            f"There are no events of type {unknown[0][:64]!r}; types are {', '.join(sorted(TYPES))}.", param="type"
        )
    query = select(JobEvent).where(JobEvent.job_id == job.id)
    if types:
        query = query.where(JobEvent.type.in_(types))
    if after is not None:
        query = query.where(JobEvent.seq < after if order == "desc" else JobEvent.seq > after)
    return paging.cut(session, query, [JobEvent.seq], limit=limit, order=order)


def since(session: Session, job_id: str, seq: int, *, limit: int = 500) -> Sequence[JobEvent]:
    """The events after `seq`, oldest first: what a listener that knows `seq` has yet to hear."""
    return session.scalars(
        select(JobEvent).where(JobEvent.job_id == job_id, JobEvent.seq > seq).order_by(JobEvent.seq).limit(limit)
    ).all()
