"""What is said once a transaction has committed.

Each hint may be lost or doubled: the rows are the truth, and upkeep says it again.
"""

from __future__ import annotations

from typing import Protocol

from sqlalchemy.orm import Session

from core.db import after_commit


class Hints(Protocol):
    """Who hears: the queue and the bell in the service, a list in tests. None of these may raise or block for long."""

    def nudge(self) -> None:
        """There may be something to schedule."""

    def start(self, job_id: str, node: str) -> None:
        """`node` was given this job."""

    def ring(self, job_id: str) -> None:
        """Something about this job is new."""


def nudge(session: Session) -> None:
    """Wake the scheduler after the commit."""
    if hints := _hints(session):
        after_commit(session, hints.nudge, key="nudge")


def start(session: Session, job_id: str, node: str) -> None:
    """Tell `node` after the commit that it has this job."""
    if hints := _hints(session):
        after_commit(session, lambda: hints.start(job_id, node), key=f"start {job_id}")


def ring(session: Session, job_id: str) -> None:
    """Wake whoever watches this job after the commit."""
    if hints := _hints(session):
        after_commit(session, lambda: hints.ring(job_id), key=f"ring {job_id}")


def _hints(session: Session) -> Hints | None:
    return session.info.get("hints")
