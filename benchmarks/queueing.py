"""CPU time of the scheduler's look at a long line, in a real database. `python -m benchmarks.queueing`.

All slots are held, so that nothing starts; then one run ends before each look. On PostgreSQL it is the client's time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from sqlalchemy import insert, select, update

from core import jobs, keys, nodes, scheduler, schema
from core.db import Database
from core.models import Holding, Job, Node, Project, Slot, database_now
from core.states import JobState

HOSTS, SLOTS, PROJECTS = 16, 8, 20
LOOKS = 15
# What rows of real jobs weigh.
PADDING = {"padding": "x" * 1500}
RUN = {"device": "cpu", **PADDING}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--database", help="URL of an empty database; SQLite in a temporary folder without one")
    options = parser.parse_args()
    with filled(options.jobs, options.database) as database:
        first = seconds(database, depth=None)
        everyone = [seconds(database, depth=None) for _ in range(LOOKS)]
        usual = [seconds(database, depth=scheduler.DEPTH) for _ in range(LOOKS)]
        starting = []
        for _ in range(LOOKS):
            end_one(database)
            starting.append(seconds(database, depth=scheduler.DEPTH))
        began = time.process_time()
        with database.reading() as session:
            scheduler.estimate(session)
        estimated = time.process_time() - began
        planned = [foreseen(database) for _ in range(LOOKS)]
        found = {
            "a look, nothing starts": median(usual),
            "a look after a run has ended": median(starting),
            "a look at everyone": median(everyone),
            "the first look at them all": first,
            "an estimate of the first in line": estimated,
            "what a plan says of the line": median(planned),
        }
    for name, spent in found.items():
        print(f"{name:34} {1000 * spent:7.1f} ms")  # noqa: T201


def foreseen(database: Database) -> float:
    """CPU seconds of what a plan asks of the line."""
    began = time.process_time()
    with database.reading() as session:
        scheduler.foresee(session, needs=1, device="cpu", priority=0, project="p0")
    return time.process_time() - began


@contextmanager
def filled(count: int, url: str | None) -> Iterator[Database]:
    """A database with a full cluster and so many jobs in line."""
    with tempfile.TemporaryDirectory() as folder:
        url = url or f"sqlite:///{Path(folder) / 'line.db'}"
        schema.upgrade(url)
        database = Database(url)
        rng = Random(1)
        with database.session() as session:
            keys.ensure_admin(session, "ts_benchmarks_and_nothing_else")
            session.add_all(Project(id=f"p{number}", name="p") for number in range(PROJECTS))
            session.flush()
            for number in range(HOSTS):
                nodes.register(session, f"h{number}", device="cpu", num_slots=SLOTS)
            running = [job(rng, 2, state=JobState.RUNNING, node=f"h{n % HOSTS}", attempt=1, holder="s", last_event=1)
                       for n in range(HOSTS * SLOTS // 2)]  # fmt: skip
            session.execute(insert(Job), running)
            for number, row in enumerate(running):
                index = 2 * (number // HOSTS)
                mine = update(Slot).where(Slot.node == row["node"], Slot.index.in_((index, index + 1)))
                session.execute(mine.values(job_id=row["id"]))
                session.add(Holding(project_id=row["project_id"], job_id=row["id"], slots=2, started_at=time.time()))
            queued = [job(rng, rng.choice((1, 1, 2, 4, 8)), created_at=float(number)) for number in range(count)]
            session.execute(insert(Job), queued)
        yield database
        database.close()


def job(rng: Random, slots: int, **columns: Any) -> dict[str, Any]:
    """A job's row."""
    return {
        "id": f"job-{rng.getrandbits(96):024x}", "project_id": f"p{rng.randrange(PROJECTS)}",
        "kind": "pretrain", "spec": PADDING, "run_config": RUN, "plan": PADDING, "slots": slots,
        "max_runtime": rng.choice((None, 3600.0, 86400.0)), "state": JobState.QUEUED, **columns,
    }  # fmt: skip


def seconds(database: Database, *, depth: int | None) -> float:
    """CPU time of a look."""
    with database.session() as session:
        session.execute(update(Node).values(heartbeat_at=database_now()))
    began = time.process_time()
    with database.session() as session:
        scheduler.tick(session, depth=depth)
    return time.process_time() - began


def end_one(database: Database) -> None:
    with database.session() as session:
        running = select(Job.id).where(Job.state == JobState.RUNNING).order_by(Job.id).limit(1)
        jobs.move(session, session.scalars(running).one(), JobState.SUCCEEDED)


if __name__ == "__main__":
    main()
