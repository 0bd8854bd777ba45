"""The order in which jobs wait: higher priority first, then what their project had of the slots, against their age.

Projects take turns within a priority: each job counts for its project as if it ran already when the next is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from core.placing import Waiting
from core.shares import CHARGE_SECONDS, DAY, Standing

CREDIT = 0.5
"""Of each second waited. At 1, who asked for all of the cluster a day ago kept a new project waiting for hours."""


def ordered(
    waiting: Iterable[Waiting],
    standings: Mapping[str, Standing],
    *,
    now: float = 0.0,
    slots: int = 1,
    patience: float = DAY,
) -> list[Waiting]:
    """Who is looked at first comes first.

    What a project had is reckoned in seconds of the whole cluster, of so many `slots`; two that a job has waited make
    up for one, and no more than for `patience`: else who asks for very much at once would after a while come before
    everybody who asks for little.
    """
    capacity = max(1, slots)
    had = {project: standing.weight / capacity for project, standing in standings.items()}
    line = []
    for job in sorted(waiting, key=lambda job: (-job.priority, job.queued_at, job.job_id)):
        weight = had.get(job.project, 0.0)
        had[job.project] = weight + job.needs * CHARGE_SECONDS / capacity
        credit = min((now - job.queued_at) * CREDIT, patience)
        line.append((-job.priority, weight - credit, job.queued_at, job.job_id, job))
    line.sort()
    return [job for *_, job in line]
