"""Which other projects may use a checkpoint: for who manages the organisation, as no other sees more than one project.

That they then can is `catalog`'s business.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import select
from sqlalchemy.orm import Session

from core import audit, paging, projects
from core.db import lock
from core.errors import NotFound
from core.keys import Account
from core.models import Checkpoint, CheckpointPermission, Job, Project, new_id
from core.paging import Order, Page


def grant(session: Session, owner: Account, name: str, project_ids: Collection[str]) -> list[CheckpointPermission]:
    """Let these projects use a checkpoint; letting one twice changes nothing."""
    home = _home(session, owner, name)
    wanted = list(dict.fromkeys(project_ids))
    known = set(session.scalars(select(Project.id).where(Project.id.in_(wanted), Project.archived_at.is_(None))))
    if unknown := [id_ for id_ in wanted if id_ not in known]:
        raise NotFound(f"There is no active project {unknown[0]!r}.", param="project_ids")
    # Two grants of the same at once: the second finds the first's.
    lock(session, f"share {name}")
    of_it = select(CheckpointPermission).where(CheckpointPermission.checkpoint_id == name)
    had = {permission.project_id: permission for permission in session.scalars(of_it)}
    for project_id in wanted:
        if project_id not in had:
            permission = CheckpointPermission(id=new_id("cp"), checkpoint_id=name, project_id=project_id)
            session.add(permission)
            had[project_id] = permission
            _record(session, owner, home, "created", permission)
    session.flush()
    return [had[project_id] for project_id in wanted]


def page(
    session: Session,
    owner: Account,
    name: str,
    *,
    after: str | None = None,
    limit: int = 10,
    order: Order = "desc",
    project_id: str | None = None,
) -> Page[CheckpointPermission]:
    """Who may use a checkpoint, by age."""
    _home(session, owner, name)
    table = CheckpointPermission
    query = select(table).where(table.checkpoint_id == name)
    wanted = [] if project_id is None else [table.project_id == project_id]
    return paging.by_age(
        session, query, table.created_at, table.id, after=after, limit=limit, order=order, where=wanted
    )


def revoke(session: Session, owner: Account, name: str, permission_id: str) -> None:
    """From now on that project finds it no more; a job that it has made goes on."""
    home = _home(session, owner, name)
    permission = session.get(CheckpointPermission, permission_id)
    if permission is None or permission.checkpoint_id != name:
        raise NotFound(f"There is no permission {permission_id!r} for {name}.", param="permission_id")
    session.delete(permission)
    _record(session, owner, home, "deleted", permission)
    session.flush()


def _home(session: Session, owner: Account, name: str) -> str:
    """The project whose checkpoint it is."""
    projects.require_organization(owner)
    query = select(Job.project_id).join(Checkpoint, Job.id == Checkpoint.job_id).where(Checkpoint.id == name)
    project_id = session.scalars(query).one_or_none()
    if project_id is None:
        raise NotFound(
            f"There is no checkpoint {name!r}; GET /v1/fine_tuning/jobs/{{id}}/checkpoints lists a job's.",
            param="fine_tuned_model_checkpoint",
        )
    return project_id


def _record(session: Session, owner: Account, home: str, became: str, permission: CheckpointPermission) -> None:
    audit.record(
        session,
        owner,
        f"checkpoint_permission.{became}",
        permission.id,
        project_id=home,
        checkpoint=permission.checkpoint_id,
        **{audit.OTHER_PROJECT: permission.project_id},
    )
