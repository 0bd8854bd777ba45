"""The drills, as data: what is done, what it may cost, on which kinds of service, and which belong together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from random import Random
from typing import Literal

from tests.faults import harm
from tests.faults.harm import Harm, killed, terminated_twice
from tests.faults.watched import Watched

NONE, ONE = (0, 0), (1, 1)
PERHAPS = (0, 1)
"""On a crowded host it takes longer than a lease."""
SOME = (1, 3)
"""Each attempt that begins before there is room again."""

Database = Literal["sqlite", "postgresql"]
DATABASES: tuple[Database, ...] = ("sqlite", "postgresql")
NO_SERVER: Mapping[Database, str] = {"sqlite": "it is a file, and there is no server of it to be harmed"}
NOT_OURS: Mapping[Database, str] = {
    "postgresql": "its disk is its server's, which has no room for all tests at once then; who writes is refused, as in"
    " read-only-database"
}


@dataclass(frozen=True)
class Drill:
    """One thing that is done to a job that runs, right after a checkpoint of it was published."""

    name: str
    do: Harm
    attempts: tuple[int, int] = NONE
    """How often, at least and at most, the job begins again from a checkpoint for it."""
    needs: Literal["plain", "disks", "clock", "s3"] = "plain"
    """What is beneath the service that it is done to."""
    not_on: Mapping[Database, str] = field(default_factory=dict)
    """On which database it is not done, and why not: on all others it is."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the services that it is done to."""
        return tuple(f"{self.needs}-{database}" for database in DATABASES if database not in self.not_on)


def is_lost(job: Watched) -> bool:
    return job.stack.job(job.id).losses > 0


def has_no_ranks(job: Watched) -> bool:
    return not job.stack.processes(job.id)


def is_not_published(job: Watched) -> bool:
    return job.says("was not published: no space left")


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
        Drill("second-node", harm.second_node),
        Drill("freeze-supervisor", harm.frozen_supervisor, ONE),
        Drill("freeze-launcher", harm.frozen_launcher, ONE),
        Drill("freeze-launcher-and-kill-supervisor", harm.killed_beside_a_frozen_launcher, ONE),
        Drill("thaw-rank", harm.thawed_rank),
        Drill("hang-rank", harm.hanging_rank, ONE),
        Drill("pause", harm.paused, ONE),
        Drill("drain-node", harm.drained_node, ONE),
        Drill("preempt", harm.preempted, ONE),
        Drill("kill-preempted-supervisor", harm.killed_while_making_way, ONE),
        Drill("cancel-deaf-rank", harm.cancelled_while_deaf, ONE),
        Drill("pause-deaf-rank", harm.paused_while_deaf, ONE),
        Drill("starve-rank", harm.starved_rank, ONE),
        Drill("terminate-rank-twice", terminated_twice("rank"), ONE),
        Drill("terminate-launcher-twice", terminated_twice("launcher"), ONE),
        Drill("terminate-supervisor-twice", terminated_twice("supervisor"), ONE),
        Drill("terminate-node-twice", terminated_twice("node"), ONE),
        Drill("cut-power", harm.power_cut, ONE),
        Drill("kill-postgresql", killed("postgresql"), PERHAPS, not_on=NO_SERVER),
        Drill("restart-postgresql", harm.restarted_database, PERHAPS, not_on=NO_SERVER),
        Drill("read-only-database", harm.read_only_database, ONE),
        Drill("fill-runs", harm.filled("runs", is_lost), SOME, needs="disks"),
        Drill("fill-storage", harm.filled("storage", is_not_published), needs="disks"),
        Drill("fill-database", harm.filled("", has_no_ranks, slowly=True), SOME, needs="disks", not_on=NOT_OURS),
        Drill("clock-forward", harm.set_clock(3600), needs="clock"),
        Drill("clock-back", harm.set_clock(-3600), needs="clock"),
        Drill("storage-refuses", harm.storage_is("refuse", 5), needs="s3"),
        Drill("storage-hangs", harm.storage_is("hang", 1), needs="s3"),
        Drill("storage-hangs-and-kill-supervisor", harm.killed_while_storing, ONE, needs="s3"),
    )
}

SHORT = {
    "plain-sqlite": (
        "kill-worker", "kill-api", "kill-valkey", "flush-valkey", "repeat-messages", "kill-upkeep",
        "freeze-supervisor", "kill-rank",
    ),
    "plain-postgresql": ("kill-postgresql", "restart-postgresql", "kill-node", "kill-supervisor"),
}  # fmt: skip
"""What the job of each default run is put through, one after another: one job for each kind of database.

An attempt more takes seconds of all cores, so what other default tests see done to real runs is left to them: a pause
to `workers/test_layouts.py`, the orderly end of a host to `api/test_serve.py`.
"""

KILLS = tuple(name for name in DRILLS if name.startswith("kill-") and name != "kill-preempted-supervisor")
PAIRS_OF_A_DATABASE = 3


def pairs(database: Database) -> list[tuple[str, str]]:
    """Kills that fall together on this database, as chance has it; no two pairs are the same."""
    kills = [name for name in KILLS if database not in DRILLS[name].not_on]
    return Random(database).sample(list(combinations(kills, 2)), PAIRS_OF_A_DATABASE)


FALLING = [(f"plain-{database}", *pair) for database in DATABASES for pair in pairs(database)]
"""On which kind of service, and which two."""
