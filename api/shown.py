"""A job as the API shows it: its row, with what other tables know about it."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from api.schemas import JobOut
from core import artifacts, scheduler
from core.models import Job


def shown(session: Session, job: Job, *, ahead: int | None = None) -> JobOut:
    """One job, whole. `ahead`: how many go before it, where that is known."""
    # What was never started has left nothing behind.
    found = artifacts.of_job(session, job.id) if job.attempt else ()
    return JobOut.of(job, artifacts=found, prospect=scheduler.prospect(session, job, ahead=ahead))


def shown_all(session: Session, jobs: Sequence[Job]) -> list[JobOut]:
    """A page of jobs. The position in the queue is left out: it costs a count for each."""
    found = artifacts.of_jobs(session, [job.id for job in jobs if job.attempt])
    return [JobOut.of(job, artifacts=found.get(job.id, ())) for job in jobs]
