"""Curves of a job's numbers, thinned to what a screen can show. What is written is decided in `history`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import isnan

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.models import Metric

Point = tuple[int, float]
"""Step and value."""


def names(session: Session, job_id: str) -> Sequence[str]:
    """Every metric that the job has, by name."""
    return session.scalars(select(Metric.name).where(Metric.job_id == job_id).distinct().order_by(Metric.name)).all()


def series(
    session: Session,
    job_id: str,
    *,
    names: Collection[str] = (),
    from_step: int | None = None,
    to_step: int | None = None,
    max_points: int = 500,
) -> dict[str, list[Point]]:
    """Each metric by step, both ends included, thinned to `max_points`. No names: all; unknown ones have no points."""
    query = select(Metric.name, Metric.step, Metric.value).where(Metric.job_id == job_id)
    if names:
        query = query.where(Metric.name.in_(names))
    if from_step is not None:
        query = query.where(Metric.step >= from_step)
    if to_step is not None:
        query = query.where(Metric.step <= to_step)
    found: dict[str, list[Point]] = {name: [] for name in names}
    for name, step, value in session.execute(query.order_by(Metric.name, Metric.step)):
        found.setdefault(name, []).append((step, value))
    return {name: thin(points, max_points) for name, points in found.items()}


def thin(points: Sequence[Point], max_points: int) -> list[Point]:
    """At most `max_points` of them, in order: the first, the last, and the lowest and highest of each stretch between.

    So no spike is lost, however far one zooms out.
    """
    if len(points) <= max_points:
        return list(points)
    if max_points < 4:
        return [points[0], points[-1]][:max_points]
    inner = points[1:-1]
    stretches = (max_points - 2) // 2
    kept = [points[0]]
    for number in range(stretches):
        stretch = inner[number * len(inner) // stretches : (number + 1) * len(inner) // stretches]
        known = [point for point in stretch if not isnan(point[1])] or stretch
        kept += sorted({min(known, key=_value), max(known, key=_value)})
    return [*kept, points[-1]]


def _value(point: Point) -> float:
    return point[1]
