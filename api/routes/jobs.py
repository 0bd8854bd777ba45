"""Jobs: submit one, follow it, take what it made."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Body, Depends, Header, Path, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse

from api import ranges, sse, tar
from api.deps import (
    AfterDep,
    CreatingDep,
    LimitDep,
    ListenerDep,
    OrderDep,
    OwnerDep,
    ReadingDep,
    ServicesDep,
    SessionDep,
    SubmitterDep,
)
from api.errors import errors
from api.labels import wanted_by
from api.schemas import (
    ArtifactList,
    ArtifactOut,
    CheckpointList,
    CheckpointOut,
    DeletedOut,
    EventList,
    EventOut,
    JobList,
    JobOut,
    MetricsOut,
)
from api.shown import shown, shown_all
from api.trips import OneTrip, few_at_once
from core import artifacts, checkpoints, events, joblogs, jobs, metrics, removal
from core.errors import Forbidden, InUse, InvalidMove, InvalidSpec, NotFound, NotReady, QuotaExceeded
from core.models import Job
from core.spec import JobChange, JobSpec, LayoutAsk
from core.states import TERMINAL, JobState

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=OneTrip)

JobId = Annotated[str, Path(alias="job_id", description="Id of the job.", examples=["job-4f1c09a1b2c3d4e5f6a7b8c9"])]

LOG_RANK = "x-log-rank"


@router.post("", status_code=201, responses=errors(InvalidSpec, NotFound, NotReady, Forbidden, QuotaExceeded))
@few_at_once
def submit(spec: JobSpec, creating: CreatingDep) -> JobOut:
    """Submit a job.

    It is checked at once: what can't run is refused here, with what would work. A create that is tried again makes no
    second job, if it carries the same `Idempotency-Key`, or is a retry of the openai client with the same body.
    """
    made = jobs.submit(
        creating.session,
        creating.owner,
        spec,
        settings=creating.settings,
        reading=creating.reading,
        this=creating.tried(spec),
    )
    return shown(creating.session, made.job, ahead=made.ahead)


@router.get("", responses=errors(NotFound))
def list_jobs(
    owner: OwnerDep,
    session: ReadingDep,
    labels: Annotated[dict[str, str], Depends(wanted_by("label"))],
    after: AfterDep = None,
    limit: LimitDep = 20,
    state: Annotated[list[JobState] | None, Query(description="In any of these; may be repeated.")] = None,
    kind: Literal["pretrain", "finetune"] | None = None,
    name: Annotated[str | None, Query(max_length=64, description="Only jobs of exactly this name.")] = None,
) -> JobList:
    """List jobs, newest first. Filter by `state`, `kind` and `name`, and by labels with `label[name]=value`."""
    page = jobs.page(session, owner, after=after, limit=limit, states=state or (), kind=kind, name=name, labels=labels)
    return JobList(data=shown_all(session, page.data), has_more=page.has_more)


@router.get("/{job_id}", responses=errors(NotFound))
def get_job(job_id: JobId, owner: OwnerDep, session: ReadingDep) -> JobOut:
    """Get a job: what was asked, what it became, where it stands."""
    return shown(session, jobs.get(session, owner, job_id))


@router.post("/{job_id}/cancel", responses=errors(NotFound, InvalidMove, Forbidden))
def cancel(job_id: JobId, owner: SubmitterDep, session: SessionDep) -> JobOut:
    """Cancel a job. Asking twice is fine; one that has succeeded or failed can't be cancelled."""
    return shown(session, jobs.cancel(session, owner, job_id))


@router.post("/{job_id}/pause", responses=errors(NotFound, InvalidMove, Forbidden))
def pause(job_id: JobId, owner: SubmitterDep, session: SessionDep) -> JobOut:
    """Pause a job: it saves its progress and gives its slots back."""
    return shown(session, jobs.pause(session, owner, job_id))


@router.post("/{job_id}/resume", responses=errors(NotFound, NotReady, InvalidMove, InvalidSpec, Forbidden))
def resume(
    job_id: JobId,
    owner: SubmitterDep,
    session: SessionDep,
    reading: ReadingDep,
    services: ServicesDep,
    layout: Annotated[
        LayoutAsk | None, Body(description="Another layout to go on in; without a body it stays.")
    ] = None,
) -> JobOut:
    """Resume a paused job from its newest checkpoint, in another layout where the body says so.

    Checkpoints load in any layout: a job that was paused on two GPUs goes on with one, or in a pipeline.
    """
    job = jobs.resume(session, owner, job_id, layout, settings=services.settings, reading=reading)
    return shown(session, job)


@router.post("/{job_id}/retry", responses=errors(NotFound, NotReady, InvalidMove, Forbidden))
def retry(
    job_id: JobId, owner: SubmitterDep, session: SessionDep, reading: ReadingDep, services: ServicesDep
) -> JobOut:
    """Retry a job that failed or was cancelled: the same job goes on from its newest checkpoint, or from the start.

    Its error is cleared and its losses count anew. Asking twice is fine, one that is under way stays as it is. One that
    succeeded, or whose files or base are gone, can't be retried.
    """
    return shown(session, jobs.retry(session, owner, job_id, settings=services.settings, reading=reading))


@router.patch("/{job_id}", responses=errors(NotFound, InvalidSpec, Forbidden))
def change(job_id: JobId, wish: JobChange, owner: SubmitterDep, session: SessionDep) -> JobOut:
    """Change a job's `name`, `labels` or `priority`, in any state.

    The body is a JSON merge patch: what it leaves out stays, null takes a name or a label away. An event of type
    `changed` tells it, and the queue's order follows at once.
    """
    return shown(session, jobs.change(session, owner, job_id, wish))


@router.delete("/{job_id}", responses=errors(NotFound, InUse, Forbidden))
def delete(
    job_id: JobId,
    owner: SubmitterDep,
    session: SessionDep,
    services: ServicesDep,
    force: Annotated[
        bool,
        Query(description="Also checkpoints that another project may use, or that checkpoints of other jobs adapt."),
    ] = False,
) -> DeletedOut:
    """Delete a job that has ended and all that it left: history, numbers, logs, checkpoints, results and its models.

    What another job still needs of it stays, and the job with it: 409 says which. What it used stays counted. From
    then on nothing of it is shown; a long history, and what hosts have of it on their disks, go within minutes.
    """
    removal.remove(session, services, owner, job_id, force=force)
    return DeletedOut(id=job_id, object="job")


@router.get("/{job_id}/events", responses=errors(NotFound))
def list_events(
    job_id: JobId,
    owner: OwnerDep,
    session: ReadingDep,
    after: Annotated[int | None, Query(ge=0, le=2**53, description="`seq` of the last event already known.")] = None,
    limit: LimitDep = 20,
    order: OrderDep = "asc",
    type: Annotated[list[str] | None, Query(description="Only events of these types; may be repeated.")] = None,
) -> EventList:
    """List everything that happened to a job."""
    page = events.page(
        session, jobs.get(session, owner, job_id), after=after, limit=limit, order=order, types=type or ()
    )
    return EventList(data=[EventOut.of(event) for event in page.data], has_more=page.has_more)


def known_job(job_id: JobId, owner: ListenerDep, services: ServicesDep) -> Job:
    """The job, once it is sure that the caller may know of it."""
    with services.db.reading() as session:
        return jobs.get(session, owner, job_id)


@router.get(
    "/{job_id}/stream",
    status_code=200,
    response_class=sse.EventStream,
    responses=errors(NotFound) | {204: {"description": "The client already has the end: don't connect again."}},
)
async def stream(
    request: Request,
    owner: ListenerDep,
    job: Annotated[Job, Depends(known_job)],
    after: Annotated[int, Query(ge=0, le=2**53, description="`seq` of the last event already known.")] = 0,
    last_event_id: Annotated[str | None, Header(description="Set by clients that connect again.")] = None,
) -> Response:
    """Follow a job live, as server-sent events.

    Frames are named `state`, `metrics`, `log`, `checkpoint`, `warning` and, once the job has ended, `done`. Each
    carries an event as JSON; `done` carries the job. Connect again with the last id and nothing is missed or repeated.
    """
    start, knows_an_end = sse.position(last_event_id, after)
    # It may have been retried since.
    if knows_an_end and job.state in TERMINAL and job.last_event == start:
        return Response(status_code=204)
    streams: sse.Streams = request.app.state.streams
    streams.require_room(owner.key_id)
    return sse.EventStream(streams.listen(job.id, after=start, key_id=owner.key_id, visit_id=owner.visit_id))


@router.get("/{job_id}/metrics", responses=errors(NotFound))
def get_metrics(
    job_id: JobId,
    owner: OwnerDep,
    session: ReadingDep,
    names: Annotated[
        list[str] | None,
        Query(max_length=100, description="Such as `loss`; repeated or separated by commas. Default: all."),
    ] = None,
    from_step: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    to_step: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    max_points: Annotated[int, Query(ge=2, le=10_000, description="Points in each series.")] = 500,
) -> MetricsOut:
    """Get numbers over steps, thinned on the server: first, last and extremes stay.

    Of each step: `loss`, `token_accuracy`, `lr`, `grad_norm`, `tokens`, `tokens_per_second`, `step_seconds`,
    `memory_bytes`; under DPO `rewards_chosen`, `rewards_rejected`, `reward_margin` and `reward_accuracy`; `mfu` and
    `hfu` where the device's peak is known; and what `step_seconds` went to, as means over ranks that add up to it:
    `compute_seconds`, `communication_seconds` (waited for, not hidden behind compute), `bubble_seconds` (of the
    pipeline), `data_seconds`, and what followed the step before, `evaluation_seconds` and `checkpoint_seconds`. Of each
    validation: `validation_loss` and `validation_token_accuracy`, and under DPO the four rewards, their names likewise
    with `validation_` before; `choice_accuracy` and `choice_accuracy_normalized` where `data.evaluation` is asked.
    """
    job = jobs.get(session, owner, job_id)
    wanted = dict.fromkeys(name for given in names or [] for name in given.split(",") if name)
    found = metrics.series(session, job.id, names=wanted, from_step=from_step, to_step=to_step, max_points=max_points)
    return MetricsOut(series=found)


@router.get("/{job_id}/logs", response_class=PlainTextResponse, responses=errors(NotFound))
def get_logs(
    job_id: JobId,
    owner: OwnerDep,
    session: ReadingDep,
    services: ServicesDep,
    rank: Annotated[
        int | None,
        Query(ge=0, le=1_000_000, description="Whose log. Default: that of the rank that the job failed by, else 0."),
    ] = None,
    tail: Annotated[int, Query(ge=1, le=10_000, description="Last so many lines.")] = 1000,
) -> PlainTextResponse:
    """Get what a rank wrote, as plain text. The header `x-log-rank` says which."""
    job = jobs.get(session, owner, job_id)
    whose = joblogs.telling_rank(services.settings, services.storage, job) if rank is None else rank
    text = joblogs.tail(services.settings, services.storage, job.id, whose, tail)
    return PlainTextResponse(text, headers={LOG_RANK: str(whose)})


@router.get("/{job_id}/checkpoints", responses=errors(NotFound))
def list_checkpoints(
    job_id: JobId, owner: OwnerDep, session: ReadingDep, after: AfterDep = None, limit: LimitDep = 10
) -> CheckpointList:
    """List a job's checkpoints, newest first; `abandoned` marks those that its run has gone back from."""
    page = checkpoints.page(session, jobs.get(session, owner, job_id), after=after, limit=limit)
    return CheckpointList(data=[CheckpointOut.of(checkpoint) for checkpoint in page.data], has_more=page.has_more)


@router.get("/{job_id}/artifacts", responses=errors(NotFound))
def list_artifacts(job_id: JobId, owner: OwnerDep, session: ReadingDep, services: ServicesDep) -> ArtifactList:
    """List the files of a job's result, and the manifest that tells what made them."""
    job = jobs.get(session, owner, job_id)
    return ArtifactList(
        data=[ArtifactOut.of(artifact) for artifact in artifacts.of_job(session, job.id)],
        manifest=artifacts.manifest(session, services.storage, job.id),
    )


@router.get(
    "/{job_id}/artifacts/{path:path}",
    response_class=StreamingResponse,
    responses=errors(NotFound, ranges.RangeNotSatisfiable)
    | {200: ranges.BYTES, 206: {"description": "The part asked for."}, 304: {"description": "Your copy is good."}},
)
def get_artifact(
    request: Request, job_id: JobId, path: str, owner: OwnerDep, session: ReadingDep, services: ServicesDep
) -> Response:
    """Download one file of a job's result. Takes `Range`, `If-Range` and `If-None-Match`; the ETag is the sha256."""
    artifact = artifacts.get(session, jobs.get(session, owner, job_id), path)
    return ranges.answer(
        request.headers,
        size=artifact.bytes,
        etag=artifact.sha256,
        filename=path.rpartition("/")[2],
        open_=lambda start, end: services.storage.stream(artifact.storage_key, start, end),
    )


@router.get(
    "/{job_id}/artifacts.tar",
    response_class=StreamingResponse,
    responses=errors(NotFound) | {200: {"description": "A tar archive.", "content": {"application/x-tar": {}}}},
)
def get_all_artifacts(job_id: JobId, owner: OwnerDep, session: ReadingDep, services: ServicesDep) -> StreamingResponse:
    """Download a job's whole result as one tar archive, made while it is sent."""
    job = jobs.get(session, owner, job_id)
    made_at = int(job.finished_at or job.created_at)
    entries = [
        tar.Entry(artifact.path, artifact.bytes, made_at, partial(services.storage.stream, artifact.storage_key))
        for artifact in artifacts.of_job(session, job.id)
    ]
    if not entries:
        raise NotFound(f"Job {job_id} is {job.state} and has no artifacts; a job has them once it has succeeded.")
    headers = {
        "content-length": str(tar.length(entries)),
        "content-disposition": ranges.attachment(f"{job.name or job.id}.tar"),
    }
    return StreamingResponse(tar.stream(entries), media_type="application/x-tar", headers=headers)
