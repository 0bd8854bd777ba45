"""Who makes way for a job of higher priority that can't start: a pure decision, by what each project allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from core.forecast import Running
from core.placing import Host, Waiting, suits

Preemption = Literal["never", "own", "any"]
"""Whose jobs of higher priority may stop a project's: nobody's, the project's own, or anybody's."""
MAKES_WAY = "makes way for a job of higher priority"
IS_MADE_WAY = "; runs of lower priority save their state and make way for it"


def making_way(job: Waiting, hosts: Sequence[Host], running: Iterable[Running]) -> tuple[Running, ...] | None:
    """The runs to stop so that the job can start; none more where enough are being stopped; None where none would do.

    On the host where it costs least: lowest priorities, then fewest slots, then runs that began last.
    """
    on: dict[str, list[Running]] = {}
    for run in running:
        on.setdefault(run.node, []).append(run)
    able = [host for host in hosts if suits(host, job.device) and host.num_slots >= job.needs]
    missing = {
        host.name: job.needs - len(host.free) - sum(len(run.slots) for run in on.get(host.name, ()) if run.is_stopping)
        for host in able
    }
    if any(missing[host.name] <= 0 < job.needs - len(host.free) for host in able):
        return ()
    chosen = [runs for host in able if (runs := _fewest(job, on.get(host.name, ()), missing[host.name]))]
    return min(chosen, key=_cost, default=None)


def _fewest(job: Waiting, running: Iterable[Running], missing: int) -> tuple[Running, ...]:
    """Enough of one host's runs; empty where there are not."""
    may = sorted((run for run in running if _may_stop(job, run)), key=lambda run: (run.priority, -run.started_at))
    taken: list[Running] = []
    for run in may:
        if sum(len(one.slots) for one in taken) >= missing:
            break
        taken.append(run)
    # A later one may be large enough to let earlier ones go on.
    for run in tuple(taken):
        if sum(len(one.slots) for one in taken if one is not run) >= missing:
            taken.remove(run)
    return tuple(taken) if sum(len(run.slots) for run in taken) >= missing else ()


def _may_stop(job: Waiting, run: Running) -> bool:
    allowed = run.preemption == "any" or (run.preemption == "own" and run.project == job.project)
    return allowed and run.priority < job.priority and not run.is_stopping


def _cost(runs: tuple[Running, ...]) -> tuple[int, int, float, str]:
    return (
        max(run.priority for run in runs),
        sum(len(run.slots) for run in runs),
        -min(run.started_at for run in runs),
        runs[0].node,
    )
