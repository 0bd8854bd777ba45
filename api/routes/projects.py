"""Projects: who manages the organisation makes and closes them; everyone sees their own."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from api.deps import AdminDep, AfterDep, LimitDep, OwnerDep, ReadingDep, SessionDep
from api.errors import errors
from api.schemas import ProjectList, ProjectOut
from core import jobs, projects
from core.errors import Forbidden, InvalidMove, NotFound

router = APIRouter(prefix="/v1/projects", tags=["projects"])

ProjectId = Annotated[str, Path(description="Id of the project.", examples=["proj-4f1c09a1b2c3d4e5f6a7b8c9"])]
ProjectName = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f]+$")]


class NewProject(BaseModel):
    """A project to be made."""

    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)
    name: ProjectName
    """What people call it; need not be unique."""


class ProjectChange(BaseModel):
    """What should be different; what is left out stays."""

    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)
    name: ProjectName | None = None


@router.post("", status_code=201, responses=errors(Forbidden))
def create(new: NewProject, owner: AdminDep, session: SessionDep) -> ProjectOut:
    """Make a project. It has no keys yet: make them with `POST /v1/keys` and its id."""
    return ProjectOut.of(projects.create(session, owner, new.name))


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
    return ProjectList(data=[ProjectOut.of(project) for project in page.data], has_more=page.has_more)


@router.get("/{project_id}", responses=errors(NotFound))
def get_project(project_id: ProjectId, owner: OwnerDep, session: ReadingDep) -> ProjectOut:
    """Get a project."""
    return ProjectOut.of(projects.get(session, owner, project_id))


@router.patch("/{project_id}", responses=errors(NotFound, Forbidden))
def change(project_id: ProjectId, wanted: ProjectChange, owner: AdminDep, session: SessionDep) -> ProjectOut:
    """Change a project."""
    project = projects.get(session, owner, project_id)
    if wanted.name is not None:
        project = projects.rename(session, owner, project_id, wanted.name)
    return ProjectOut.of(project)


@router.post("/{project_id}/archive", responses=errors(NotFound, Forbidden, InvalidMove))
def archive(project_id: ProjectId, owner: AdminDep, session: SessionDep) -> ProjectOut:
    """Archive a project: its keys open nothing from now on, and its jobs are cancelled. What it made stays."""
    project = projects.archive(session, owner, project_id)
    jobs.cancel_all(session, owner, project.id)
    return ProjectOut.of(project)
