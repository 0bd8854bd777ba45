"""What a new job stands on, looked at in one statement and kept until the commit: its project and its files.

Beside them stand what costs a statement of its own otherwise: whether another try made the job, and who goes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from core import files, projects, tries
from core.ahead import AHEAD_OF_A_NEW_ONE
from core.db import directly
from core.keys import Account
from core.models import File, Job, Project
from core.projects import Limits
from core.spec import JobSpec
from core.tries import Try


@dataclass(frozen=True)
class Admission:
    """A project that takes new jobs, and whose files are there."""

    project: Limits
    ahead: int | None
    """How many jobs wait that go before a new one; None where nobody has looked."""


def admit(session: Session, owner: Account, spec: JobSpec, this: Try) -> Admission | Job:
    """Let the owner's project and the files that `spec` names stay until the commit; or the job of an earlier try.

    Raises what `projects.active` and `files.keep` raise.
    """
    named = sorted({id_ for _, id_ in spec.files()})
    asked = {"files": named, "project": owner.project_id, "priority": spec.priority, **tries.first(session, this)}
    rows = directly(session, _ALL, asked).all()
    if len(rows) == len(named) and rows[0].archived_at is None:
        found = rows[0]
        if found.owed is not None:
            return tries.settled(session, found.owed)
        return Admission(Limits(owner.project_id, found.gpu_hours, found.storage_bytes), found.ahead)
    # Something is missing. Asked one by one, they say what.
    if earlier := tries.made_before(session, owner, this):
        return earlier
    project = projects.active(session, owner, owner.project_id)
    files.keep(session, owner, spec.files())
    return Admission(project, None)


_ALL = (
    select(
        Project.archived_at,
        Project.gpu_hours,
        Project.storage_bytes,
        tries.OWED.scalar_subquery().label("owed"),
        AHEAD_OF_A_NEW_ONE.scalar_subquery().label("ahead"),
    )
    .join(File, File.project_id == Project.id)
    .where(Project.id == bindparam("project"), File.id.in_(bindparam("files", expanding=True)))
    # In order, so that two who want the same files do not wait for each other.
    .order_by(File.id)
    .with_for_update(read=True, of=(Project, File))
)
