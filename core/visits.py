"""Browsers that signed in: a page can't send a key with an EventSource, but a cookie goes along by itself.

A visit opens what its key may read and nothing else, so that no page of somebody else's can do anything with it.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Collection
from datetime import timedelta
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from core import audit, keys
from core.db import lock
from core.errors import InvalidKey
from core.keys import Account
from core.models import ApiKey, Visit, database_now, new_id

LASTS = timedelta(hours=12)
MOST_OF_A_KEY = 100
"""Open at once; the oldest end first."""


def begin(session: Session, owner: Account) -> tuple[Visit, str]:
    """A visit in the name of the owner's key, and its token, which can't be had again."""
    # Two that end the same oldest ones would each wait for the other, or end too few.
    lock(session, f"visits {owner.key_id}")
    token = secrets.token_urlsafe(32)
    visit = Visit(id=new_id("visit"), key_id=owner.key_id, digest=keys.digest_of(token), expires_at=0.0)
    session.add(visit)
    session.flush()
    visit.expires_at = visit.created_at + LASTS.total_seconds()
    newest = select(Visit.id).where(Visit.key_id == owner.key_id).order_by(Visit.created_at.desc(), Visit.id)
    over = session.scalars(newest.offset(MOST_OF_A_KEY)).all()
    session.execute(delete(Visit).where(Visit.id.in_(over)))
    audit.record(session, owner, "visit.begun", visit.id)
    session.flush()
    return visit, f"{visit.id}.{token}"


def account(session: Session, token: str) -> Account:
    """Whose visit it is; InvalidKey if it is over, or its key opens nothing any more."""
    return _open(session, token)[1]


def end(session: Session, token: str) -> Visit:
    """Sign the browser out."""
    visit, owner = _open(session, token)
    session.delete(visit)
    audit.record(session, owner, "visit.ended", visit.id)
    session.flush()
    return visit


def closed(session: Session, visit_ids: Collection[str]) -> set[str]:
    """Which of these are over."""
    still = select(Visit.id).where(Visit.id.in_(visit_ids), Visit.expires_at > database_now())
    return set(visit_ids) - set(session.scalars(still)) if visit_ids else set()


def forget(session: Session) -> None:
    """Let go of those that are over."""
    session.execute(delete(Visit).where(Visit.expires_at < database_now()))


def _open(session: Session, token: str) -> tuple[Visit, Account]:
    id_, _, secret = token.partition(".")
    query: Any = select(Visit, ApiKey).select_from(Visit).join(ApiKey, ApiKey.id == Visit.key_id)
    found = session.execute(
        keys.good(query).where(Visit.id == id_[:64], Visit.expires_at > database_now())
    ).one_or_none()
    # In constant time, so that the time tells nothing about the digest.
    if found is None or not hmac.compare_digest(found.Visit.digest, keys.digest_of(secret)):
        raise InvalidKey("This browser is not signed in here any more: sign in again with `POST /v1/visits`.")
    key = found.ApiKey
    scopes = frozenset({"read"})
    return found.Visit, Account(key.project_id, key.id, scopes, visit_id=found.Visit.id)
