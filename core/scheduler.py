"""The scheduler's look at the rows: who starts now, why the others wait, where in line, and until when.

What is decided is `placing`'s business, in the order of `line`; here it is read and written, in one transaction under
one lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import inf
from typing import Any

from sqlalchemy import bindparam, case, delete, func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from core import forecast, jobs, nodes, quotas, shares
from core.ahead import AHEAD, AHEAD_OF_A_NEW_ONE, QUEUED_AT
from core.db import SCHEDULING, directly, lock
from core.errors import InvalidMove
from core.forecast import MOST_FORESEEN, Running
from core.line import ordered
from core.models import Holding, Job, Project, QueuePlace, Slot, database_now
from core.numbering import renumbered
from core.placing import Decision, Held, Host, Placement, Resting, Waiting, decide, suits
from core.preemption import IS_MADE_WAY, MAKES_WAY, making_way
from core.quotas import Allowance
from core.shares import Standing
from core.states import JobState

CLAIM_WITHIN = timedelta(seconds=60)
"""How long a placed job may stay without a supervisor before it is taken back."""
STARTS_WITHIN = timedelta(minutes=2)
"""How long a job that does not train yet counts as one that its host starts. Then it waits for its data, mostly."""
DEPTH = 500
"""Jobs at the front of the line that a usual look takes in; `workers.upkeep` looks at everyone now and then."""
HALF_LIFE = timedelta(days=1)
"""After which a project's use of slots counts half as much, where nothing else is set."""


@dataclass(frozen=True)
class View:
    """What a decision is based on."""

    now: float
    """By the database's clock."""
    line: list[Waiting]
    """Those that are queued, in order; some of them not ready yet."""
    hosts: list[Host]
    running: list[Running]
    standings: Mapping[str, Standing]
    allowances: Mapping[str, Allowance]
    half_life: float
    resting: Sequence[Resting] = ()
    """Hosts beside those, which get nothing for a while."""

    def with_line(self, waiting: Iterable[Waiting]) -> View:
        """The same with these in line."""
        slots = sum(host.num_slots for host in self.hosts)
        line = ordered(waiting, self.standings, now=self.now, slots=slots, patience=self.half_life)
        return replace(self, line=line)

    @property
    def ready(self) -> list[Waiting]:
        return [job for job in self.line if job.ready_at <= self.now]

    def starts(self) -> dict[str, float]:
        """When each of those at the front will start, as far as that can be known."""
        return forecast.starts(
            self.line,
            self.hosts,
            now=self.now,
            running=self.running,
            standings=self.standings,
            allowances=self.allowances,
            half_life=self.half_life,
        )


def tick(
    session: Session,
    *,
    claim_within: timedelta = CLAIM_WITHIN,
    half_life: timedelta = HALF_LIFE,
    depth: int | None = DEPTH,
) -> list[Placement]:
    """Give free slots to queued jobs, tell their nodes after the commit, and write down where and why the rest waits.

    `depth`: so many from the front of the line are looked at, beside those that are new in it; None: everyone.
    """
    lock(session, SCHEDULING)
    base = _base(session, half_life, counting=True)
    queued = _queued(session, base, depth)
    if not queued:
        return []
    view = base.with_line(map(_waiting, queued))
    decision = decide(view.ready, view.hosts, view.allowances, now=view.now, resting=view.resting)
    placed = [placement for placement in decision.placements if _place(session, placement, claim_within)]
    _make_way(session, view, decision)
    _write_reasons(session, decision, {row.id: row.queue_reason for row in queued})
    started = {placement.job_id for placement in placed}
    numbers = {row.id: row.number for row in queued if row.number is not None}
    line = [job.job_id for job in view.line if job.job_id not in started]
    if depth is not None and len(numbers) == depth:
        # Where those stand that come after the last of these, a look at everyone will tell.
        line = line[: 1 + max((index for index, job_id in enumerate(line) if job_id in numbers), default=-1)]
    _write_places(session, renumbered(line, numbers))
    return placed


def _make_way(session: Session, view: View, decision: Decision) -> None:
    """Stop runs for the first job in line that can't start, where their projects let it."""
    if decision.reservation is None:
        return
    job = next(job for job in view.line if job.job_id == decision.reservation.job_id)
    taken: dict[str, set[int]] = {}
    for placement in (*decision.placements, *decision.upcoming):
        taken.setdefault(placement.node, set()).update(placement.slots)
    hosts = [
        replace(host, free=tuple(index for index in host.free if index not in taken.get(host.name, ())))
        for host in view.hosts
    ]
    runs = making_way(job, hosts, view.running)
    if runs is None:
        return
    decision.reasons[job.job_id] += IS_MADE_WAY
    for run in runs:
        jobs.make_way(session, run.job_id, reason=MAKES_WAY)


def _place(session: Session, placement: Placement, claim_within: timedelta) -> bool:
    """Whether the job took the slots; not if it was cancelled or paused since it was read."""
    try:
        jobs.place(session, placement.job_id, placement.node, placement.slots, claim_within=claim_within)
    except InvalidMove:
        return False
    return True


def _write_reasons(session: Session, decision: Decision, told: Mapping[str, str | None]) -> None:
    changed = [
        {"job": job_id, "reason": reason} for job_id, reason in decision.reasons.items() if told[job_id] != reason
    ]
    if changed:
        directly(session, _GIVE_REASON, changed)


# One that was cancelled a moment ago waits for nothing any more.
_GIVE_REASON = (
    update(Job).where(Job.id == bindparam("job"), Job.state == JobState.QUEUED).values(queue_reason=bindparam("reason"))
)


def _write_places(session: Session, numbers: Mapping[str, float]) -> None:
    if not numbers:
        return
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    put = insert(QueuePlace).values(job_id=bindparam("job"), number=bindparam("number"))
    put = put.on_conflict_do_update(index_elements=[QueuePlace.job_id], set_={"number": put.excluded.number})
    directly(session, put, [{"job": job_id, "number": number} for job_id, number in numbers.items()])


def estimate(session: Session, *, half_life: timedelta = HALF_LIFE) -> dict[str, float]:
    """When the first jobs in line will start; for `note`, in a transaction that need not hold up any writer."""
    base = _base(session, half_life, counting=False)
    return base.with_line(map(_waiting, _queued(session, base, MOST_FORESEEN))).starts()


def note(session: Session, starts: Mapping[str, float]) -> None:
    """Write down when jobs will start; of the others nobody knows."""
    # A place that was written while its job left the line would count for ever.
    session.execute(_FORGET)
    known = {id_: at for id_, at in session.execute(select(QueuePlace.job_id, QueuePlace.estimated_start))}
    changed = [
        {"job": id_, "at": starts.get(id_)}
        for id_, at in known.items()
        if (at is None) != (id_ not in starts) or (at is not None and abs(at - starts[id_]) >= 1)
    ]
    if changed:
        directly(session, _NOTE, changed)


_FORGET = (
    delete(QueuePlace)
    .where(QueuePlace.job_id.not_in(select(Job.id).where(Job.state == JobState.QUEUED)))
    .execution_options(synchronize_session=False)
)
_NOTE = update(QueuePlace).where(QueuePlace.job_id == bindparam("job")).values(estimated_start=bindparam("at"))


# Looking


@dataclass(frozen=True)
class Prospect:
    """Where a job stands, or what would become of one that is submitted now."""

    position: int
    """1 is next."""
    reason: str | None = None
    """Why it waits; None of one that would start at once."""
    estimated_start: float | None = None
    """Unix seconds; None where nobody knows."""


def prospect(session: Session, job: Job, *, ahead: int | None = None) -> Prospect | None:
    """A queued job's place in line; None when it isn't queued. `ahead`: how many go before it, if it is new."""
    if job.state is not JobState.QUEUED:
        return None
    if ahead is not None:
        return Prospect(1 + ahead, job.queue_reason)
    queued_at = job.created_at if job.queued_at is None else job.queued_at
    here = {"id": job.id, "priority": job.priority, "queued_at": queued_at}
    place = directly(session, _PLACE, here).one()
    return Prospect(1 + place.ahead, job.queue_reason, place.estimated_start)


def position(session: Session, job: Job) -> int | None:
    """1 for the job that is next; None when it isn't queued."""
    here = prospect(session, job)
    return here.position if here else None


_NUMBER = select(QueuePlace.number).where(QueuePlace.job_id == bindparam("id")).scalar_subquery()
_BEFORE = QueuePlace.__table__.alias()
_PLACE = select(
    case(
        (_NUMBER.is_not(None), select(func.count()).where(_BEFORE.c.number < _NUMBER).scalar_subquery()),
        # The scheduler has not looked at it yet.
        else_=AHEAD,
    ).label("ahead"),
    select(QueuePlace.estimated_start)
    .where(QueuePlace.job_id == bindparam("id"))
    .scalar_subquery()
    .label("estimated_start"),
)


def foresee(
    session: Session,
    *,
    needs: int,
    device: str,
    priority: int,
    project: str,
    runtime: float | None = None,
    half_life: timedelta = HALF_LIFE,
) -> Prospect:
    """Where a project's job would stand in the queue that needs so many slots for so many seconds."""
    base = _base(session, half_life, counting=False)
    wanted = Waiting("", needs, device, project, runtime, priority, base.now)
    queued = _queued(session, base, MOST_FORESEEN)
    view = base.with_line([*map(_waiting, queued), wanted])
    ahead = _ahead_of(session, view.line, wanted, {row.id: row.number for row in queued if row.number is not None})
    decision = decide(view.ready, view.hosts, view.allowances, now=view.now, resting=view.resting)
    return Prospect(1 + ahead, decision.reasons.get(""), view.starts().get(""))


def _ahead_of(session: Session, line: Sequence[Waiting], wanted: Waiting, numbers: Mapping[str, float]) -> int:
    """How many wait before `wanted`, of whom `line` has the front, those with `numbers`, and the new ones."""
    place = line.index(wanted)
    if len(numbers) == session.scalar(_LENGTH):
        return place
    before = [numbers[job.job_id] for job in line[:place] if job.job_id in numbers]
    if len(before) == len(numbers):
        # Behind the front it stands at first as any that the scheduler has not looked at yet.
        return session.scalar(AHEAD_OF_A_NEW_ONE, {"priority": wanted.priority}) or 0
    known = session.scalar(_UP_TO, {"number": max(before)}) or 0 if before else 0
    return known + place - len(before)


# Reading

_DEVICE = Job.run_config["device"].as_string()
_COLUMNS = (
    Job.id,
    Job.slots,
    _DEVICE.label("device"),
    Job.project_id,
    Job.max_runtime,
    Job.priority,
    QUEUED_AT.label("queued_at"),
    Job.retry_at,
    Job.queue_reason,
    QueuePlace.number,
)
_EVERYONE = select(*_COLUMNS).outerjoin(QueuePlace, QueuePlace.job_id == Job.id).where(Job.state == JobState.QUEUED)
_LENGTH = select(func.count()).select_from(QueuePlace)
_UP_TO = _LENGTH.where(QueuePlace.number <= bindparam("number"))
_NEW = _EVERYONE.where(QueuePlace.job_id.is_(None))
_FRONT = (
    select(*_COLUMNS)
    .select_from(QueuePlace)
    .join(Job, Job.id == QueuePlace.job_id)
    .where(Job.state == JobState.QUEUED)
    .order_by(QueuePlace.number)
)


def _queued(session: Session, base: View, depth: int | None) -> Sequence[Any]:
    """Rows of jobs that wait: everyone, or the new ones, and at the front those that could start if there were room."""
    if depth is None or (session.scalar(_LENGTH) or 0) <= depth:
        return session.execute(_EVERYONE).all()
    could = or_(
        *(
            (device == _DEVICE)
            & (Job.slots <= max((host.num_slots for host in base.hosts if suits(host, device)), default=0))
            for device in ("cpu", "cuda")
        )
    )
    kept_back = [project for project, allowance in base.allowances.items() if allowance.is_used_up]
    now_or_then = or_(Job.retry_at.is_(None), Job.retry_at <= base.now)
    front = _FRONT.where(could, now_or_then, Job.project_id.not_in(kept_back)).limit(depth)
    return [*session.execute(front), *session.execute(_NEW)]


def _waiting(row: Any) -> Waiting:
    id_, needs, device, project, runtime, priority, queued_at, retry_at, *_ = row
    return Waiting(id_, needs, device, project, runtime, priority, queued_at, retry_at or 0.0)


def _base(session: Session, half_life: timedelta, *, counting: bool) -> View:
    """All but the line."""
    now = session.scalar(select(database_now())) or 0.0
    seconds = half_life.total_seconds()
    running = _running(session, now)
    return View(
        now,
        [],
        _hosts(session, running),
        list(running.values()),
        shares.standings(session, now=now, half_life=seconds, counting=counting),
        quotas.allowances(session),
        seconds,
        nodes.resting(session),
    )


def _running(session: Session, now: float) -> dict[str, Running]:
    """By id, each job that holds slots."""
    slots: dict[str, list[int]] = {}
    for job_id, index in session.execute(
        select(Slot.job_id, Slot.index).where(Slot.job_id.is_not(None)).order_by(Slot.index)
    ):
        slots.setdefault(job_id or "", []).append(index)
    if not slots:
        return {}
    rows = session.execute(
        select(Job.id, Job.node, Job.project_id, Job.max_runtime, Job.progress, Job.priority, Job.state, Job.makes_way,
               Project.preemption, Holding.started_at)
        .join(Project, Project.id == Job.project_id)
        .outerjoin(Holding, (Holding.job_id == Job.id) & Holding.ended_at.is_(None))
        .where(Job.id.in_(slots))
    )  # fmt: skip
    return {row.id: _run(row, tuple(slots[row.id]), now) for row in rows}


def _run(row: Any, slots: tuple[int, ...], now: float) -> Running:
    is_stopping = row.makes_way or row.state in {JobState.PAUSING, JobState.CANCELLING}
    return Running(
        row.node,
        slots,
        row.project_id,
        now if is_stopping else ends_at(now, row.started_at, row.max_runtime, row.progress),
        row.id,
        row.priority,
        row.started_at or 0.0,
        row.preemption,
        is_stopping,
        row.state is JobState.STARTING and now - (row.started_at or 0.0) < STARTS_WITHIN.total_seconds(),
    )


def ends_at(now: float, started_at: float | None, max_runtime: float | None, progress: Mapping[str, Any]) -> float:
    """When a run will have ended: by its limit, and by what it says itself, whichever is earlier."""
    limit = inf if started_at is None or max_runtime is None else started_at + max_runtime
    left = progress.get("eta_seconds")
    return max(now, min(limit, inf if left is None else now + left))


def _hosts(session: Session, running: Mapping[str, Running]) -> list[Host]:
    free: dict[str, list[int]] = {}
    for node, index in session.execute(
        select(Slot.node, Slot.index).where(Slot.job_id.is_(None)).order_by(Slot.node, Slot.index)
    ):
        free.setdefault(node, []).append(index)
    held: dict[str, list[Held]] = {}
    starting: Counter[str] = Counter()
    for run in running.values():
        held.setdefault(run.node, []).append(Held(len(run.slots), run.ends_at))
        starting[run.node] += len(run.slots) if run.is_starting else 0
    return [
        Host(
            node.name,
            node.device,
            node.num_slots,
            tuple(index for index in free.get(node.name, ()) if index < node.num_slots),
            tuple(held.get(node.name, ())),
            starting[node.name],
            inf if node.starts_at_once is None else node.starts_at_once,
        )
        for node in nodes.alive(session)
    ]
