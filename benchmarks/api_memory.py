"""Memory of processes while jobs and metric points come in: `python -m benchmarks.api_memory`.

Jobs are submitted to a server of its own, as it is served. Points are recorded as a supervisor does, events of steps in
batches under a claim, in a process of its own too; and the server is asked for the curves meanwhile. It ends with 1
where memory is not flat: where it grew by more than `MOST_MIB` in the last half.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import linear_regression
from tempfile import TemporaryDirectory

import psutil

from benchmarks.api_speed import Side, ours, settings_of
from benchmarks.train_speed import RESULTS, ROOT, machine
from core import jobs, nodes, scheduler
from core.history import STEP_METRICS
from core.services import Services
from core.settings import Settings
from engine.events import Started, Step

JOBS = 10_000
POINTS = 10_000_000
LOOKS = 20
"""How often memory is looked at."""
REQUESTS = 100
"""Creates that are sent together; a job is read for each, and a page for all."""
STEPS = 256
"""In a batch of events."""
LEASE = timedelta(days=1)
MOST_MIB = 4.0
"""What a process may grow by in the last half, by a line through what was seen there, and count as flat."""


@dataclass
class Growth:
    """How large a process was after how many things."""

    what: str
    after: list[int] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)

    def look(self, count: int, process: psutil.Process) -> None:
        memory = process.memory_info()
        self.after.append(count)
        # Without pages of files, which the kernel takes and gives back as others on the machine need memory.
        self.mib.append((memory.rss - memory.shared) / 2**20)

    def last_half(self) -> float:
        """MiB that it grew by, by a line through what was seen there."""
        half = min(len(self.after) // 2, len(self.after) - 2)
        after = self.after[half:]
        return linear_regression(after, self.mib[half:]).slope * (after[-1] - after[0])

    def row(self) -> str:
        steps = len(self.mib) - 1
        seen = " | ".join(f"{self.mib[steps * quarter // 4]:.0f}" for quarter in range(5))
        return f"| {self.what} | {self.after[-1]:,} | {seen} | {self.last_half():+.1f} |"


HEAD = (
    "| what | how many | MiB at first | at a quarter | half way | three quarters | at the end | last half, a line |\n"
    "|---|---|---|---|---|---|---|---|"
)


def submitted(us: Side, count: int) -> Growth:
    """The server, while so many jobs are made, and read, one by one and as a page."""
    assert us.process is not None
    growth = Growth("server, by jobs")
    growth.look(0, us.process)
    for done in range(0, count, REQUESTS):
        us.turn("create", min(REQUESTS, count - done))
        us.turn("read", REQUESTS)
        us.get("/v1/jobs?limit=100")
        if (done // REQUESTS + 1) % max(1, count // REQUESTS // LOOKS) == 0 or done + REQUESTS >= count:
            growth.look(min(count, done + REQUESTS), us.process)
    return growth


def recorded(us: Side, settings: Settings, count: int) -> tuple[Growth, Growth]:
    """The recorder and the server, while so many points are recorded, and curves of them asked for."""
    assert us.process is not None
    recorder, server = Growth("recorder, by points"), Growth("server, by points")
    command = (sys.executable, "-m", "benchmarks.api_memory", "--record", str(count))
    environment = os.environ | settings.environment()
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        process = psutil.Process(running.pid)
        for line in running.stdout:
            told = json.loads(line)
            us.get(f"/v1/jobs/{told['job']}/metrics?max_points=500")
            recorder.look(told["points"], process)
            server.look(told["points"], us.process)
    if running.returncode:
        raise RuntimeError(f"recording ended with {running.returncode}")
    return recorder, server


def record(settings: Settings, count: int) -> Iterator[tuple[str, int]]:
    """Record so many points of one job; after each part the job's id, and how many there are."""
    with Services(settings) as services:
        with services.db.session() as session:
            nodes.register(session, "bench", device="cpu", num_slots=1)
        with services.db.session() as session:
            (placed, *_) = scheduler.tick(session)
        with services.db.session() as session:
            job = jobs.claim(session, placed.job_id, "recorder", LEASE, node="bench")
        assert job is not None, "nobody else takes jobs here"
        steps = -(-count // len(STEP_METRICS))
        with services.db.session() as session:
            jobs.record(session, job.id, fence=job.attempt, events=[started(steps)])
        yield job.id, 0
        part = max(1, steps // STEPS // LOOKS)
        for number, first in enumerate(range(1, steps + 1, STEPS), start=1):
            batch = [step(each) for each in range(first, min(first + STEPS, steps + 1))]
            with services.db.session() as session:
                jobs.record(session, job.id, fence=job.attempt, events=batch)
            if number % part == 0 or batch[-1].step == steps:
                yield job.id, batch[-1].step * len(STEP_METRICS)


def started(steps: int) -> Started:
    return Started(
        seq=1, time=0.0, total_steps=steps, start_step=0, ranks=1, parameters=1, trainable_parameters=1, train_rows=1,
        train_tokens=1, vocab_size=1, device="cpu",
    )  # fmt: skip


def step(number: int) -> Step:
    """One that tells every number that becomes a metric."""
    numbers = {name: number if name in {"tokens", "memory_bytes"} else 1 / number for name in STEP_METRICS}
    return Step.model_validate({"seq": number + 1, "time": float(number), "step": number} | numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--points", type=int, default=POINTS)
    parser.add_argument("--out", type=Path, default=RESULTS / "api_memory.json", help="file to write")
    parser.add_argument("--record", type=int, help="be the recorder of so many points, by the environment's settings")
    asked = parser.parse_args()
    if asked.record:
        for job_id, points in record(Settings(), asked.record):
            print(json.dumps({"job": job_id, "points": points}), flush=True)  # noqa: T201
        return
    with TemporaryDirectory(prefix="api-memory-") as name:
        settings = settings_of(Path(name) / "shed")
        with ours(settings) as us:
            seen = [submitted(us, asked.jobs), *recorded(us, settings, asked.points)]
    measured = {growth.what: {"after": growth.after, "mib": growth.mib} for growth in seen}
    asked.out.write_text(json.dumps({"machine": machine()} | measured, indent=1) + "\n")
    print(HEAD, *(growth.row() for growth in seen), sep="\n")  # noqa: T201
    if any(growth.last_half() > MOST_MIB for growth in seen):
        sys.exit(1)


if __name__ == "__main__":
    main()
