"""The benchmark of memory: growth is told by hand, and the recorder's points are a job's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.api_memory import STEPS, Growth, record
from core import metrics
from core.history import STEP_METRICS
from tests.stack import Stack


def test_growth_is_told_of_the_last_half_alone() -> None:
    growth = Growth("server", after=[0, 500, 1000, 1500, 2000], mib=[50.0, 90.0, 100.0, 101.0, 102.0])
    assert growth.last_half() == pytest.approx(2.0)
    assert growth.row() == "| server | 2,000 | 50 | 90 | 100 | 101 | 102 | +2.0 |"
    assert Growth("server", after=[0, 100], mib=[50.0, 53.0]).last_half() == pytest.approx(3.0)


def test_what_is_recorded_are_points_of_the_next_job_in_line(tmp_path: Path) -> None:
    with Stack(tmp_path, parts=()) as stack:
        job_id = stack.submit(steps=STEPS + 1, checkpoint_every=1)
        told = list(record(stack.settings, (STEPS + 1) * len(STEP_METRICS)))
        assert told == [(job_id, 0), (job_id, STEPS * len(STEP_METRICS)), (job_id, (STEPS + 1) * len(STEP_METRICS))]
        with stack.services.db.reading() as session:
            assert metrics.names(session, job_id) == sorted(STEP_METRICS)
        assert stack.steps(job_id) == list(range(1, STEPS + 2))
