"""A job's labels as rows, by which pages of jobs are found. The job's own column is what is shown."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Select, bindparam, delete, insert, select
from sqlalchemy.orm import Session, aliased

from core.db import directly
from core.models import Job, JobLabel


def write(session: Session, job: Job) -> None:
    """Let the job be found by the labels that it has now, and by no others."""
    directly(session, _FORGET, {"job": job.id})
    add(session, job)


def add(session: Session, job: Job) -> None:
    """Let a new job be found by its labels."""
    if job.labels:
        of_job = {"job_id": job.id, "project_id": job.project_id, "created_at": job.created_at}
        rows = [{"name": name, "value": value, **of_job} for name, value in job.labels.items()]
        directly(session, _ADD, rows)


_FORGET = delete(JobLabel).where(JobLabel.job_id == bindparam("job"))
_ADD = insert(JobLabel)


def having(project_id: str, labels: Mapping[str, str]) -> Select[Job]:
    """The project's jobs that have all of these labels, of which there is one.

    Read along the index of the first, which has the jobs' times beside it, so that they come in order.
    """
    (name, value), *others = labels.items()
    query = (
        select(Job)
        .join(JobLabel, JobLabel.job_id == Job.id)
        .where(JobLabel.project_id == project_id, JobLabel.name == name, JobLabel.value == value)
    )
    for name, value in others:
        other = aliased(JobLabel)
        query = query.where(
            select(other.job_id)
            .where(other.job_id == JobLabel.job_id, other.name == name, other.value == value)
            .exists()
        )
    return query
