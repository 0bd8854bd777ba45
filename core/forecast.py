"""When each waiting job will start if all that is known comes true: the scheduler's own decision, played forward.

Runs end when their `max_runtime` or their own estimate says, and nobody else comes. So an estimate is late where runs
end early, and early where something that goes first is submitted later; behind a run of unknown length there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf

from core.line import ordered
from core.placing import Held, Host, Waiting, decide
from core.quotas import Allowance
from core.shares import DAY, Standing

MOST_FORESEEN = 200
"""Jobs of the line whose starts are reckoned. What comes further behind depends on too much that is not known yet."""


@dataclass(frozen=True)
class Running:
    """A job that holds slots."""

    node: str
    slots: tuple[int, ...]
    project: str = ""
    ends_at: float = inf
    """Infinite where nobody knows."""
    job_id: str = ""
    priority: int = 0
    started_at: float = 0.0
    preemption: str = "never"
    """Whose jobs of higher priority may stop it: `never`, its `own` project's or `any`."""
    is_stopping: bool = False
    """It was told to end: its slots will be free within moments."""
    is_starting: bool = False
    """It does not train yet, and its host is at work to have it do so."""


def starts(
    waiting: Iterable[Waiting],
    hosts: Sequence[Host],
    *,
    now: float,
    running: Iterable[Running] = (),
    standings: Mapping[str, Standing] | None = None,
    allowances: Mapping[str, Allowance] | None = None,
    half_life: float = DAY,
    most: int = MOST_FORESEEN,
) -> dict[str, float]:
    """When each of the first `most` in line starts; those that nothing is known of are missing."""
    future = _Future(hosts, now, dict(standings or {}), dict(allowances or {}), half_life)
    for number, run in enumerate(running):
        future.expect(max(run.ends_at, now), run, f"\0{number}")
    left = {job.job_id: job for job in future.ordered(waiting)[:most]}
    found: dict[str, float] = {}
    while left:
        ready = [job for job in left.values() if job.ready_at <= future.now]
        for job in future.placed(ready):
            found[job.job_id] = future.now
            del left[job.job_id]
        upcoming = min((job.ready_at for job in left.values() if job.ready_at > future.now), default=inf)
        if not future.advance(upcoming):
            break
    return found


class _Future:
    """The cluster at a moment that moves on."""

    def __init__(
        self,
        hosts: Sequence[Host],
        now: float,
        standings: dict[str, Standing],
        allowances: dict[str, Allowance],
        half_life: float,
    ) -> None:
        self.now = now
        # Whose turn it is to start is a matter of seconds, which an estimate does not go into.
        self.hosts = {host.name: replace(host, held=(), starts_at_once=inf) for host in hosts}
        self.slots = sum(host.num_slots for host in hosts)
        self.standings, self.allowances, self.half_life = standings, allowances, half_life
        self.ends: list[tuple[float, str, Running]] = []
        self.held: dict[str, dict[str, Held]] = {host.name: {} for host in hosts}

    def ordered(self, waiting: Iterable[Waiting]) -> list[Waiting]:
        return ordered(waiting, self.standings, now=self.now, slots=self.slots, patience=self.half_life)

    def expect(self, at: float, run: Running, key: str) -> None:
        """A run that has its slots until `at`."""
        if run.node in self.hosts:
            self.held[run.node][key] = Held(len(run.slots), at)
        if at < inf:
            heappush(self.ends, (at, key, run))

    def placed(self, ready: Sequence[Waiting]) -> list[Waiting]:
        """Those that start at this moment."""
        hosts = [replace(host, held=tuple(self.held[name].values())) for name, host in self.hosts.items()]
        decision = decide(self.ordered(ready), hosts, self.allowances, now=self.now)
        jobs = {job.job_id: job for job in ready}
        started = []
        for placement in decision.placements:
            job = jobs[placement.job_id]
            host = self.hosts[placement.node]
            taken = set(placement.slots)
            self.hosts[host.name] = replace(host, free=tuple(index for index in host.free if index not in taken))
            self.hold(job.project, len(placement.slots), jobs=1)
            ends_at = inf if job.runtime is None else self.now + job.runtime
            self.expect(ends_at, Running(host.name, placement.slots, job.project, ends_at), job.job_id)
            started.append(job)
        return started

    def advance(self, upcoming: float) -> bool:
        """On to the next moment at which anything changes, at the latest `upcoming`; False if there is none."""
        at = min(upcoming, self.ends[0][0] if self.ends else inf)
        if at == inf:
            return False
        passed = at - self.now
        self.standings = {id_: one.after(passed, self.half_life) for id_, one in self.standings.items()}
        self.now = at
        while self.ends and self.ends[0][0] <= at:
            _, key, run = heappop(self.ends)
            self.hold(run.project, -len(run.slots), jobs=-1)
            if host := self.hosts.get(run.node):
                del self.held[run.node][key]
                back = [index for index in run.slots if index < host.num_slots]
                self.hosts[run.node] = replace(host, free=tuple(sorted([*host.free, *back])))
        return True

    def hold(self, project: str, slots: int, *, jobs: int) -> None:
        self.standings[project] = self.standings.get(project, Standing()).holding(slots)
        allowance = self.allowances.get(project)
        if allowance is not None and allowance.jobs is not None:
            self.allowances[project] = replace(allowance, jobs=allowance.jobs - jobs)
