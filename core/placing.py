"""Which waiting jobs start now, where, and why the others wait: a pure decision over plain values.

EASY backfill (Lifka 1995): the first job in line that can't start reserves the host where it can start earliest, from
when those that run there will have ended. A later job starts where it is not in the way of that: on another host, on
slots that the reserving job leaves over, or on its slots, if it will have ended by then.

A host starts so many ranks at once. A job that would be one too many keeps the slots that it would have from those
behind it, and gets them as soon as enough of those before it train.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import inf
from typing import NamedTuple

from core.quotas import Allowance
from engine.counting import counted

NO_WORKER = "no worker is online: start one with `trainshed serve` or `trainshed worker`"
MOST_REASONED = 100
"""Waiting jobs that are told exactly what they wait for. What is true of those behind changes with each job ahead."""
FAR_BEHIND = f"more than {MOST_REASONED} waiting jobs come before it"

_UNLIMITED = Allowance()


@dataclass(frozen=True)
class Placement:
    """A job and the slots it is given."""

    job_id: str
    node: str
    slots: tuple[int, ...]


class Waiting(NamedTuple):
    """A queued job, as far as placing it goes."""

    job_id: str
    needs: int
    device: str = "cpu"
    """What its run was made for: `cuda` needs GPUs, `cpu` runs anywhere."""
    project: str = ""
    """Whose it is, and whose quotas and share hold for it."""
    runtime: float | None = None
    """Seconds after which it will have ended at the latest; None where nobody said."""
    priority: int = 0
    queued_at: float = 0.0
    """Since when it has its place among those of its project."""
    ready_at: float = 0.0
    """Not before this."""


class Held(NamedTuple):
    """Slots of a host that a job has."""

    slots: int
    ends_at: float = inf
    """When they will be free at the latest; infinite where nobody knows."""


@dataclass(frozen=True)
class Host:
    """A node that takes jobs."""

    name: str
    device: str
    num_slots: int
    free: tuple[int, ...]
    """Indices of its free slots, in order."""
    held: tuple[Held, ...] = ()
    """Who has the others, as far as it is known when they end."""
    starting: int = 0
    """Ranks that are being started there."""
    starts_at_once: float = inf
    """Ranks that may be, unless it is one job alone."""


class Resting(NamedTuple):
    """A node that is online and gets no jobs for a while, as it did not start those before."""

    name: str
    device: str
    num_slots: int
    until: float


@dataclass(frozen=True)
class Reservation:
    """A host that is kept for a job which can't start yet."""

    job_id: str
    node: str
    at: float
    """When it can start there at the latest; infinite where nobody knows."""


@dataclass
class Decision:
    """What starts now, and why the rest doesn't."""

    placements: list[Placement] = field(default_factory=list)
    upcoming: list[Placement] = field(default_factory=list)
    """What starts there when those have begun that are being started."""
    reasons: dict[str, str] = field(default_factory=dict)
    reservation: Reservation | None = None


class _Room:
    """A host while it is decided."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.free = list(host.free)
        self.held = list(host.held)
        self.left = 0
        """Under a reservation, slots that its job will leave over when it starts."""
        self.starting = host.starting
        self.takes_turns = False
        """A job waits here for its turn to start; those behind it wait for theirs."""

    def may_start(self, job: Waiting) -> bool:
        """Whether its ranks are not too many to be started beside the others."""
        if self.takes_turns:
            return False
        return self.starting == 0 or self.starting + job.needs <= self.host.starts_at_once

    def take(self, job: Waiting, now: float) -> Placement:
        slots = tuple(self.free[: job.needs])
        del self.free[: job.needs]
        self.held.append(Held(job.needs, now + (inf if job.runtime is None else job.runtime)))
        return Placement(job.job_id, self.host.name, slots)

    def free_at(self, needs: int) -> tuple[float, int]:
        """When so many slots will be free, and how many more will be then."""
        ready, at = len(self.free), 0.0
        for slots, ends_at in sorted(self.held, key=lambda held: held.ends_at):
            if ready >= needs and ends_at > at:
                break
            ready, at = ready + slots, ends_at
        return (at, ready - needs) if ready >= needs and at < inf else (inf, 0)


def decide(
    line: Iterable[Waiting],
    hosts: Sequence[Host],
    allowances: Mapping[str, Allowance] | None = None,
    *,
    now: float = 0.0,
    resting: Sequence[Resting] = (),
) -> Decision:
    """Place what can be placed, in the order given. What its project's quotas keep back keeps nobody else waiting.

    Those that are `resting` get nothing; who waits for want of them is told so.
    """
    return _Deciding(hosts, allowances or {}, now, resting).decide(line)


class _Deciding:
    """One decision while it is made. Slots only get fewer in it, so what did not fit once will not fit later."""

    def __init__(
        self, hosts: Sequence[Host], allowances: Mapping[str, Allowance], now: float, resting: Sequence[Resting]
    ) -> None:
        self.now = now
        self.resting = resting
        self.rooms = [_Room(host) for host in hosts]
        self.allowed = dict(allowances)
        self.decision = Decision()
        self.reserved: _Room | None = None
        self.too_many: dict[str, float] = {}
        """By device, the fewest slots for which no host but the reserved one had room."""
        self.words: dict[tuple[str, int, bool], str] = {}
        self.largest = {
            device: max((room.host.num_slots for room in self.rooms if suits(room.host, device)), default=0)
            for device in ("cpu", "cuda")
        }

    def decide(self, line: Iterable[Waiting]) -> Decision:
        reasons = self.decision.reasons
        for job in line:
            if self.allowed and (why := _kept_back(self.allowed.get(job.project, _UNLIMITED))):
                reasons[job.job_id] = why
            elif not self.place(job):
                reasons[job.job_id] = self.reason(job)
                if self.reserved is None:
                    self.reserve(job)
        return self.decision

    def place(self, job: Waiting) -> bool:
        room = self.room(job)
        if room is None:
            return False
        if room is self.reserved and not self.ends_in_time(job):
            room.left -= job.needs
        placement = room.take(job, self.now)
        if room.may_start(job):
            room.starting += job.needs
            self.decision.placements.append(placement)
        else:
            room.takes_turns = True
            self.decision.upcoming.append(placement)
            self.decision.reasons[job.job_id] = _its_turn(room)
        allowance = self.allowed.get(job.project)
        if allowance is not None and allowance.jobs is not None:
            self.allowed[job.project] = replace(allowance, jobs=allowance.jobs - 1)
        self.words.clear()
        return True

    def room(self, job: Waiting) -> _Room | None:
        """The kind of host that the job was made for; of those one that starts it at once, with the tightest fit.

        So large gaps stay for large jobs.
        """
        able = []
        if job.needs < self.too_many.get(job.device, inf):
            able = [room for room in self.rooms if room is not self.reserved and self.fits(room, job)]
            if not able:
                self.too_many[job.device] = job.needs
        kept = self.reserved
        if kept is not None and self.fits(kept, job) and (job.needs <= kept.left or self.ends_in_time(job)):
            able.append(kept)
        return min(
            able,
            key=lambda room: (
                room.host.device != job.device, not room.may_start(job), len(room.free), room.host.name
            ),
            default=None,
        )  # fmt: skip

    def fits(self, room: _Room, job: Waiting) -> bool:
        return len(room.free) >= job.needs and suits(room.host, job.device)

    def ends_in_time(self, job: Waiting) -> bool:
        """Whether it will be gone before the reserving job can start, which may be at any time where none is known."""
        at = self.decision.reservation.at if self.decision.reservation is not None else inf
        return job.runtime is not None and at < inf and self.now + job.runtime <= at

    def reserve(self, job: Waiting) -> None:
        """Keep the host for it where it can start earliest; of those the one where most is free."""
        able = [room for room in self.rooms if room.host.num_slots >= job.needs and suits(room.host, job.device)]
        if not able:
            return
        when = {room.host.name: room.free_at(job.needs) for room in able}
        # Where nobody knows when it is free, the greater name among equals is as good as any.
        best = max(able, key=lambda room: (-when[room.host.name][0], len(room.free), room.host.name))
        at, best.left = when[best.host.name]
        self.reserved = best
        self.decision.reservation = Reservation(job.job_id, best.host.name, at)
        self.too_many.clear()
        self.words.clear()

    # In words, for whoever owns the job: other jobs may be somebody else's, so none is named.

    def reason(self, job: Waiting) -> str:
        if not self.rooms and not self.resting:
            return NO_WORKER
        is_able = self.largest[job.device] >= job.needs
        if is_able and len(self.decision.reasons) >= MOST_REASONED:
            return FAR_BEHIND
        key = (job.device, job.needs, is_able)
        if key not in self.words:
            self.words[key] = self.reason_of(job, is_able=is_able)
        return self.words[key]

    def reason_of(self, job: Waiting, *, is_able: bool) -> str:
        unit = "GPU" if job.device == "cuda" else "slot"
        needs = f"needs {counted(job.needs, unit)}"
        if not is_able:
            if later := [each for each in self.resting if each.num_slots >= job.needs and suits(each, job.device)]:
                return f"{needs}; {rest_in_words(later)}"
            online: list[Host | Resting] = [*(room.host for room in self.rooms), *self.resting]
            largest = max((each.num_slots for each in online if suits(each, job.device)), default=0)
            return f"{needs}; the largest node that is online has {largest}"
        able = [room for room in self.rooms if room.host.num_slots >= job.needs and suits(room.host, job.device)]
        kept = self.reserved
        if kept is None or kept not in able or len(kept.free) < job.needs:
            most = max(len(room.free) for room in able)
            return f"{needs}, {most} {_are(most)} free"
        most = max((len(room.free) for room in able if room is not kept), default=0)
        known = self.decision.reservation is not None and self.decision.reservation.at < inf
        advice = "; with a short enough max_runtime it would start before that" if known else ""
        return (
            f"{needs}; {most} {_are(most)} free, and {kept.host.name} is kept for a larger job, which is next{advice}"
        )


def rest_in_words(resting: Sequence[Resting]) -> str:
    """Which nodes that are online get no jobs, until when, why, and what to do."""
    who = ", ".join(
        f"{each.name} rests until {datetime.fromtimestamp(each.until, UTC):%H:%M:%S} UTC" for each in resting
    )
    return (
        f"{who}: the last jobs that were given there were not started; see what node and worker say, and restart both"
    )


def suits(host: Host | Resting, device: str) -> bool:
    """Whether a run made for `device` can compute there."""
    return host.device == device or device == "cpu"


def _kept_back(allowance: Allowance) -> str | None:
    """Why nothing more of this project may start now."""
    if allowance.hours_spent is not None:
        return f"the project has used its {allowance.hours_spent:g} GPU-hours of this month"
    if allowance.jobs is not None and allowance.jobs <= 0:
        return f"the project runs as many jobs at once as it may, {allowance.at_once}"
    return None


def _its_turn(room: _Room) -> str:
    host, ranks = room.host, "rank" if room.host.starts_at_once == 1 else "ranks"
    return f"{host.name} has room for it and starts {host.starts_at_once:g} {ranks} at once: it is among the next"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
