"""Fine-tuning in OpenAI's shapes, over the same jobs as `/v1/jobs`: what is made in one dialect is read in both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query
from pydantic import ConfigDict, Field
from sqlalchemy.orm import Session

from api.deps import (
    AdminDep,
    AfterDep,
    CreatingDep,
    LimitDep,
    OwnerDep,
    ReadingDep,
    SessionDep,
    SubmitterDep,
)
from api.errors import errors
from api.labels import wanted_by
from api.openai_shapes import (
    FineTuningCheckpointList,
    FineTuningCheckpointOut,
    FineTuningEventList,
    FineTuningEventOut,
    FineTuningJobList,
    FineTuningJobOut,
    PermissionList,
    PermissionOut,
    ends,
)
from api.schemas import DeletedOut
from api.trips import OneTrip, few_at_once, in_place
from core import checkpoints, events, jobs, openai_jobs, result_files, scheduler, sharing
from core.described import Described
from core.errors import (
    DomainError,
    Forbidden,
    InvalidModel,
    InvalidMove,
    InvalidRequest,
    InvalidSpec,
    NotFound,
    NotReady,
    QuotaExceeded,
)
from core.keys import Account
from core.models import Job
from core.openai_spec import FineTuneAsk
from core.paging import Order

router = APIRouter(prefix="/v1/fine_tuning", tags=["fine-tuning"], route_class=OneTrip)

ORDERS: dict[str, Order] = {"ascending": "asc", "descending": "desc"}

JobId = Annotated[str, Path(alias="job_id", description="Id of the job.", examples=["ftjob-4f1c09a1b2c3d4e5f6a7b8c9"])]
Name = Annotated[str, Path(description="Id of a checkpoint.")]


def fine_tune(session: Session, owner: Account, job_id: str) -> str:
    """The id, once it is sure that there is such a job, and that it is one that this dialect has words for."""
    job = jobs.get(session, owner, job_id)
    openai_jobs.check_is_fine_tune(job)
    return job.id


def known_fine_tune(job_id: JobId, owner: OwnerDep, session: ReadingDep) -> str:
    """`fine_tune`, for routes that read."""
    return fine_tune(session, owner, job_id)


FineTuneDep = Annotated[str, Depends(in_place(known_fine_tune))]


def shown(session: Session, job: Job, *, ahead: int | None = None) -> FineTuningJobOut:
    file = result_files.of_jobs(session, [job.id]).get(job.id)
    prospect = scheduler.prospect(session, job, ahead=ahead)
    return FineTuningJobOut.of(job, now=time.time(), result_file=file, prospect=prospect)


def shown_all(session: Session, found: Sequence[Job]) -> list[FineTuningJobOut]:
    """The position in the queue is left out: it costs a count for each."""
    files, now = result_files.of_jobs(session, [job.id for job in found]), time.time()
    return [FineTuningJobOut.of(job, now=now, result_file=files.get(job.id)) for job in found]


@router.post("/jobs", responses=errors(InvalidSpec, InvalidModel, NotFound, NotReady, Forbidden, QuotaExceeded))
@few_at_once
def create(ask: FineTuneAsk, creating: CreatingDep) -> FineTuningJobOut:
    """Start a fine-tune, in OpenAI's words.

    What `POST /v1/jobs` takes and OpenAI has no word for may stand beside: `priority`, `max_runtime`, `data`,
    `training`, `parallel`, `recompute`, `resources`, `artifacts` (the openai client sends them as `extra_body`). A
    create that is tried again makes no second job, if it carries the same `Idempotency-Key`, or is a retry of the
    openai client with the same body.
    """
    try:
        made = jobs.submit(
            creating.session,
            creating.owner,
            openai_jobs.spec_of(ask),
            settings=creating.settings,
            reading=creating.reading,
            this=creating.tried(ask),
            prefix="ftjob",
        )
    except DomainError as error:
        raise openai_jobs.blamed(error, ask) from error
    openai_jobs.check_is_fine_tune(made.job)
    return shown(creating.session, made.job, ahead=made.ahead)


@router.get("/jobs", responses=errors(NotFound))
def list_jobs(
    owner: OwnerDep,
    session: ReadingDep,
    wanted: Annotated[dict[str, str], Depends(wanted_by("metadata"))],
    after: AfterDep = None,
    limit: LimitDep = 20,
    metadata: Annotated[Literal["null"] | None, Query(description="null: only jobs without any metadata.")] = None,
) -> FineTuningJobList:
    """List fine-tunes, newest first, also those that were made by `POST /v1/jobs`; filter by `metadata[key]=value`."""
    page = jobs.page(
        session, owner, after=after, limit=limit, labels=wanted, unlabelled=metadata is not None, from_base=True
    )
    return FineTuningJobList(data=shown_all(session, page.data), has_more=page.has_more, **ends(page.data))


@router.get("/jobs/{job_id}", responses=errors(NotFound))
def get_job(job_id: FineTuneDep, owner: OwnerDep, session: ReadingDep) -> FineTuningJobOut:
    """Get a fine-tune."""
    return shown(session, jobs.get(session, owner, job_id))


@router.post("/jobs/{job_id}/cancel", responses=errors(NotFound, InvalidMove, Forbidden))
def cancel(job_id: JobId, owner: SubmitterDep, session: SessionDep) -> FineTuningJobOut:
    """Cancel a fine-tune. Its `status` is cancelled once no process of it is left."""
    return shown(session, jobs.cancel(session, owner, fine_tune(session, owner, job_id)))


@router.post("/jobs/{job_id}/pause", responses=errors(NotFound, InvalidMove, Forbidden))
def pause(job_id: JobId, owner: SubmitterDep, session: SessionDep) -> FineTuningJobOut:
    """Pause a fine-tune. It saves its progress, gives its slots back, and is `queued` until somebody resumes it."""
    return shown(session, jobs.pause(session, owner, fine_tune(session, owner, job_id)))


@router.post("/jobs/{job_id}/resume", responses=errors(NotFound, InvalidMove, Forbidden))
def resume(job_id: JobId, owner: SubmitterDep, session: SessionDep) -> FineTuningJobOut:
    """Resume a paused fine-tune from its newest checkpoint."""
    return shown(session, jobs.resume(session, owner, fine_tune(session, owner, job_id)))


@router.get("/jobs/{job_id}/events", responses=errors(NotFound))
def list_events(
    job_id: FineTuneDep, owner: OwnerDep, session: ReadingDep, after: AfterDep = None, limit: LimitDep = 20
) -> FineTuningEventList:
    """List what happened to a fine-tune, newest first."""
    job = jobs.get(session, owner, job_id)
    before = None if after is None else openai_jobs.seq_of(job, after)
    page = events.page(session, job, after=before, limit=limit, order="desc")
    data = [FineTuningEventOut.of(event, job) for event in page.data]
    return FineTuningEventList(data=data, has_more=page.has_more, **ends(data))


@router.get("/jobs/{job_id}/checkpoints", responses=errors(NotFound))
def list_checkpoints(
    job_id: FineTuneDep, owner: OwnerDep, session: ReadingDep, after: AfterDep = None, limit: LimitDep = 10
) -> FineTuningCheckpointList:
    """List a fine-tune's checkpoints, newest first. Each is a model by its id."""
    page = checkpoints.page(session, jobs.get(session, owner, job_id), after=after, limit=limit)
    data = [FineTuningCheckpointOut.of(checkpoint) for checkpoint in page.data]
    return FineTuningCheckpointList(data=data, has_more=page.has_more, **ends(data))


class PermissionsAsk(Described):
    """Who is to be let in."""

    model_config = ConfigDict(extra="forbid")

    project_ids: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=64)]], Field(min_length=1, max_length=100)
    ]
    """Ids of the projects that may use it."""


@router.post("/checkpoints/{checkpoint}/permissions", responses=errors(NotFound, Forbidden))
def grant(checkpoint: Name, ask: PermissionsAsk, owner: AdminDep, session: SessionDep) -> PermissionList:
    """Let other projects use a checkpoint: to sample from, and to start jobs with. For admins of the organisation."""
    data = [PermissionOut.of(one) for one in sharing.grant(session, owner, checkpoint, ask.project_ids)]
    return PermissionList(data=data, has_more=False, **ends(data))


@router.get("/checkpoints/{checkpoint}/permissions", responses=errors(NotFound, Forbidden))
def list_permissions(
    checkpoint: Name,
    owner: AdminDep,
    session: ReadingDep,
    after: AfterDep = None,
    limit: LimitDep = 10,
    order: Annotated[Literal["ascending", "descending"], Query(description="By time.")] = "descending",
    project_id: Annotated[str | None, Query(max_length=64, description="Only that of this project.")] = None,
) -> PermissionList:
    """List which projects may use a checkpoint. For admins of the organisation."""
    page = sharing.page(
        session, owner, checkpoint, after=after, limit=limit, order=ORDERS[order], project_id=project_id
    )
    data = [PermissionOut.of(one) for one in page.data]
    return PermissionList(data=data, has_more=page.has_more, **ends(data))


@router.delete("/checkpoints/{checkpoint}/permissions/{permission_id}", responses=errors(NotFound, Forbidden))
def revoke(
    checkpoint: Name,
    permission_id: Annotated[str, Path(description="Id of the permission.")],
    owner: AdminDep,
    session: SessionDep,
) -> DeletedOut:
    """Take a permission back; jobs that were made with it go on. For admins of the organisation."""
    sharing.revoke(session, owner, checkpoint, permission_id)
    return DeletedOut(id=permission_id, object="checkpoint.permission")


@router.post("/alpha/graders/run", include_in_schema=False)
@router.post("/alpha/graders/validate", include_in_schema=False)
def graders(owner: OwnerDep) -> None:
    """Part of reinforcement fine-tuning."""
    raise InvalidRequest(
        "Graders belong to reinforcement fine-tuning, which this server does not do; fine-tune with the method "
        "supervised, or dpo with preference pairs.",
        param="grader",
    )
