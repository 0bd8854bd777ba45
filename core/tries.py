"""Tries of one create: a client that got no answer asks again, in any order of arrival, and one job is made.

A client that names its create (`Idempotency-Key`) is believed for ever, within its project. The openai client names
none, but counts its tries: what says that it is a retry is the same as what its key asked before. A retry that made a
job is owed its first try, once: that was here when the job was made, or was held up on its way and comes soon after.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any, Self

from sqlalchemy import ColumnElement, Float, Select, and_, bindparam, or_, select, text, update
from sqlalchemy.orm import Session

from core.db import directly
from core.errors import InvalidSpec
from core.keys import Account
from core.models import OWES_A_TRY, Job, database_now
from core.states import TERMINAL

RETRY_WINDOW = timedelta(minutes=10)
"""How long an identical create that says it is a retry is taken for one."""
BELATED = timedelta(minutes=1)
"""How long the first try of a retry that made a job may be held up on its way, and arrive after that was answered."""


@dataclass(frozen=True)
class Try:
    """One of them."""

    idempotency_key: str | None = None
    digest: str | None = None
    """Of the body, and of who sent it where it has no name; None is no other's equal."""
    sender_digest: str | None = None
    """Of the body and of who sent it. So were the digests of named ones, too, before names were the project's."""
    number: int = 0
    """How many tries its client made before."""
    came_at: float | None = None
    """On this host's monotonic clock."""
    may_be_belated: bool = True
    """Whether a retry's first try may have been nowhere yet: not where its key was lately told to come again later."""
    first_was_here: bool = False
    """Of a retry: its first try was answered, so that none is still to come."""

    @classmethod
    def of(
        cls,
        owner: Account,
        body: bytes,
        *,
        idempotency_key: str | None = None,
        number: int = 0,
        came_at: float | None = None,
        may_be_belated: bool = True,
    ) -> Self:
        sent = hashlib.sha256(owner.key_id.encode() + b"\0" + body).hexdigest()
        digest = sent if idempotency_key is None else hashlib.sha256(body).hexdigest()
        return cls(idempotency_key, digest, sent, number, came_at, may_be_belated=may_be_belated)

    @property
    def may_be_first(self) -> bool:
        """Whether it may be that nothing was asked before, so that only a look under the lock tells."""
        return self.idempotency_key is None and self.number == 0


UNIQUE = Try()
"""A create that nobody tries twice."""


def made_before(session: Session, owner: Account, this: Try) -> Job | None:
    """The job that another try of the same create made. InvalidSpec where its name made one from another body."""
    if this.idempotency_key is not None:
        job = _found(session, _OF_NAME, {"project": owner.project_id, "name": this.idempotency_key})
        if job is not None and job.request_digest not in {None, this.digest, this.sender_digest}:
            raise InvalidSpec(
                f"The Idempotency-Key {this.idempotency_key!r} made job {job.id} from another body; use a new key.",
                param="Idempotency-Key",
            )
        return job
    if this.digest is None:
        return None
    if this.number:
        same = {"project": owner.project_id, "digest": this.digest}
        return _found(session, _RETRIED, same | {"waited": RETRY_WINDOW.total_seconds()})
    owed = directly(session, OWED, {"project": owner.project_id, **first(session, this)}).scalar()
    return None if owed is None else settled(session, owed)


def first(session: Session, this: Try) -> dict[str, Any]:
    """What `OWED` asks of this try beside its project; what nobody is owed where it is no first one."""
    if this.idempotency_key is not None or this.number or this.came_at is None:
        return {"digest": None, "waited": 0.0, "belated": 0.0}
    # Where the transaction has to wait until it may begin, it does so before it is reckoned how long ago this try came.
    session.connection()
    waited = monotonic() - this.came_at
    belated = BELATED.total_seconds() if this.may_be_belated else 0.0
    return {"digest": this.digest, "waited": waited, "belated": max(waited, belated)}


def settled(session: Session, job_id: str) -> Job:
    """The job of a retry, now that its first try has been here: the next one is another wish."""
    directly(session, _SETTLED, {"settled": job_id})
    return session.get_one(Job, job_id)


def _found(session: Session, statement: Select[str], values: Mapping[str, Any]) -> Job | None:
    # Without objects: as a rule there is none to find.
    job_id = directly(session, statement, values).scalar()
    return None if job_id is None else session.get(Job, job_id)


_MINE = select(Job.id).where(Job.project_id == bindparam("project"))
_OF_NAME = _MINE.where(Job.idempotency_key == bindparam("name"))
_MADE_OF_IT = _MINE.where(Job.request_digest == bindparam("digest")).order_by(Job.created_at.desc()).limit(1)


def _within(name: str) -> ColumnElement[bool]:
    return Job.created_at >= database_now() - bindparam(name, type_=Float)


_RETRIED = _MADE_OF_IT.where(_within("waited"))
# Who sees a job end, and asks for the same again, wants another.
_GOES_ON = and_(*(Job.state != state for state in sorted(TERMINAL)))
OWED = _MADE_OF_IT.where(text(OWES_A_TRY), _within("belated"), or_(_within("waited"), _GOES_ON))
"""The job of a retry whose first try has not been here."""
_SETTLED = update(Job).where(Job.id == bindparam("settled")).values(made_by_retry=0)
