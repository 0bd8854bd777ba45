"""Curves, thinned to what a screen can show."""

from __future__ import annotations

import math
import random

import pytest
from sqlalchemy.orm import Session

from core import metrics
from core.models import Metric
from tests import make


@pytest.mark.parametrize("max_points", [4, 5, 50, 499, 500])
def test_first_last_and_extremes_survive(max_points: int) -> None:
    noise = random.Random(0)
    points = [(step, noise.gauss(0, 1)) for step in range(1, 10_001)]
    points[6543] = (6544, 99.0)
    points[1234] = (1235, -99.0)
    thinned = metrics.thin(points, max_points)
    assert len(thinned) <= max_points
    assert {points[0], points[-1], points[6543], points[1234]} <= set(thinned)
    assert thinned == sorted(thinned)


@pytest.mark.parametrize(
    ("count", "max_points", "expected"),
    [(3, 3, 3), (3, 500, 3), (0, 10, 0), (10, 2, 2), (10, 3, 2), (10, 1, 1)],
)
def test_few_points_stay_and_few_places_are_enough(count: int, max_points: int, expected: int) -> None:
    points = [(step, float(step)) for step in range(count)]
    thinned = metrics.thin(points, max_points)
    assert len(thinned) == expected
    assert set(thinned) <= set(points)


def test_a_flat_curve_needs_one_point_a_stretch() -> None:
    points = [(step, 1.0) for step in range(1000)]
    assert len(metrics.thin(points, 100)) == 2 + 49


def test_a_value_that_is_no_number_hides_no_extreme() -> None:
    points = [(step, math.nan if step % 2 else float(step)) for step in range(100)]
    assert (98, 98.0) in metrics.thin(points, 6)


def test_a_series_is_read_by_name_and_between_steps(session: Session) -> None:
    job = make.job(session)
    session.add_all(
        Metric(job_id=job.id, name=name, step=step, value=float(step))
        for name in ("loss", "lr")
        for step in range(1, 11)
    )
    session.flush()
    assert metrics.series(session, job.id, names=["loss"], from_step=3, to_step=4) == {"loss": [(3, 3.0), (4, 4.0)]}
    assert set(metrics.series(session, job.id)) == {"loss", "lr"}
    assert metrics.series(session, job.id, names=["none"]) == {"none": []}
    assert [len(points) for points in metrics.series(session, job.id, max_points=5).values()] == [4, 4]
