"""Whether what a service uses grows: samples of its processes and tables, and what is made of them."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

MIB = 1024**2
ROLES = {
    "api.server": "api", "workers.upkeep": "upkeep", "workers.node": "node", "workers.sampler": "sampler",
    "celery": "celery", "valkey": "broker", "api.cli": "serve",
}  # fmt: skip
"""What stands in a command, and what the process is called here; others are jobs' own, which come and go."""
OF_JOBS = dict.fromkeys(("job_events", "files", "audit_logs"), "a job")
OF_RUNS = dict.fromkeys(("metrics", "metric_chunks", "checkpoints", "artifacts", "models", "holdings"), "a run")
"""Tables that keep what jobs were: they grow with these, and by no more for each than for the one before. For what
training leaves only those count that began to train: on a busy host these are fewer of all."""
MARGINS = {
    "MiB": (0.05, 8.0), "fds": (0.05, 8.0), "threads": (0.0, 4.0), "rows": (0.0, 20.0), "rows a job": (0.1, 1.0),
    "rows a run": (0.1, 1.0),
}  # fmt: skip
"""By how much the end may lie above the beginning: a share of it, and a number besides, for what comes and goes."""

Sample = dict[str, float]
"""What was seen at one moment, by name such as `api MiB`."""


def processes(root: int) -> Sample:
    """Memory, descriptors and threads of the service's own processes."""
    found: Sample = defaultdict(float)
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(root)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                command = " ".join(process.cmdline())
                role = next((role for word, role in ROLES.items() if word in command), None)
                if role is not None:
                    found[f"{role} MiB"] += process.memory_info().rss / MIB
                    found[f"{role} fds"] += process.num_fds()
                    found[f"{role} threads"] += process.num_threads()
    return dict(found)


def tables(database: Path) -> Sample:
    """Rows of each table."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        counts = {name: connection.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in names}
        begun = connection.execute("SELECT count(*) FROM jobs WHERE attempt > 0").fetchone()[0]
    of = {"a job": max(1, counts["jobs"]), "a run": max(1, begun)}
    kept = OF_JOBS | OF_RUNS
    return {
        f"{name} rows {kept[name]}" if name in kept else f"{name} rows": count / of.get(kept.get(name, ""), 1)
        for name, count in counts.items()
        if name not in {"jobs", "alembic_version"}
    }


@dataclass(frozen=True)
class Growth:
    """What became of one number."""

    name: str
    beginning: float
    end: float
    """Medians of the second and of the last quarter: the first is for warming up."""
    is_flat: bool


def judged(samples: Sequence[Mapping[str, float]]) -> list[Growth]:
    """Each number that was there in both quarters."""
    quarter = len(samples) // 4
    if not quarter:
        return []
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    names = {name for sample in early for name in sample} & {name for sample in late for name in sample}
    return [judge(name, of(early, name), of(late, name)) for name in sorted(names)]


def of(samples: Iterable[Mapping[str, float]], name: str) -> float:
    return median(sample[name] for sample in samples if name in sample)


def judge(name: str, beginning: float, end: float) -> Growth:
    share, number = next(margin for unit, margin in reversed(MARGINS.items()) if name.endswith(f" {unit}"))
    return Growth(name, beginning, end, end <= beginning * (1 + share) + number)


def table(growths: Iterable[Growth]) -> str:
    """In Markdown."""
    lines = ["| what | at first | at last | |", "|---|---|---|---|"]
    lines += [f"| {each.name} | {each.beginning:.1f} | {each.end:.1f} | {'flat' if each.is_flat else '**grows**'} |"
              for each in growths]  # fmt: skip
    return "\n".join(lines)
