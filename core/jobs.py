"""A job's life: asked for, placed, claimed, recorded, ended. The only writer of `Job.state`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from sqlalchemy import (
    ColumnElement,
    Select,
    bindparam,
    delete,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import InstrumentedAttribute, Session

from core import (
    admission,
    audit,
    catalog,
    files,
    hints,
    history,
    labelling,
    nodes,
    outbox,
    paging,
    projects,
    quotas,
    tries,
)
from core.db import SCHEDULING, directly, inserted, lock
from core.errors import DomainError, InvalidMove, InvalidSpec, NotFound, NotReady, Unavailable
from core.failures import failure
from core.files import FileFacts
from core.keys import Account
from core.models import Holding, Job, JobEvent, JobLabel, Node, Project, QueuePlace, Slot, database_now, new_id
from core.paging import Page
from core.resolve import BaseFacts, Resolution, resolve
from core.settings import Settings
from core.spec import MOST_LABELS, JobChange, JobSpec, LayoutAsk
from core.states import HELD, LIMITS, MOVES, RETRIABLE, TERMINAL, UNDER_WAY, UNENDED, JobState, sources
from core.tries import UNIQUE, Try
from engine.config import RunConfig
from engine.events import ErrorCode, Event, Started

S = JobState

CANCELLED_AT_ONCE = 100
"""Jobs that one transaction ends where a whole project is closed."""
_FIRST_BACK_OFF = 1.0
_LONGEST_BACK_OFF = 300.0


# Asking


@dataclass(frozen=True)
class Submitted:
    """A job that was asked for."""

    job: Job
    ahead: int | None = None
    """Of one that is new, how many wait that go before it; None: nobody has looked."""


def submit(
    session: Session,
    owner: Account,
    spec: JobSpec,
    *,
    settings: Settings,
    reading: Session | None = None,
    this: Try = UNIQUE,
    prefix: Literal["job", "ftjob"] = "job",
) -> Submitted:
    """Queue a job; or return the one that another try of this create made.

    The `prefix` of its id tells in whose words it was asked for, and nothing else.

    What it needs is looked up in `reading`, and the run worked out from that, before `session` has locked anything;
    without another session, in this one.
    """
    looking = session if reading is None else reading
    if not this.may_be_first and (earlier := tries.made_before(looking, owner, this)):
        return Submitted(earlier)
    needed = _needed(looking, owner, spec, settings)
    resolution = _resolved(looking, spec, needed)
    if reading is not None:
        # A connection is not held while another is waited for.
        reading.rollback()
    if this.idempotency_key is None and this.digest is not None:
        # Another try may still be on its way; what it does must be visible before this one looks.
        lock(session, f"create {this.digest}")
        if this.number and (earlier := tries.made_before(session, owner, this)):
            return Submitted(earlier)
    admitted = admission.admit(session, owner, spec, this)
    if isinstance(admitted, Job):
        return Submitted(admitted)
    quotas.require_room_for_jobs(session, admitted.project)
    _keep_base(session, owner, needed, settings)
    job_id = new_id(prefix)
    values = {
        "id": job_id,
        "project_id": owner.project_id,
        "kind": spec.kind,
        "name": spec.name,
        "labels": dict(spec.labels),
        "priority": spec.priority,
        "max_runtime": spec.max_runtime.total_seconds() if spec.max_runtime else None,
        "spec": spec.model_dump(mode="json", by_alias=True, exclude_unset=True),
        "run_config": resolution.run.model_dump(mode="json"),
        "plan": resolution.plan,
        "base_model": spec.model.base,
        "slots": resolution.slots,
        "state": S.QUEUED,
        "queue_reason": "waits for the scheduler's next look",
        "idempotency_key": this.idempotency_key,
        "request_digest": this.digest,
        "made_by_retry": 0 if this.first_was_here else this.number,
        "last_event": 1,
    }
    try:
        # Only a key can collide, and what it collided with is still to be read then.
        with session.begin_nested() if this.idempotency_key else nullcontext():
            job = inserted(session, Job, values)
    except IntegrityError:
        # Two requests with one key at once: the other was first.
        if this.idempotency_key and (earlier := tries.made_before(session, owner, this)):
            return Submitted(earlier)
        raise
    labelling.add(session, job)
    _tell(session, job, "queued")
    audit.record(session, owner, "job.created", job_id, name=spec.name, kind=spec.kind)
    hints.nudge(session)
    return Submitted(job, admitted.ahead)


@dataclass(frozen=True)
class _Needed:
    """What a job starts from."""

    base: BaseFacts | None
    files: dict[str, FileFacts]


def resolved(session: Session, owner: Account, spec: JobSpec, settings: Settings) -> Resolution:
    """The run that a job would be, with what is there now. Raises where it can't run, or needs what isn't there."""
    return _resolved(session, spec, _needed(session, owner, spec, settings))


def _resolved(
    session: Session, spec: JobSpec, needed: _Needed, *, device: Literal["cpu", "cuda"] | None = None
) -> Resolution:
    cluster = nodes.cluster(session, device=device)
    return resolve(spec, base=needed.base, files=needed.files, cluster=cluster, now=datetime.now(UTC))


def _needed(session: Session, owner: Account, spec: JobSpec, settings: Settings) -> _Needed:
    """Raises where something is not there."""
    base = catalog.facts(session, owner, spec.model.base, models=settings.models) if spec.model.base else None
    return _Needed(base, {id_: files.facts(session, owner, id_, param=param) for param, id_ in spec.files()})


def _keep(session: Session, owner: Account, spec: JobSpec, needed: _Needed, settings: Settings) -> None:
    """Let it stay until the commit, after which the job does that. Raises where something is gone meanwhile."""
    _keep_base(session, owner, needed, settings)
    files.keep(session, owner, spec.files())


def _keep_base(session: Session, owner: Account, needed: _Needed, settings: Settings) -> None:
    if needed.base is not None:
        catalog.keep(session, owner, needed.base, models=settings.models)


# Looking


def get(session: Session, owner: Account, job_id: str) -> Job:
    """A job of the owner's project."""
    job = session.scalars(_OWN, {"job": job_id, "project": owner.project_id}).one_or_none()
    if job is None:
        raise NotFound(f"There is no job {job_id!r}.")
    return job


_OWN = select(Job).where(Job.id == bindparam("job"), Job.project_id == bindparam("project"))


def find(session: Session, job_id: str) -> Job:
    """A job, whoever owns it: for the service's own parts."""
    job = session.get(Job, job_id)
    if job is None:
        raise NotFound(f"There is no job {job_id!r}.")
    return job


def page(
    session: Session,
    owner: Account,
    *,
    after: str | None = None,
    limit: int = 20,
    states: Collection[JobState] = (),
    kind: str | None = None,
    name: str | None = None,
    labels: Mapping[str, str] | None = None,
    unlabelled: bool = False,
    from_base: bool = False,
) -> Page[Job]:
    """The project's jobs, newest first. `labels` must all be there, or none where `unlabelled`.

    `from_base`: only those that start from a model.
    """
    own = select(Job).where(Job.project_id == owner.project_id)
    query, created_at, id_ = own, Job.created_at, Job.id
    if labels:
        query, created_at, id_ = labelling.having(owner.project_id, labels), JobLabel.created_at, JobLabel.job_id
    wanted: list[ColumnElement[bool]] = []
    if name is not None:
        wanted.append(Job.name == name)
    if kind is not None:
        wanted.append(Job.kind == kind)
    if unlabelled:
        wanted.append(_UNLABELLED)
    if from_base:
        wanted.append(Job.base_model.is_not(None))
    of_states = [Job.state == state for state in sorted(set(states))]
    if labels or name is not None:
        # Few enough that it does not matter how many of them are in these states.
        wanted, of_states = [*wanted, or_(*of_states)] if of_states else wanted, []
    mark = paging.mark(session, own, Job.created_at, Job.id, after=after)
    return paging.beyond(session, query, created_at, id_, mark=mark, limit=limit, where=wanted, either=of_states)


# In the words of its index: a value beside the statement is not known to be the index's.
_UNLABELLED: ColumnElement[bool] = literal_column("jobs.labels = '{}'")


def owned(session: Session, owner: Account, job_ids: Collection[str]) -> set[str]:
    """Which of these jobs are the owner's project's."""
    # The project is compared here: a database may take it for what tells more, and go through all that it has.
    found = session.execute(select(Job.id, Job.project_id).where(Job.id.in_(job_ids))) if job_ids else ()
    return {id_ for id_, project_id in found if project_id == owner.project_id}


# Wishing


def cancel(session: Session, owner: Account, job_id: str) -> Job:
    """End the job: at once where nothing runs, else as soon as its processes are gone. Asking twice is fine."""
    job = own_locked(session, owner, job_id)
    if job.state in {S.CANCELLED, S.CANCELLING}:
        return job
    if job.state in TERMINAL:
        raise InvalidMove(f"The job has already {_words(job.state)}; there is nothing left to cancel.")
    audit.record(session, owner, "job.cancelled", job_id)
    return move(session, job_id, S.CANCELLED if _nothing_runs(job) else S.CANCELLING)


def pause(session: Session, owner: Account, job_id: str) -> Job:
    """Give the slots back and keep the progress: at once where nothing runs, else after a checkpoint."""
    job = own_locked(session, owner, job_id)
    if job.state in {S.PAUSED, S.PAUSING}:
        return job
    if job.state in TERMINAL or job.state is S.CANCELLING:
        raise InvalidMove(f"The job {_words(job.state)} and can't be paused.")
    audit.record(session, owner, "job.paused", job_id)
    return move(session, job_id, S.PAUSED if _nothing_runs(job) else S.PAUSING)


def resume(
    session: Session,
    owner: Account,
    job_id: str,
    layout: LayoutAsk | None = None,
    *,
    settings: Settings | None = None,
    reading: Session | None = None,
) -> Job:
    """Queue a paused job again; it goes on from its newest checkpoint, in another `layout` if one is given.

    With a layout, `settings` are needed to resolve it, which is done as in `submit`. Raises InvalidSpec where it can't
    be, and NotReady where the base that goes by its base's name now is still to come.
    """
    looking = session if reading is None else reading
    laid_out = None
    if layout is not None and settings is not None:
        laid_out = _laid_out(looking, owner, get(looking, owner, job_id), layout, settings=settings)
        if reading is not None:
            reading.rollback()
    # In the order of who archives a project and then ends its jobs.
    projects.active(session, owner, owner.project_id)
    job = own_locked(session, owner, job_id)
    spec = JobSpec.model_validate(job.spec)
    wished = layout.on(spec) if layout is not None else spec
    if job.state in {S.QUEUED, S.STARTING, S.RUNNING}:
        if wished != spec:
            raise InvalidMove(f"The job {_words(job.state)}; pause it first, then resume it in another layout.")
        return job
    if job.state is not S.PAUSED:
        raise InvalidMove(f"The job {_words(job.state)}; only a paused one can be resumed.")
    if wished != spec and settings is not None:
        if laid_out is None or (job.spec, job.run_config) != laid_out.of:
            raise InvalidMove("The job was changed at the same moment; look at it, and resume it again.")
        _lay_out(session, job, laid_out)
    audit.record(session, owner, "job.resumed", job_id)
    return _move(session, job_id, S.QUEUED, [], message="resumed", losses=0, retry_at=None)


@dataclass(frozen=True)
class _LaidOut:
    """A paused job in another layout."""

    of: tuple[dict[str, Any], dict[str, Any]]
    """What was asked for, and the run, as they were."""
    spec: JobSpec
    resolution: Resolution


def _laid_out(session: Session, owner: Account, job: Job, layout: LayoutAsk, *, settings: Settings) -> _LaidOut | None:
    """What the run would be made of anew in this layout, on the device and in the precision that it has begun with.

    None where that is not to be found out: the job is not paused, or its layout is this one.
    """
    spec = JobSpec.model_validate(job.spec)
    wished = layout.on(spec)
    if job.state is not S.PAUSED or wished == spec:
        return None
    before = RunConfig.model_validate(job.run_config)
    begun = {"global_batch": before.training.global_batch, "precision": before.training.precision}
    asked = wished.model_copy(update={"training": wished.training.model_copy(update=begun)})
    try:
        needed = _needed(session, owner, asked, settings)
        resolution = _resolved(session, asked, needed, device=before.device)
    except InvalidSpec as error:
        if error.param != "training.global_batch":
            raise
        # It stays what it was, so that what can be changed is to blame.
        why = error.message.removeprefix("training.global_batch: ").partition(";")[0]
        raise InvalidSpec(
            f"parallel: {why}, and a job that has begun keeps its batch; choose a layout whose data ranks share it "
            "evenly",
            param="parallel",
        ) from error
    return _LaidOut((job.spec, job.run_config), wished, resolution)


def _lay_out(session: Session, job: Job, laid_out: _LaidOut) -> None:
    """Let the job's next attempt have this layout, and all else as it was."""
    before = RunConfig.model_validate(job.run_config)
    resolution = laid_out.resolution
    run = resolution.run
    same = {"micro_batch": run.training.micro_batch}
    after = before.model_copy(
        update={
            "parallel": run.parallel,
            "recompute": run.recompute,
            "training": before.training.model_copy(update=same),
        }
    )
    after = RunConfig.model_validate(after.model_dump())
    was, now = (config.parallel.model_dump(mode="json") for config in (before, after))
    job.spec = laid_out.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    job.run_config, job.plan, job.slots = after.model_dump(mode="json"), resolution.plan, resolution.slots
    changed = ", ".join(f"{axis} {value}" for axis, value in now.items() if was[axis] != value)
    history.add(
        session,
        job,
        type="changed",
        message=f"goes on in another layout{': ' if changed else ''}{changed}",
        data={"parallel": {"from": was, "to": now}},
    )
    session.flush()


def retry(session: Session, owner: Account, job_id: str, *, settings: Settings, reading: Session | None = None) -> Job:
    """Queue a job again that failed or was cancelled, for a new attempt from its newest checkpoint, if it has one.

    Asking twice is fine. InvalidMove where something that the job needs was deleted meanwhile, NotReady where its base
    is still to come. What it needs is looked up as in `submit`.
    """
    looking = session if reading is None else reading
    found = get(looking, owner, job_id)
    spec, needed = JobSpec.model_validate(found.spec), None
    if found.state in RETRIABLE:
        with _retrying():
            needed = _needed(looking, owner, spec, settings)
    if reading is not None:
        reading.rollback()
    projects.active(session, owner, owner.project_id)
    job = own_locked(session, owner, job_id)
    if job.state in UNDER_WAY:
        return job
    if job.state not in RETRIABLE:
        advice = "; resume it instead" if job.state is S.PAUSED else ""
        raise InvalidMove(f"The job {_words(job.state)}; only one that failed or was cancelled can be retried{advice}.")
    if needed is None:
        raise InvalidMove("The job has ended at this moment; look at it, and retry it again.")
    with _retrying():
        _keep(session, owner, spec, needed, settings)
    audit.record(session, owner, "job.retried", job_id)
    return _move(session, job_id, S.QUEUED, [], message="retried", losses=0, retry_at=None)


@contextmanager
def _retrying() -> Iterator[None]:
    """What is wrong with what a job needs, in words of a retry."""
    try:
        yield
    except Unavailable:
        raise
    except NotReady as why:
        raise NotReady(f"The job can't be retried yet: {why.message}") from why
    except DomainError as why:
        raise InvalidMove(
            f"The job can't be retried, for what it needs is not there any more: {why.message} Submit a new one."
        ) from why


def change(session: Session, owner: Account, job_id: str, wish: JobChange) -> Job:
    """Change what may change at any time, and tell it in the history; the queue's order follows at once."""
    job = own_locked(session, owner, job_id)
    wished = wish.on(name=job.name, labels=job.labels, priority=job.priority)
    if len(wished["labels"]) > MOST_LABELS:
        raise InvalidSpec(f"labels: a job has at most {MOST_LABELS}; take some away with null.", param="labels")
    before = {field: getattr(job, field) for field, value in wished.items() if getattr(job, field) != value}
    if not before:
        return job
    for field in before:
        setattr(job, field, wished[field])
    if "priority" in before:
        # Until the scheduler looks again, its place is what priority and age make it.
        directly(session, _LEAVE_LINE, {"job": job_id})
    history.add(
        session,
        job,
        type="changed",
        message="; ".join(f"{field} is now {json.dumps(wished[field], ensure_ascii=False)}" for field in before),
        data={field: {"from": was, "to": wished[field]} for field, was in before.items()},
    )
    if "labels" in before:
        labelling.write(session, job)
    audit.record(session, owner, "job.changed", job_id, **{field: wished[field] for field in before})
    session.flush()
    hints.ring(session, job_id)
    hints.nudge(session)
    return job


def cancel_all(session: Session, owner: Account, project_id: str) -> list[Job]:
    """End jobs of a project, as `cancel` ends one, but so many that others need not wait for long; those that it was.

    Whether `owner` may was decided before. `cancel_archived` sees to the rest.
    """
    # The scheduler locks jobs in another order.
    lock(session, SCHEDULING)
    ended = []
    for job_id in session.scalars(_uncancelled(project_id).order_by(Job.id).limit(CANCELLED_AT_ONCE)).all():
        job = _locked(session, job_id)
        if job.state not in TERMINAL and job.state is not S.CANCELLING:
            ended.append(move(session, job_id, S.CANCELLED if _nothing_runs(job) else S.CANCELLING))
            audit.record(session, owner, "job.cancelled", job_id, project_id=project_id)
    return ended


def cancel_archived(session: Session) -> list[Job]:
    """`cancel_all` in a project that was archived and has jobs yet, in the name of who archived it."""
    closed = select(Project.id).where(Project.archived_at.is_not(None), _uncancelled(Project.id).exists())
    project_id = session.scalars(closed.limit(1)).first()
    if project_id is None:
        return []
    return cancel_all(session, audit.who_archived(session, project_id), project_id)


def _uncancelled(project_id: str | InstrumentedAttribute[str]) -> Select[str]:
    return select(Job.id).where(Job.project_id == project_id, Job.state.in_(UNENDED - {S.CANCELLING}))


def pause_spent(session: Session) -> list[Job]:
    """Pause, after a checkpoint, what runs in projects whose GPU-hours are used up."""
    # The scheduler locks jobs in another order.
    lock(session, SCHEDULING)
    running = select(Job.id).where(Job.project_id.in_(quotas.spent(session)), Job.state.in_({S.STARTING, S.RUNNING}))
    paused = []
    for job_id in session.scalars(running.order_by(Job.id)).all():
        job = _locked(session, job_id)
        if job.state in {S.STARTING, S.RUNNING}:
            to = S.PAUSED if _nothing_runs(job) else S.PAUSING
            paused.append(move(session, job_id, to, message="the project's GPU-hours of this month are used up"))
    return paused


def _nothing_runs(job: Job) -> bool:
    return job.state not in HELD or (job.state is S.STARTING and job.holder is None)


# Moving


def move(
    session: Session,
    job_id: str,
    to: JobState,
    *,
    fence: int | None = None,
    message: str | None = None,
    error: Mapping[str, Any] | None = None,
    result_model: str | None = None,
) -> Job:
    """Change the state. InvalidMove unless `MOVES` allows it and, with a `fence`, that attempt still holds the job."""
    values: dict[str, Any] = {}
    if error is not None:
        values["error"] = dict(error)
        message = message or error.get("message")
    if result_model is not None:
        values["result_model"] = result_model
    return _move(session, job_id, to, [] if fence is None else _held_by(fence), message=message, **values)


def place(session: Session, job_id: str, node: str, slots: Collection[int], *, claim_within: timedelta) -> Job:
    """Give a queued job these slots of `node`, where a supervisor has `claim_within` to claim it. For the scheduler."""
    job = _move(
        session,
        job_id,
        S.STARTING,
        [],
        message=f"placed on {node}",
        node=node,
        queue_reason=None,
        retry_at=None,
        lease_expires_at=database_now() + claim_within.total_seconds(),
    )
    taken = session.execute(
        update(Slot)
        .where(Slot.node == node, Slot.index.in_(slots), Slot.job_id.is_(None))
        .values(job_id=job_id)
        .returning(Slot.index)
    ).all()
    assert len(taken) == len(slots), f"slots {sorted(slots)} of {node} are not free"
    session.add(Holding(project_id=job.project_id, job_id=job_id, slots=len(slots), started_at=database_now()))
    hints.start(session, job_id, node)
    return job


def unplace(session: Session, job_id: str, *, reason: str) -> Job | None:
    """Queue a placed job that nobody has claimed. No loss, no wait; None if somebody has claimed it meanwhile."""
    try:
        return _move(session, job_id, S.QUEUED, [Job.state == S.STARTING, Job.holder.is_(None)], message=reason)
    except InvalidMove:
        return None


def _move(
    session: Session,
    job_id: str,
    to: JobState,
    where: Sequence[ColumnElement[bool]],
    *,
    message: str | None = None,
    **values: Any,
) -> Job:
    session.flush()
    # Reasons and errors may be in the words of whatever broke.
    message = history.storable(message)
    values = {name: history.storable(value) for name, value in values.items()}
    job = session.scalars(
        update(Job)
        .where(Job.id == job_id, Job.state.in_(sources(to)), *where)
        .values({"state": to, "last_event": Job.last_event + 1, **_implied(to), **values})
        .returning(Job)
        .execution_options(synchronize_session=False, populate_existing=True)
    ).one_or_none()
    if job is None:
        raise _refusal(session, job_id, to)
    _tell(session, job, message)
    if to in _AFTER_QUEUED:
        directly(session, _LEAVE_LINE, {"job": job_id})
    if to in TERMINAL:
        outbox.announce(session, job)
    if to not in HELD:
        session.execute(update(Slot).where(Slot.job_id == job_id).values(job_id=None))
        held = update(Holding).where(Holding.job_id == job_id, Holding.ended_at.is_(None))
        session.execute(held.values(ended_at=database_now()).execution_options(synchronize_session=False))
        hints.nudge(session)
    session.flush()
    hints.ring(session, job_id)
    return job


_AFTER_QUEUED = MOVES[S.QUEUED]
_LEAVE_LINE = delete(QueuePlace).where(QueuePlace.job_id == bindparam("job"))


def _implied(to: JobState) -> dict[str, Any]:
    """What a state says about the other columns."""
    values: dict[str, Any] = {}
    if to not in HELD:
        values |= {"node": None, "holder": None, "lease_expires_at": None, "makes_way": False}
    if to in TERMINAL:
        values |= {"finished_at": database_now(), "retry_at": None}
    if to is S.QUEUED:
        # How it ended before, if it was retried, is in its history.
        values |= {
            "queue_reason": "waits for the scheduler's next look",
            "error": null(),
            "finished_at": None,
        }
    elif to not in HELD:
        values["queue_reason"] = None
    if to is S.RUNNING:
        values["started_at"] = func.coalesce(Job.started_at, database_now())
    return values


def _refusal(session: Session, job_id: str, to: JobState) -> NotFound | InvalidMove:
    job = session.scalars(select(Job).where(Job.id == job_id).execution_options(populate_existing=True)).one_or_none()
    if job is None:
        return NotFound(f"There is no job {job_id!r}.")
    if job.state not in sources(to):
        return InvalidMove(f"The job {_words(job.state)}; it can't become {to}.")
    return InvalidMove("Another attempt holds this job now, or nobody does; this one was replaced.")


def _words(state: JobState) -> str:
    return {S.SUCCEEDED: "succeeded", S.FAILED: "failed"}.get(state, f"is {state}")


def _tell(session: Session, job: Job, message: str | None) -> None:
    """Write the job's state, as its newest event, to its history."""
    data: dict[str, Any] = {"state": job.state.value}
    if job.node is not None:
        data["node"] = job.node
    if job.error is not None:
        data["error"] = job.error
    if job.result_model is not None:
        data["model"] = job.result_model
    event = {
        "job_id": job.id,
        "seq": job.last_event,
        "attempt": job.attempt,
        "type": "state",
        "level": "error" if job.state is S.FAILED else "info",
        "message": message or job.state.value,
        "data": data,
    }
    directly(session, _EVENT, event)


_EVENT = insert(JobEvent)


# Holding: what a supervisor does to the job it runs


def claim(session: Session, job_id: str, holder: str, lease: timedelta, *, node: str) -> Job | None:
    """Take a job that was placed on `node`, which raises its attempt; None if it is not, or no longer, to be had."""
    job = session.scalars(
        update(Job)
        .where(Job.id == job_id, Job.state == S.STARTING, Job.holder.is_(None), Job.node == node)
        .values(
            attempt=Job.attempt + 1,
            holder=holder,
            engine_seq=0,
            lease_expires_at=database_now() + lease.total_seconds(),
        )
        .returning(Job)
        .execution_options(synchronize_session=False, populate_existing=True)
    ).one_or_none()
    if job is not None:
        nodes.started_one(session, node)
    return job


def refit(session: Session, job: Job, *, settings: Settings, reading: Session | None = None) -> Job:
    """Resolve a job anew that was made before any host offered GPUs, and whose first attempt was given some.

    Its precision may change with that, so a job that has trained already stays as it is. It fails where its host's
    memory can't hold it. What it needs is looked up as in `submit`; InvalidMove where the attempt was replaced since.
    """
    looking = session if reading is None else reading
    node = looking.get_one(Node, job.node)
    if job.attempt > 1 or node.device == job.run_config["device"]:
        return job
    owner = Account(project_id=job.project_id, key_id="", scopes=frozenset())
    found: Resolution | DomainError
    try:
        found = resolved(looking, owner, JobSpec.model_validate(job.spec), settings)
    except DomainError as error:
        found = error
    if reading is not None:
        reading.rollback()
    if isinstance(found, DomainError):
        # What it starts from may be gone or damaged by now: to give the claim back would be to try for ever.
        code: ErrorCode = "out_of_memory" if isinstance(found, InvalidSpec) else "invalid_model"
        why = failure(code, found.message, param=found.param)
        return move(session, job.id, S.FAILED, fence=job.attempt, error=why)
    job = held(session, job.id, fence=job.attempt)
    job.run_config, job.plan = found.run.model_dump(mode="json"), found.plan
    session.flush()
    return job


def renew(session: Session, job_id: str, *, fence: int, lease: timedelta) -> Job | None:
    """Keep the job for another `lease`; its state tells what is wished. None: it is lost, end everything at once."""
    return session.scalars(
        update(Job)
        .where(Job.id == job_id, Job.state.in_(HELD), *_held_by(fence))
        .values(lease_expires_at=database_now() + lease.total_seconds())
        .returning(Job)
        .execution_options(synchronize_session=False, populate_existing=True)
    ).one_or_none()


def held(session: Session, job_id: str, *, fence: int) -> Job:
    """The job, its row locked until the commit; InvalidMove unless attempt `fence` holds it."""
    job = _locked(session, job_id)
    if job.attempt != fence or job.holder is None or job.state not in HELD:
        raise InvalidMove("Another attempt holds this job now, or nobody does; this one was replaced.")
    return job


def record(session: Session, job_id: str, *, fence: int, events: Sequence[Event]) -> int:
    """Write down what the engine said, each event and each step once. Returns how many events were new.

    `seq` is given out under the row's lock, so it is the order of commits and has no holes. Steps that an earlier
    attempt already recorded are dropped. `checkpoint` events are left to `checkpoints.publish`, when they have become
    true for everyone. Raises InvalidMove if the attempt was replaced.
    """
    job = held(session, job_id, fence=fence)
    before = job.last_event
    for event in events:
        if event.seq and event.seq <= job.engine_seq:
            continue
        job.engine_seq = event.seq or job.engine_seq
        if isinstance(event, Started) and job.state is S.STARTING:
            job = move(session, job_id, S.RUNNING, fence=fence)
            # Its host may start the next one.
            hints.nudge(session)
        history.append(session, job, event)
    session.flush()
    hints.ring(session, job_id)
    return job.last_event - before


def make_way(session: Session, job_id: str, *, reason: str) -> Job | None:
    """Have a run save its state and give its slots to another; at once where nothing runs yet. For the scheduler.

    None where it already does, or gives them up anyway.
    """
    job = _locked(session, job_id)
    if job.state not in {S.STARTING, S.RUNNING} or job.makes_way:
        return None
    if _nothing_runs(job):
        return unplace(session, job_id, reason=reason)
    job.makes_way = True
    history.add(session, job, type="log", message=f"{reason}: saves its state and goes back to the queue", data={})
    session.flush()
    hints.ring(session, job_id)
    return job


def requeue(session: Session, job_id: str, *, fence: int, reason: str, to_the_end: bool = False) -> Job:
    """Give the job back unharmed, as when its host goes down. Not a loss, and it may start again at once.

    Its place in line is that of its age, unless it goes `to_the_end`. A wish to cancel or pause that was pending comes
    true instead.
    """
    job = held(session, job_id, fence=fence)
    later = {"queued_at": database_now()} if to_the_end else {}
    return _move(session, job_id, _after(job.state), _held_by(fence), message=reason, **later)


def lose(
    session: Session,
    job_id: str,
    *,
    fence: int,
    reason: str,
    max_losses: int,
    error: Mapping[str, Any] | None = None,
) -> Job:
    """The attempt is gone: queue the job again after a back-off, or fail it with `error` after too many in a row.

    A wish to cancel or pause that was pending comes true instead.
    """
    job = held(session, job_id, fence=fence)
    return _lose(session, job, reason=reason, max_losses=max_losses, error=error)


def _after(state: JobState) -> JobState:
    """What becomes of a job in a state in which it holds slots when nobody does anything for it any more."""
    then = LIMITS[state].then
    assert then is not None, f"{state} holds nothing"
    return then


def _lose(session: Session, job: Job, *, reason: str, max_losses: int, error: Mapping[str, Any] | None = None) -> Job:
    if (to := _after(job.state)) is not S.QUEUED:
        return _move(session, job.id, to, [], message=reason)
    losses = job.losses + 1
    if losses >= max_losses:
        last = dict(error or failure("lease_lost", reason))
        last["message"] = f"{last['message']} ({losses} attempts in a row were lost)"
        return _move(session, job.id, S.FAILED, [], message=last["message"], error=last, losses=losses)
    wait = back_off(losses)
    return _move(
        session,
        job.id,
        S.QUEUED,
        [],
        message=reason,
        losses=losses,
        retry_at=database_now() + wait,
        queue_reason=f"attempt {job.attempt} was lost ({losses} in a row without progress, of at most {max_losses}): "
        f"{reason}; tries again {wait:g} s after that",
    )


def back_off(losses: int) -> float:
    """Seconds to wait after that many losses in a row: short after the first, which is mostly a host's, then longer."""
    return float(min(_FIRST_BACK_OFF * 4.0 ** (losses - 1), _LONGEST_BACK_OFF))


# Keeping up


def reclaim(
    session: Session, *, max_losses: int, at: float | None = None, starts_arrive: Callable[[], bool] = lambda: True
) -> list[Job]:
    """Take back each job whose holder fell silent past its lease, or which nobody claimed in time.

    `at` is the time to go by, as the database's clock said it a moment ago; None asks that clock anew. Between two
    questions it may be set, and every lease would seem to be over.

    A host is to blame for the latter if it can have been told: if what is sent to it now would arrive.
    """
    # Locked rows are about to be renewed or ended by somebody: they aren't silent.
    silent = session.scalars(
        select(Job).where(*_expired(at)).with_for_update(skip_locked=True).execution_options(populate_existing=True)
    ).all()
    unstarted = [job for job in silent if job.holder is None]
    if unstarted and starts_arrive():
        for node in sorted({job.node for job in unstarted if job.node is not None}):
            nodes.bounced(session, node)
    return [
        _move(session, job.id, S.QUEUED, [], message=f"{job.node} did not start it in time")
        if job.holder is None
        else _lose(session, job, reason=f"{job.node} fell silent", max_losses=max_losses)
        for job in silent
    ]


def end_sooner(session: Session, *, longest: timedelta) -> None:
    """After the clock was set back, no lease and no wait ends later than one that begins now."""
    latest = database_now() + longest.total_seconds()
    held = update(Job).where(Job.state.in_(HELD), Job.lease_expires_at > latest).values(lease_expires_at=latest)
    waits = Job.retry_at > database_now() + _LONGEST_BACK_OFF
    queued = update(Job).where(Job.state == S.QUEUED, waits).values(retry_at=database_now())
    for statement in (held, queued):
        session.execute(statement.execution_options(synchronize_session=False))


def expired(session: Session) -> Sequence[Job]:
    """Jobs that `reclaim` would take back."""
    return session.scalars(select(Job).where(*_expired())).all()


def unclaimed(session: Session) -> Sequence[Job]:
    """Jobs that were placed and not claimed: their start may have been lost and can be sent again."""
    return session.scalars(select(Job).where(Job.state == S.STARTING, Job.holder.is_(None))).all()


def awaited_attempt(session: Session, job_id: str, *, node: str) -> int | None:
    """Number of the attempt that a supervisor on this node could claim now; None where there is nothing to claim."""
    placed = (Job.id == job_id, Job.state == S.STARTING, Job.holder.is_(None), Job.node == node)
    attempt = session.scalar(select(Job.attempt).where(*placed))
    return None if attempt is None else attempt + 1


def _expired(at: float | None = None) -> list[ColumnElement[bool]]:
    return [Job.state.in_(HELD), Job.lease_expires_at < (database_now() if at is None else at)]


def _held_by(fence: int) -> list[ColumnElement[bool]]:
    # Between a loss and the next claim the number still stands, but nobody holds the job.
    return [Job.attempt == fence, Job.holder.is_not(None)]


def own_locked(session: Session, owner: Account, job_id: str) -> Job:
    """A job of the owner's, as it stays until the commit; NotFound for others'."""
    return _locked(session, job_id, Job.project_id == owner.project_id)


def _locked(session: Session, job_id: str, *where: ColumnElement[bool]) -> Job:
    job = session.scalars(
        select(Job).where(Job.id == job_id, *where).with_for_update().execution_options(populate_existing=True)
    ).one_or_none()
    if job is None:
        raise NotFound(f"There is no job {job_id!r}.")
    return job
