"""Projects of the organisation that this service is: who may see them, and what changes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from core import audit, hints, paging
from core.db import directly
from core.errors import Forbidden, InvalidMove, InvalidRequest, NotFound
from core.models import Project, database_now, new_id
from core.paging import Page

if TYPE_CHECKING:
    from core.keys import Account

ORGANIZATION = "org-default"
"""Id of the one organisation that an installation is."""
DEFAULT_PROJECT = "proj-default"
"""The first project. Admin keys of it manage the organisation; it can't be archived."""


def create(session: Session, owner: Account, name: str, wished: Mapping[str, Any]) -> Project:
    """A new project with these quotas and settings; for who manages the organisation."""
    require_organization(owner)
    project = Project(id=new_id("proj"), name=name, **wished)
    session.add(project)
    session.flush()
    audit.record(session, owner, "project.created", project.id, project_id=project.id, name=name, **wished)
    return project


def get(session: Session, owner: Account, project_id: str) -> Project:
    """The owner's project, or any of them for who manages the organisation."""
    return _one(session, owner, project_id)


def page(
    session: Session, owner: Account, *, after: str | None = None, limit: int = 20, include_archived: bool = False
) -> Page[Project]:
    """Projects that the owner may see, newest first."""
    query = select(Project)
    if not owner.manages_organization:
        query = query.where(Project.id == owner.project_id)
    where = [] if include_archived else [Project.archived_at.is_(None)]
    return paging.by_age(session, query, Project.created_at, Project.id, after=after, limit=limit, where=where)


@dataclass(frozen=True)
class Limits:
    """What a project may use; None: as much as it likes."""

    id: str
    gpu_hours: float | None
    storage_bytes: int | None


def active(session: Session, owner: Account, project_id: str) -> Limits:
    """A project that `get` gives, as far as what is new in it is concerned. It stays unarchived until the commit."""
    found = directly(session, _SHARED, {"project": project_id}).one_or_none() if _may_see(owner, project_id) else None
    if found is None:
        raise _missing(project_id)
    if found.archived_at is not None:
        raise InvalidRequest(f"Project {project_id} is archived; nothing new can be made in it.", param="project")
    return Limits(project_id, found.gpu_hours, found.storage_bytes)


_SHARED = (
    select(Project.archived_at, Project.gpu_hours, Project.storage_bytes)
    .where(Project.id == bindparam("project"))
    .with_for_update(read=True)
)


def change(session: Session, owner: Account, project_id: str, wished: Mapping[str, Any]) -> Project:
    """Change its name, quotas or settings; for who manages the organisation."""
    project = _one(session, owner, project_id, to_change=True)
    require_organization(owner)
    changed = {field: value for field, value in wished.items() if getattr(project, field) != value}
    if changed:
        for field, value in changed.items():
            setattr(project, field, value)
        audit.record(session, owner, "project.updated", project.id, project_id=project.id, **changed)
        session.flush()
        # What waited for the old limit may start under the new one.
        hints.nudge(session)
    return project


def archive(session: Session, owner: Account, project_id: str) -> Project:
    """Close a project for good: its keys open nothing from the commit on. Archiving twice changes nothing."""
    project = _one(session, owner, project_id, to_change=True)
    require_organization(owner)
    if project.id == DEFAULT_PROJECT:
        raise InvalidMove("The first project can't be archived: its admin keys manage the organisation.")
    if project.archived_at is None:
        project.archived_at = session.scalar(select(database_now()))
        audit.record(session, owner, "project.archived", project.id, project_id=project.id)
        session.flush()
    return project


def _one(session: Session, owner: Account, project_id: str, *, to_change: bool = False) -> Project:
    query = select(Project).where(Project.id == project_id)
    if to_change:
        # Whatever refers to a project may go on meanwhile.
        query = query.with_for_update(key_share=True).execution_options(populate_existing=True)
    project = session.scalars(query).one_or_none() if _may_see(owner, project_id) else None
    if project is None:
        raise _missing(project_id)
    return project


def _may_see(owner: Account, project_id: str) -> bool:
    return project_id == owner.project_id or owner.manages_organization


def _missing(project_id: str) -> NotFound:
    """In words that are the same for a project that isn't there and for one that isn't theirs."""
    return NotFound(f"There is no project {project_id!r}.", param="project")


def require_organization(owner: Account) -> None:
    """Raise Forbidden unless the owner manages the organisation."""
    if not owner.manages_organization:
        raise Forbidden(
            f"Only a key of {DEFAULT_PROJECT} with the scope 'admin' may do this: it concerns the organisation."
        )
