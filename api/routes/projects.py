"""Projects: who manages the organisation makes and closes them; everyone sees their own."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import ConfigDict, Field
from sqlalchemy.orm import Session

from api.deps import AdminDep, AfterDep, LimitDep, OwnerDep, ReadingDep, SessionDep
from api.errors import errors
from api.names import Name
from api.schemas import ProjectList, ProjectOut
from api.trips import OneTrip
from core import jobs, projects, quotas
from core.described import Described
from core.errors import Forbidden, InvalidMove, NotFound
from core.models import Project
from core.preemption import Preemption

router = APIRouter(prefix="/v1/projects", tags=["projects"], route_class=OneTrip)

ProjectId = Annotated[str, Path(description="Id of the project.", examples=["proj-4f1c09a1b2c3d4e5f6a7b8c9"])]


class QuotasAsk(Described):
    """What a project may use. Null is no limit; what is left out stays."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    gpu_hours: float | None = Field(None, ge=0, le=1e9)
    """Hours of GPUs (or CPU slots) in a calendar month, UTC."""
    concurrent_jobs: int | None = Field(None, ge=0, le=10**9)
    """Jobs that hold GPUs at once; others wait in the queue."""
    storage_bytes: int | None = Field(None, ge=0, le=2**60)
    """Of files, checkpoints and results."""


class NewProject(Described):
    """A project to be made."""

    model_config = ConfigDict(strict=True, extra="forbid")
    name: Name
    """What people call it; need not be unique."""
    quotas: QuotasAsk = QuotasAsk()
    preemption: Preemption = "never"
    """Whose jobs of higher priority may stop this project's jobs, which then save their state and wait for their turn
    again: nobody's, those of its own, or those of any project."""

    def wished(self) -> dict[str, Any]:
        return self.quotas.model_dump(exclude_unset=True) | {"preemption": self.preemption}


class ProjectChange(Described):
    """What should be different; what is left out stays."""

    model_config = ConfigDict(strict=True, extra="forbid")
    name: Name | None = None
    quotas: QuotasAsk | None = None
    preemption: Preemption | None = None
    """Whose jobs of higher priority may stop this project's jobs."""

    def wished(self) -> dict[str, Any]:
        said = {"name": self.name, "preemption": self.preemption}
        return {field: value for field, value in said.items() if value is not None} | (
            self.quotas.model_dump(exclude_unset=True) if self.quotas else {}
        )


@router.post("", status_code=201, responses=errors(Forbidden))
def create(new: NewProject, owner: AdminDep, session: SessionDep) -> ProjectOut:
    """Make a project. It has no keys yet: make them with `POST /v1/keys` and its id."""
    return shown(session, projects.create(session, owner, new.name, new.wished()))


@router.get("", responses=errors(NotFound))
def list_projects(
    owner: OwnerDep,
    session: ReadingDep,
    after: AfterDep = None,
    limit: LimitDep = 20,
    include_archived: Annotated[bool, Query(description="Also those that are closed.")] = False,
) -> ProjectList:
    """List projects, newest first: all of them for an admin of the organisation, else your own."""
    page = projects.page(session, owner, after=after, limit=limit, include_archived=include_archived)
    used = quotas.usage(session, [project.id for project in page.data])
    return ProjectList(data=[ProjectOut.of(one, used[one.id]) for one in page.data], has_more=page.has_more)


@router.get("/{project_id}", responses=errors(NotFound))
def get_project(project_id: ProjectId, owner: OwnerDep, session: ReadingDep) -> ProjectOut:
    """Get a project: what it may use, and what it uses."""
    return shown(session, projects.get(session, owner, project_id))


@router.patch("/{project_id}", responses=errors(NotFound, Forbidden))
def change(project_id: ProjectId, wanted: ProjectChange, owner: AdminDep, session: SessionDep) -> ProjectOut:
    """Change a project's name, quotas, or whose jobs may stop its own."""
    return shown(session, projects.change(session, owner, project_id, wanted.wished()))


@router.post("/{project_id}/archive", responses=errors(NotFound, Forbidden, InvalidMove))
def archive(project_id: ProjectId, owner: AdminDep, session: SessionDep) -> ProjectOut:
    """Archive a project: its keys open nothing from now on, and its jobs are cancelled. What it made stays.

    Of very many jobs the last ones are cancelled within seconds.
    """
    project = projects.archive(session, owner, project_id)
    jobs.cancel_all(session, owner, project.id)
    return shown(session, project)


def shown(session: Session, project: Project) -> ProjectOut:
    return ProjectOut.of(project, quotas.usage(session, [project.id])[project.id])
