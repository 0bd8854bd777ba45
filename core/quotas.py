"""What a project may use and what it uses, counted from rows; who acts on it asks here.

GPU-hours are slot-hours that were really held, in this calendar month (UTC). Storage is what files, checkpoints,
results and bases from a hub have in it, and parts of uploads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, case, func, select
from sqlalchemy.orm import Session

from core.db import Database
from core.errors import QuotaExceeded
from core.models import (
    Artifact,
    Checkpoint,
    File,
    Holding,
    HubDownload,
    Job,
    Model,
    Project,
    Upload,
    UploadPart,
    database_now,
)
from core.projects import Limits
from core.states import HELD

NAMES = ("gpu_hours", "concurrent_jobs", "storage_bytes")
"""Of the columns of a project, and of the fields of `Usage`."""


@dataclass(frozen=True)
class Usage:
    """What a project uses at this moment."""

    gpu_hours: float = 0.0
    concurrent_jobs: int = 0
    storage_bytes: int = 0


@dataclass(frozen=True)
class Allowance:
    """What the scheduler may still start of a project's."""

    jobs: int | None = None
    """So many more at once; None: any number."""
    hours_spent: float | None = None
    """The GPU-hours that it had, where they are used up: nothing of it starts."""
    at_once: int | None = None
    """How many jobs it may run at once."""

    @property
    def is_used_up(self) -> bool:
        """Whether nothing more may start."""
        return self.hours_spent is not None or (self.jobs is not None and self.jobs <= 0)


def usage(session: Session, project_ids: Collection[str]) -> dict[str, Usage]:
    """What each of these projects uses."""
    hours = gpu_hours(session, project_ids)
    held = _by_project(session, _held(), project_ids)
    stored = storage_bytes(session, project_ids)
    return {id_: Usage(hours.get(id_, 0.0), held.get(id_, 0), stored.get(id_, 0)) for id_ in project_ids}


def gpu_hours(session: Session, project_ids: Collection[str], *, now: float | None = None) -> dict[str, float]:
    """Hours of slots that each project has held since the month began. Those held now count up to now."""
    now = session.scalar(select(database_now())) or 0.0 if now is None else now
    begin = month_begin(now)
    started: ColumnElement[float] = case((Holding.started_at < begin, begin), else_=Holding.started_at)
    seconds = func.sum(Holding.slots * (func.coalesce(Holding.ended_at, now) - started))
    query = select(Holding.project_id, seconds).where(Holding.ended_at.is_(None) | (Holding.ended_at > begin))
    found = _by_project(session, query.group_by(Holding.project_id), project_ids)
    return {id_: float(total) / 3600 for id_, total in found.items()}


def month_begin(now: float) -> float:
    """When the calendar month of `now` began, in UTC."""
    return datetime.fromtimestamp(now, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()


def storage_bytes(session: Session, project_ids: Collection[str]) -> dict[str, int]:
    """Bytes that each project has in storage."""
    totals: dict[str, int] = {}
    for query in _STORED:
        for id_, size in _by_project(session, query, project_ids).items():
            totals[id_] = totals.get(id_, 0) + int(size)
    return totals


def require_room_for_jobs(session: Session, project: Limits) -> None:
    """Raise QuotaExceeded where a job could do no more than wait, or nothing that it makes would fit."""
    if project.gpu_hours is not None and (used := gpu_hours(session, [project.id]).get(project.id, 0.0)) >= (
        project.gpu_hours
    ):
        raise QuotaExceeded(
            f"The project has used {used:.2f} of its {project.gpu_hours:g} GPU-hours of this month. They begin anew on"
            " the 1st (UTC); an admin of the organisation can give it more."
        )
    if project.storage_bytes is not None and storage_bytes(session, [project.id]).get(project.id, 0) >= (
        project.storage_bytes
    ):
        raise _storage_full(project.storage_bytes)


def storage_left(session: Session, project_id: str) -> int | None:
    """Bytes that the project may still store, less than 0 where it has more than it may; None: no limit."""
    project = session.get_one(Project, project_id)
    if project.storage_bytes is None:
        return None
    return project.storage_bytes - storage_bytes(session, [project_id]).get(project_id, 0)


def take_storage(session: Session, project_id: str, size: int) -> None:
    """Raise QuotaExceeded unless `size` bytes more may be stored. Nobody else takes any until the commit."""
    query = (
        select(Project)
        .where(Project.id == project_id)
        .with_for_update(key_share=True)
        .execution_options(populate_existing=True)
    )
    project = session.scalars(query).one()
    left = storage_left(session, project_id)
    if left is not None and size > left:
        raise _storage_full(project.storage_bytes or 0, left=left)


def within_storage(db: Database, project_id: str, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """`chunks`, until they are more than the project may still store; then QuotaExceeded. No transaction stays open."""
    with db.reading() as session:
        left = storage_left(session, project_id)
        full = None if left is None else storage_full(session, project_id)
    for chunk in chunks:
        if left is not None and full is not None:
            left -= len(chunk)
            if left < 0:
                raise full
        yield chunk


def storage_full(session: Session, project_id: str) -> QuotaExceeded:
    """What to raise where more than `storage_left` comes in."""
    quota = session.get_one(Project, project_id).storage_bytes or 0
    return _storage_full(quota, left=storage_left(session, project_id))


def allowances(session: Session) -> dict[str, Allowance]:
    """What the scheduler may start of those projects that have a limit."""
    limited = session.scalars(
        select(Project).where(Project.concurrent_jobs.is_not(None) | Project.gpu_hours.is_not(None))
    ).all()
    if not limited:
        return {}
    held = _by_project(session, _held(), [project.id for project in limited])
    hours = gpu_hours(session, [project.id for project in limited if project.gpu_hours is not None])
    return {
        project.id: Allowance(
            jobs=None if project.concurrent_jobs is None else project.concurrent_jobs - held.get(project.id, 0),
            hours_spent=project.gpu_hours if _is_spent(project, hours) else None,
            at_once=project.concurrent_jobs,
        )
        for project in limited
    }


def spent(session: Session) -> list[str]:
    """The projects whose GPU-hours of this month are used up."""
    limited = session.scalars(select(Project).where(Project.gpu_hours.is_not(None)).order_by(Project.id)).all()
    hours = gpu_hours(session, [project.id for project in limited]) if limited else {}
    return [project.id for project in limited if _is_spent(project, hours)]


def _is_spent(project: Project, hours: Mapping[str, float]) -> bool:
    return project.gpu_hours is not None and hours.get(project.id, 0.0) >= project.gpu_hours


def _storage_full(quota: int, *, left: int | None = None) -> QuotaExceeded:
    room = "" if left is None else f", of which {max(left, 0):,} are left"
    return QuotaExceeded(
        f"The project may store {quota:,} bytes{room}: delete files that nothing needs any more. An admin of the"
        " organisation can give it more."
    )


def _held() -> Select[Any, Any]:
    return select(Job.project_id, func.count()).where(Job.state.in_(HELD)).group_by(Job.project_id)


_STORED: tuple[Select[Any, Any], ...] = (
    select(File.project_id, func.sum(File.bytes)).group_by(File.project_id),
    select(Upload.project_id, func.sum(UploadPart.bytes)).join(UploadPart).group_by(Upload.project_id),
    select(Job.project_id, func.sum(Checkpoint.bytes)).join(Checkpoint).group_by(Job.project_id),
    select(Job.project_id, func.sum(Artifact.bytes)).join(Artifact).group_by(Job.project_id),
    select(Model.project_id, func.sum(HubDownload.total_bytes))
    .join(HubDownload)
    .where(HubDownload.status != "failed")
    .group_by(Model.project_id),
)
"""Project and bytes, of each kind of thing that lies in storage."""


def _by_project(session: Session, query: Select[Any, Any], project_ids: Collection[str]) -> dict[str, Any]:
    """`query`'s second column by its first, which is the project; those without a row are left out."""
    project: ColumnElement[str] = next(iter(query.selected_columns))
    return {id_: value for id_, value in session.execute(query.where(project.in_(project_ids)))}
