"""Who changed what, when and from where: a row in the transaction of each change, so that neither is without the other.

Where a request comes from is known at the edge, which says so in `origin`; services only say what they did.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, select, text
from sqlalchemy.orm import Session

from core import paging
from core.db import directly
from core.models import OF_ARCHIVING, AuditLog, new_id
from core.paging import Page

if TYPE_CHECKING:
    from core.keys import Account


@dataclass(frozen=True)
class Origin:
    """What a change came with."""

    request_id: str | None = None
    address: str | None = None


OTHER_PROJECT = "to"
"""Key of `data` for the id of a project other than the changed thing's; only for who manages the organisation."""
NOWHERE = Origin()
origin: ContextVar[Origin] = ContextVar("origin", default=NOWHERE)
"""Of the request that this thread or task works for; threads that it starts through anyio inherit it."""


def record(
    session: Session, owner: Account, action: str, object_id: str, *, project_id: str | None = None, **data: Any
) -> None:
    """Write down that `owner` did `action` to a thing of their project, or of `project_id`; no secret in `data`."""
    here = origin.get()
    entry = {
        "id": new_id("audit"),
        "project_id": project_id or owner.project_id,
        "actor_project_id": owner.project_id,
        "actor_key_id": owner.key_id,
        "action": action,
        "object_id": object_id[:255],
        "data": data,
        "request_id": here.request_id,
        "address": here.address,
    }
    directly(session, _ENTRY, entry)


_ENTRY = insert(AuditLog)


def who_archived(session: Session, project_id: str) -> Account:
    """Who last archived a project, for what is left to be done in their name.

    They may have lost the right to do it meanwhile.
    """
    # Here and not above: keys write down what becomes of them.
    from core.keys import DEFAULT_PROJECT, SETTINGS_KEY, Account

    # In the index's own words: beside each is the end of as many jobs as the project had.
    last = select(AuditLog).where(AuditLog.project_id == project_id, text(OF_ARCHIVING))
    entry = session.scalars(last.order_by(AuditLog.created_at.desc(), AuditLog.id.desc()).limit(1)).first()
    if entry is None:
        # So long ago that it was forgotten.
        return Account(project_id=DEFAULT_PROJECT, key_id=SETTINGS_KEY, scopes=frozenset())
    return Account(project_id=entry.actor_project_id, key_id=entry.actor_key_id, scopes=frozenset())


@dataclass(frozen=True)
class Wanted:
    """Which entries: those that have all of this."""

    project_id: str | None = None
    action: str | None = None
    object_id: str | None = None
    key_id: str | None = None
    since: float | None = None
    until: float | None = None


def page(
    session: Session, owner: Account, wanted: Wanted, *, after: str | None = None, limit: int = 20
) -> Page[AuditLog]:
    """Entries, newest first: the organisation's for who manages that, else those of the owner's project."""
    query = select(AuditLog)
    if not owner.manages_organization:
        query = query.where(AuditLog.project_id == owner.project_id)
    if wanted.key_id is not None and not owner.manages_organization:
        # Whose key from outside did it is not told, and so can't be asked for either.
        query = query.where(AuditLog.actor_project_id == owner.project_id)
    equal = {
        AuditLog.project_id: wanted.project_id,
        AuditLog.action: wanted.action,
        AuditLog.object_id: wanted.object_id,
        AuditLog.actor_key_id: wanted.key_id,
    }
    where = [column == value for column, value in equal.items() if value is not None]
    if wanted.since is not None:
        where.append(AuditLog.created_at >= wanted.since)
    if wanted.until is not None:
        where.append(AuditLog.created_at < wanted.until)
    return paging.by_age(session, query, AuditLog.created_at, AuditLog.id, after=after, limit=limit, where=where)
