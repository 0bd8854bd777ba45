"""What the benchmark of load counts as lost, and as flat; and that a small one loses nothing."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import growth, load
from benchmarks.load import Found, Plan


@pytest.mark.parametrize(
    ("name", "beginning", "end", "is_flat"),
    [
        ("api MiB", 200.0, 217.0, True),
        ("api MiB", 200.0, 219.0, False),
        ("api fds", 100.0, 113.0, True),
        ("api fds", 100.0, 114.0, False),
        ("api threads", 40.0, 44.0, True),
        ("api threads", 40.0, 45.0, False),
        ("uploads rows", 0.0, 20.0, True),
        ("uploads rows", 0.0, 21.0, False),
        ("job_events rows a job", 10.0, 12.0, True),
        ("job_events rows a job", 10.0, 12.1, False),
        ("api MiB", 300.0, 100.0, True),
    ],
)
def test_a_number_is_flat_that_ends_little_above_where_it_was(
    name: str, beginning: float, end: float, is_flat: bool
) -> None:
    assert growth.judge(name, beginning, end).is_flat is is_flat


def test_the_first_quarter_is_for_warming_up() -> None:
    samples = [{"api MiB": size} for size in (10.0, 900.0, 100.0, 102.0, 101.0, 103.0, 104.0, 102.0)]
    (judged,) = growth.judged(samples)
    assert (judged.beginning, judged.end, judged.is_flat) == (101.0, 103.0, True)
    assert growth.judged(samples[:3]) == []


@pytest.mark.parametrize(
    "found",
    [
        Found(lost_jobs=1), Found(lost_leases=1), Found(lost_events=1), Found(unfinished=1),
        Found(answers=Counter({"201": 9, "503": 1})),
    ],
)  # fmt: skip
def test_whatever_is_lost_or_refused_is_told(found: Found) -> None:
    assert not found.is_whole
    assert "something was lost" in load.report(Plan(), found)


@pytest.mark.timeout(900)
def test_runs_start_one_after_another_where_a_host_starts_one_at_once_and_a_small_load_loses_nothing() -> None:
    plan = Plan(submits=5, seconds=2, readers=4, jobs=2, starts_at_once=1)
    found = load.load(plan)
    assert found.is_whole, load.report(plan, found)
    assert len(found.accepted) == 10
    assert found.heard > 0
    assert found.delays
    assert found.most_starting == 1


@pytest.mark.slow
@pytest.mark.parametrize("gently", [False, True])
def test_a_small_load_loses_nothing(gently: bool) -> None:
    found = load.load(Plan(submits=5, seconds=10, readers=20, jobs=2, gently=gently))
    assert found.is_whole, load.report(Plan(), found)
    assert len(found.accepted) >= 50
    assert found.heard > 0
    assert found.samples[-1]["api MiB"] > 10


def test_rows_are_told_by_job_and_what_training_leaves_by_run(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "there.db")) as database:
        database.executescript(
            "CREATE TABLE jobs (attempt INTEGER); INSERT INTO jobs VALUES (0), (0), (1), (2);"
            "CREATE TABLE metrics (step INTEGER); INSERT INTO metrics VALUES (1), (2), (3);"
            "CREATE TABLE audit_logs (id INTEGER); INSERT INTO audit_logs VALUES (1), (2);"
            "CREATE TABLE nodes (id INTEGER); INSERT INTO nodes VALUES (1);"
        )
    assert growth.tables(tmp_path / "there.db") == {
        "metrics rows a run": 1.5, "audit_logs rows a job": 0.5, "nodes rows": 1
    }  # fmt: skip
