"""The drills, as data: what is done, what it costs, and which belong together."""

from __future__ import annotations

from dataclasses import dataclass

from tests.faults import harm
from tests.faults.harm import Harm, killed

NONE, ONE = (0, 0), (1, 1)
PERHAPS = (0, 1)
"""On a crowded host it takes longer than a lease."""


@dataclass(frozen=True)
class Drill:
    """One thing that is done to a job that runs, right after a checkpoint of it was published."""

    name: str
    do: Harm
    attempts: tuple[int, int] = NONE
    """How often, at least and at most, the job begins again from a checkpoint for it."""
    only: str | None = None
    """The kind of database that it needs."""


DRILLS = {
    drill.name: drill
    for drill in (
        Drill("kill-rank", killed("rank"), ONE),
        Drill("kill-launcher", killed("launcher"), ONE),
        Drill("kill-supervisor", killed("supervisor"), ONE),
        Drill("kill-worker", killed("worker")),
        Drill("kill-node", killed("node")),
        Drill("kill-upkeep", killed("upkeep")),
        Drill("kill-api", killed("api")),
        Drill("kill-valkey", killed("valkey")),
        Drill("flush-valkey", harm.forgetful_broker),
        Drill("repeat-messages", harm.repeated_messages),
        Drill("freeze-supervisor", harm.frozen_supervisor, ONE),
        Drill("thaw-rank", harm.thawed_rank),
        Drill("hang-rank", harm.hanging_rank, ONE),
        Drill("kill-postgresql", killed("postgresql"), PERHAPS, only="postgresql"),
        Drill("restart-postgresql", harm.restarted_database, PERHAPS, only="postgresql"),
        Drill("read-only-postgresql", harm.read_only_database, ONE, only="postgresql"),
    )
}

SHORT = {
    "sqlite": (
        "kill-worker", "kill-api", "kill-valkey", "flush-valkey", "repeat-messages", "kill-upkeep", "kill-supervisor",
        "kill-rank",
    ),
    "postgresql": ("kill-postgresql", "restart-postgresql", "kill-node", "kill-launcher"),
}  # fmt: skip
"""What one job after another in each default run is put through: one job for each kind of database, in this order."""
