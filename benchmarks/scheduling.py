"""Ten thousand jobs on a simulated cluster, through the scheduler's own decision, and through three simpler ones.

`python -m benchmarks.scheduling` prints how much of the GPUs was used, and how long the unluckiest jobs waited.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from random import Random
from statistics import mean

from core.line import ordered
from core.placing import Held, Host, Waiting, decide
from core.shares import Standing

HOUR, DAY = 3600.0, 86400.0
SLOTS = 8
"""GPUs of a host; a job has one host in this version."""
SIZES = {1: 0.55, 2: 0.15, 4: 0.15, 8: 0.15}
"""Which share of the jobs wants so many GPUs: most want one, and most of the work is in the largest."""
LIMITS = tuple(hours * HOUR for hours in (0.5, 1, 2, 4, 8, 12, 24, 48, 96))
"""What people say as `max_runtime`."""
PROJECTS = 12
LOADS = {8: 0.6, 64: 0.9, 256: 0.95, 1024: 0.95}
"""Of the cluster's GPU-hours, while jobs come in, by GPUs: a single host can't be kept as full as many."""

Placed = tuple[Waiting, str, tuple[int, ...]]
Policy = Callable[[Sequence[Waiting], Sequence[Host], Mapping[str, Standing], float], list[Placed]]


@dataclass(frozen=True)
class Asked:
    """A job of the workload."""

    job: Waiting
    """`runtime` is what its owner says, if anything."""
    lasts: float
    """Seconds that it really takes."""


def workload(count: int, *, gpus: int, seed: int, load: float) -> list[Asked]:
    """Jobs in the order in which they come, for that much of `gpus`.

    Runtimes are lognormal: half an hour in the middle, some of days. A tenth of the owners say no limit, the others a
    round one of one to five times what it takes. Projects are of very different sizes, and come in bursts.
    """
    rng = Random(seed)
    sizes = rng.choices(list(SIZES), weights=list(SIZES.values()), k=count)
    lasts = [min(max(60.0, rng.lognormvariate(7.5, 1.6)), 2 * DAY) for _ in range(count)]
    gap = sum(size * seconds for size, seconds in zip(sizes, lasts, strict=True)) / (count * gpus * load)
    weights = [1 / (rank + 1) for rank in range(PROJECTS)]
    asked: list[Asked] = []
    now, project, burst = 0.0, "", 0
    for number, (size, seconds) in enumerate(zip(sizes, lasts, strict=True)):
        if burst == 0:
            project, burst = f"p{rng.choices(range(PROJECTS), weights=weights)[0]:02}", rng.choice((1, 1, 2, 5, 20, 60))
        burst -= 1
        now += rng.expovariate(1 / gap)
        limit = next((limit for limit in LIMITS if limit >= seconds * rng.uniform(1, 5)), LIMITS[-1])
        runtime = None if rng.random() < 0.1 else limit
        asked.append(Asked(Waiting(f"j{number:06}", size, "cuda", project, runtime, 0, now), seconds))
    return asked


def cluster(gpus: int) -> list[Host]:
    """Hosts of eight."""
    return [Host(f"h{number:03}", "cuda", SLOTS, tuple(range(SLOTS))) for number in range(gpus // SLOTS)]


# Policies


def ours(
    waiting: Sequence[Waiting], hosts: Sequence[Host], standings: Mapping[str, Standing], now: float
) -> list[Placed]:
    """The scheduler's."""
    slots = sum(host.num_slots for host in hosts)
    return _decided(ordered(waiting, standings, now=now, slots=slots), hosts, now)


def by_age(
    waiting: Sequence[Waiting], hosts: Sequence[Host], standings: Mapping[str, Standing], now: float
) -> list[Placed]:
    """The scheduler's, without shares: what its reservations alone do."""
    return _decided(waiting, hosts, now)


def _decided(line: Sequence[Waiting], hosts: Sequence[Host], now: float) -> list[Placed]:
    jobs = {job.job_id: job for job in line}
    return [(jobs[placed.job_id], placed.node, placed.slots) for placed in decide(line, hosts, now=now).placements]


def greedy(
    waiting: Sequence[Waiting], hosts: Sequence[Host], standings: Mapping[str, Standing], now: float
) -> list[Placed]:
    """Whatever fits, by age."""
    return _in_turn(waiting, hosts, stop=False)


def fifo(
    waiting: Sequence[Waiting], hosts: Sequence[Host], standings: Mapping[str, Standing], now: float
) -> list[Placed]:
    """By age; nobody before the first that does not fit."""
    return _in_turn(waiting, hosts, stop=True)


POLICIES: dict[str, Policy] = {"ours": ours, "by_age": by_age, "greedy": greedy, "fifo": fifo}


def _in_turn(waiting: Sequence[Waiting], hosts: Sequence[Host], *, stop: bool) -> list[Placed]:
    free = {host.name: list(host.free) for host in hosts}
    placed: list[Placed] = []
    least = inf
    for job in waiting:
        if job.needs >= least:
            continue
        name = min(
            (name for name in free if len(free[name]) >= job.needs), key=lambda name: len(free[name]), default=""
        )
        if name:
            placed.append((job, name, tuple(free[name][: job.needs])))
            del free[name][: job.needs]
        elif stop:
            break
        else:
            least = job.needs
    return placed


# Playing


@dataclass
class Ran:
    """When a job came, started and ended."""

    asked: Asked
    started: float
    ended: float

    @property
    def wait(self) -> float:
        return self.started - self.asked.job.queued_at


def replay(asked: Iterable[Asked], hosts: Sequence[Host], policy: Policy, *, half_life: float = DAY) -> dict[str, Ran]:
    """What becomes of each job. The policy is asked whenever one comes or ends, as the scheduler is."""
    coming = sorted(asked, key=lambda one: one.job.queued_at)[::-1]
    state = {host.name: host for host in hosts}
    of = {one.job.job_id: one for one in coming}
    waiting: dict[str, Waiting] = {}
    ends: list[tuple[float, str, str, tuple[int, ...]]] = []
    held: dict[str, dict[str, Held]] = {host.name: {} for host in hosts}
    standings: dict[str, Standing] = {}
    ran: dict[str, Ran] = {}
    now = 0.0
    while coming or ends:
        at = min(coming[-1].job.queued_at if coming else inf, ends[0][0] if ends else inf)
        standings = {project: one.after(at - now, half_life) for project, one in standings.items()}
        now = at
        while ends and ends[0][0] <= now:
            _, job_id, name, slots = heappop(ends)
            del held[name][job_id]
            state[name] = replace(
                state[name], free=tuple(sorted((*state[name].free, *slots))), held=tuple(held[name].values())
            )
            project = of[job_id].job.project
            standings[project] = standings[project].holding(-len(slots))
        while coming and coming[-1].job.queued_at <= now:
            job = coming.pop().job
            waiting[job.job_id] = job
        for job, name, slots in policy(list(waiting.values()), list(state.values()), standings, now):
            del waiting[job.job_id]
            ended = now + of[job.job_id].lasts
            # A run tells for how long it will go on, nearly as it is, and is not stopped before its limit.
            held[name][job.job_id] = Held(len(slots), ended)
            left = tuple(index for index in state[name].free if index not in slots)
            state[name] = replace(state[name], free=left, held=tuple(held[name].values()))
            standings[job.project] = standings.get(job.project, Standing()).holding(len(slots))
            ran[job.job_id] = Ran(of[job.job_id], now, ended)
            heappush(ends, (ended, job.job_id, name, slots))
    return ran


# Telling


def told(ran: Mapping[str, Ran], *, gpus: int) -> dict[str, object]:
    """What is worth knowing of it. Utilisation is that until the last job came; waits are in hours."""
    runs = list(ran.values())
    last = max(run.asked.job.queued_at for run in runs)
    busy = sum(run.asked.job.needs * max(0.0, min(run.ended, last) - min(run.started, last)) for run in runs)
    waits: dict[int, list[float]] = {}
    projects: dict[str, list[float]] = {}
    for run in runs:
        waits.setdefault(run.asked.job.needs, []).append(run.wait / HOUR)
        projects.setdefault(run.asked.job.project, []).append(run.wait / HOUR)
    worst = {project: max(found) for project, found in projects.items()}
    return {
        "utilisation": round(busy / (gpus * last), 3),
        "makespan_days": round(max(run.ended for run in runs) / DAY, 1),
        "mean_wait": round(mean(run.wait for run in runs) / HOUR, 2),
        "worst_wait_by_size": {size: round(max(found), 1) for size, found in sorted(waits.items())},
        "mean_wait_by_size": {size: round(mean(found), 2) for size, found in sorted(waits.items())},
        "worst_wait_of_a_project": round(max(worst.values()), 1),
        "worst_wait_of_the_luckiest_project": round(min(worst.values()), 1),
        "mean_wait_by_project": {project: round(mean(found), 2) for project, found in sorted(projects.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--gpus", type=int, nargs="+", default=list(LOADS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", type=float)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    options = parser.parse_args()
    for gpus in options.gpus:
        asked = workload(options.jobs, gpus=gpus, seed=options.seed, load=options.load or LOADS.get(gpus, 0.9))
        for name in options.policies:
            began = time.process_time()
            found = told(replay(asked, cluster(gpus), POLICIES[name]), gpus=gpus)
            spent = round(time.process_time() - began, 1)
            print(json.dumps({"gpus": gpus, "policy": name, **found, "cpu_seconds": spent}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
