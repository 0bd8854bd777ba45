"""How long a curve of many points takes: packed, beside all its points as rows, in the same database and in turns."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

from fastapi.testclient import TestClient
from sqlalchemy import func, insert, select, text
from sqlalchemy.orm import Session

from api.app import create_app
from core import keys, metrics, schema
from core.keys import DEFAULT_PROJECT
from core.metrics import Point
from core.models import Job, Metric, MetricChunk, new_id
from core.services import Services
from core.settings import Settings
from core.states import JobState

POINTS = 1_000_000
MAX_POINTS = 500
AT_ONCE = 50_000
COLUMNS = (
    "metrics", "points each", "all rows, ms (CPU)", "packed, ms (CPU)", "whole answer, ms (CPU)", "ratio (CPU)",
    "MiB as rows", "MiB packed",
)  # fmt: skip
KEY = "ts_of_a_benchmark_and_nothing_else"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--database-url", help="an empty database; default: SQLite in a temporary folder")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        settings = Settings(data_dir=Path(folder), database_url=options.database_url, admin_key=KEY)
        schema.upgrade(settings.database)
        with Services(settings) as services, TestClient(create_app(services)) as http:
            with services.db.session() as session:
                keys.ensure_admin(session, KEY)
            print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)  # noqa: T201
            for count in (1, 15):
                measure(services, http, metrics_=count, rounds=options.rounds)


def measure(services: Services, http: TestClient, *, metrics_: int, rounds: int) -> None:
    each = POINTS // metrics_
    with services.db.session() as session:
        rows, packed = (fill(session, metrics_, each) for _ in range(2))
        metrics.pack(session, packed)
    url = f"/v1/jobs/{packed}/metrics?max_points={MAX_POINTS}"
    ways: dict[str, Callable[[], object]] = {
        "rows": lambda: all_rows(services, rows),
        "packed": lambda: curves(services, packed),
        "answer": lambda: json.loads(http.get(url, headers={"authorization": f"Bearer {KEY}"}).raise_for_status().text),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            started = perf_counter(), process_time()
            way()
            times[name].append((perf_counter() - started[0], process_time() - started[1]))
    clock, cpu = ({name: 1000 * median(each[which] for each in times[name]) for name in ways} for which in (0, 1))
    sizes = bytes_of(services, rows, packed)
    cells = [
        f"{metrics_}", f"{each:,}", *(f"{clock[name]:,.0f} ({cpu[name]:,.0f})" for name in ways),
        f"{clock['rows'] / clock['packed']:.0f} ({cpu['rows'] / cpu['packed']:.0f})",
        *(f"{size / 2**20:.0f}" for size in sizes),
    ]  # fmt: skip
    print(f"| {' | '.join(cells)} |", flush=True)  # noqa: T201


def fill(session: Session, count: int, each: int) -> str:
    """A job with this many metrics, whose points are rows; its id."""
    job = Job(
        id=new_id("job"), project_id=DEFAULT_PROJECT, kind="pretrain", labels={}, spec={}, run_config={}, plan={},
        slots=1, state=JobState.SUCCEEDED,
    )  # fmt: skip
    session.add(job)
    session.flush()
    for number in range(count):
        for rows in batches(job.id, f"metric_{number}", each):
            session.execute(insert(Metric), rows)
    return job.id


def batches(job_id: str, name: str, count: int) -> Iterator[list[dict[str, object]]]:
    noise = random.Random(name)
    for first in range(1, count + 1, AT_ONCE):
        steps = range(first, min(first + AT_ONCE, count + 1))
        yield [{"job_id": job_id, "name": name, "step": step, "value": noise.gauss(0, 1)} for step in steps]


def all_rows(services: Services, job_id: str) -> dict[str, list[Point]]:
    """Every point as a row, thinned here: what was done before points were packed."""
    found: dict[str, list[Point]] = {}
    query = select(Metric.name, Metric.step, Metric.value).where(Metric.job_id == job_id)
    with services.db.reading() as session:
        for name, step, value in session.execute(query.order_by(Metric.name, Metric.step)):
            found.setdefault(name, []).append((step, value))
    return {name: metrics.thin(points, MAX_POINTS) for name, points in found.items()}


def curves(services: Services, job_id: str) -> dict[str, list[Point]]:
    with services.db.reading() as session:
        return metrics.series(session, job_id, max_points=MAX_POINTS)


def bytes_of(services: Services, rows: str, packed: str) -> tuple[int, int]:
    """What the points of each job take: their shares of the two tables, indices included."""
    with services.db.reading() as session:
        if services.db.engine.dialect.name == "sqlite":
            table = text("SELECT sum(pgsize) FROM dbstat WHERE name LIKE :name")
            sizes = {kind: session.scalar(table, {"name": f"%{kind}%"}) or 0 for kind in ("metrics", "metric_chunks")}
        else:
            table = text("SELECT pg_total_relation_size(:name)")
            sizes = {kind: session.scalar(table, {"name": kind}) or 0 for kind in ("metrics", "metric_chunks")}
        shares = [
            (session.scalar(select(func.count()).where(kind.job_id == job)) or 0)
            / max(1, session.scalar(select(func.count()).select_from(kind)) or 0)
            for kind, job in ((Metric, rows), (MetricChunk, packed))
        ]
    return int(sizes["metrics"] * shares[0]), int(sizes["metric_chunks"] * shares[1])


if __name__ == "__main__":
    main()
