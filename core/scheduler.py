"""Who runs next, and where: a pure decision, and one transaction that carries it out.

Higher priority first, then age. The first waiting job that can't start now, though some node is large enough for it,
reserves the node where most is free: later jobs may use the others only. So a large job waits for the jobs that run
there already and for none that came after it. Everything behind it that fits elsewhere starts at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from sqlalchemy import ColumnElement, Float, String, and_, bindparam, func, or_, select, tuple_, update
from sqlalchemy.orm import Session

from core import jobs, nodes, quotas
from core.db import SCHEDULING, directly, lock
from core.errors import InvalidMove
from core.models import Job, Slot, database_now
from core.quotas import Allowance
from core.states import JobState

CLAIM_WITHIN = timedelta(seconds=60)
"""How long a placed job may stay without a supervisor before it is taken back."""

_UNLIMITED = Allowance()
NO_WORKER = "no worker is online: start one with `trainshed serve` or `trainshed worker`"


@dataclass(frozen=True)
class Placement:
    """A job and the slots it is given."""

    job_id: str
    node: str
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Waiting:
    """A queued job, as far as placing it goes."""

    job_id: str
    needs: int
    device: str = "cpu"
    """What its run was made for: `cuda` needs GPUs, `cpu` runs anywhere."""
    project: str = ""
    """Whose it is, and whose quotas hold for it."""


@dataclass(frozen=True)
class Host:
    """A node that takes jobs."""

    name: str
    device: str
    num_slots: int
    free: tuple[int, ...]
    """Indices of its free slots, in order."""


@dataclass
class Decision:
    """What starts now, and why the rest doesn't."""

    placements: list[Placement] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)


def decide(
    waiting: Sequence[Waiting], hosts: Sequence[Host], allowances: Mapping[str, Allowance] | None = None
) -> Decision:
    """Place what can be placed, in the order given. What its project's quotas keep back keeps nobody else waiting."""
    decision = Decision()
    allowed_by = dict(allowances or {})
    free = {host.name: list(host.free) for host in hosts}
    reserved: str | None = None
    for job in waiting:
        allowance = allowed_by.get(job.project, _UNLIMITED)
        if why := _kept_back(allowance):
            decision.reasons[job.job_id] = why
            continue
        able = [host for host in hosts if _suits(host, job) and host.num_slots >= job.needs]
        allowed = [host for host in able if host.name != reserved]
        if host := _best([host for host in allowed if len(free[host.name]) >= job.needs], job, free):
            slots = tuple(free[host.name][: job.needs])
            del free[host.name][: job.needs]
            decision.placements.append(Placement(job.job_id, host.name, slots))
            if allowance.jobs is not None:
                allowed_by[job.project] = replace(allowance, jobs=allowance.jobs - 1)
            continue
        decision.reasons[job.job_id] = _reason(job, hosts, able, allowed, free, reserved)
        if able and reserved is None:
            reserved = max(able, key=lambda host: (len(free[host.name]), host.name)).name
    return decision


def _kept_back(allowance: Allowance) -> str | None:
    """Why nothing more of this project may start now."""
    if allowance.hours_spent is not None:
        return f"the project has used its {allowance.hours_spent:g} GPU-hours of this month"
    if allowance.jobs is not None and allowance.jobs <= 0:
        return f"the project runs as many jobs at once as it may, {allowance.at_once}"
    return None


def _suits(host: Host, job: Waiting) -> bool:
    return host.device == job.device or job.device == "cpu"


def _best(hosts: Sequence[Host], job: Waiting, free: dict[str, list[int]]) -> Host | None:
    """The kind of host that the job was made for; then the tightest fit, so that large gaps stay for large jobs."""
    return min(hosts, key=lambda host: (host.device != job.device, len(free[host.name]), host.name), default=None)


def _reason(
    job: Waiting,
    hosts: Sequence[Host],
    able: Sequence[Host],
    allowed: Sequence[Host],
    free: dict[str, list[int]],
    reserved: str | None,
) -> str:
    """In words, for whoever owns the job: other jobs may be somebody else's, so none is named."""
    if not hosts:
        return NO_WORKER
    unit = "GPU" if job.device == "cuda" else "slot"
    needs = f"needs {job.needs} {unit}{'' if job.needs == 1 else 's'}"
    if not able:
        largest = max((host.num_slots for host in hosts if _suits(host, job)), default=0)
        return f"{needs}; the largest node that is online has {largest}"
    most = max((len(free[host.name]) for host in allowed), default=0)
    if reserved in {host.name for host in able} and len(free[reserved]) >= job.needs:
        return f"{needs}; {most} {_are(most)} free, and {reserved} is kept for a larger job, which is next"
    return f"{needs}, {most} {_are(most)} free"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def tick(session: Session, *, claim_within: timedelta = CLAIM_WITHIN) -> list[Placement]:
    """Give free slots to queued jobs, tell their nodes after the commit, and write down why the rest waits."""
    lock(session, SCHEDULING)
    device = Job.run_config["device"].as_string()
    queued = session.execute(
        select(Job.id, Job.slots, device, Job.project_id, Job.queue_reason).where(_ready()).order_by(*_ORDER)
    ).all()
    if not queued:
        return []
    waiting = [Waiting(job_id, needs, device, project) for job_id, needs, device, project, _ in queued]
    decision = decide(waiting, _hosts(session), quotas.allowances(session))
    placed = [placement for placement in decision.placements if _place(session, placement, claim_within)]
    changed = [
        {"job": job_id, "reason": decision.reasons[job_id]}
        for job_id, _, _, _, reason in queued
        if job_id in decision.reasons and decision.reasons[job_id] != reason
    ]
    if changed:
        # One that was cancelled a moment ago waits for nothing any more.
        still = update(Job).where(Job.id == bindparam("job"), Job.state == JobState.QUEUED)
        session.connection().execute(still.values(queue_reason=bindparam("reason")), changed)
    return placed


def _place(session: Session, placement: Placement, claim_within: timedelta) -> bool:
    """Whether the job took the slots; not if it was cancelled or paused since it was read."""
    try:
        jobs.place(session, placement.job_id, placement.node, placement.slots, claim_within=claim_within)
    except InvalidMove:
        return False
    return True


def position(session: Session, job: Job) -> int | None:
    """1 for the job that is next; None when it isn't queued."""
    if job.state is not JobState.QUEUED:
        return None
    here = {"priority": job.priority, "created_at": job.created_at, "id": job.id}
    return 1 + (directly(session, _AHEAD, here).scalar() or 0)


_QUEUED = select(func.count()).where(Job.state == JobState.QUEUED)
# Two counts, each along a stretch of the index of the line.
_AHEAD = select(
    _QUEUED.where(Job.priority > bindparam("priority")).scalar_subquery()
    + _QUEUED.where(
        Job.priority == bindparam("priority"),
        tuple_(Job.created_at, Job.id) < tuple_(bindparam("created_at", type_=Float), bindparam("id", type_=String)),
    ).scalar_subquery()
)


@dataclass(frozen=True)
class Prospect:
    """What would become of a job that is submitted now."""

    position: int
    """1 would be next."""
    reason: str | None
    """Why it would wait; None: it would start at once."""


def foresee(session: Session, *, needs: int, device: str, priority: int, project: str) -> Prospect:
    """Where a project's job would stand in the queue that needs so many slots."""
    first = Job.priority >= priority
    ahead = session.execute(
        select(Job.id, Job.slots, Job.run_config["device"].as_string(), Job.project_id)
        .where(_ready(), first)
        .order_by(*_ORDER)
    )
    waiting = [*(Waiting(*row) for row in ahead), Waiting("", needs, device, project)]
    decision = decide(waiting, _hosts(session), quotas.allowances(session))
    count = session.scalar(select(func.count()).where(Job.state == JobState.QUEUED, first))
    return Prospect(1 + (count or 0), decision.reasons.get(""))


_ORDER = (Job.priority.desc(), Job.created_at, Job.id)


def _ready() -> ColumnElement[bool]:
    return and_(Job.state == JobState.QUEUED, or_(Job.retry_at.is_(None), Job.retry_at <= database_now()))


def _hosts(session: Session) -> list[Host]:
    free: dict[str, list[int]] = {}
    for node, index in session.execute(
        select(Slot.node, Slot.index).where(Slot.job_id.is_(None)).order_by(Slot.node, Slot.index)
    ):
        free.setdefault(node, []).append(index)
    return [
        Host(
            node.name,
            node.device,
            node.num_slots,
            tuple(index for index in free.get(node.name, ()) if index < node.num_slots),
        )
        for node in nodes.alive(session)
    ]
