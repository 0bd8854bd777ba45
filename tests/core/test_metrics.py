"""Curves, thinned to what a screen can show."""

from __future__ import annotations

import math
import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from threading import Event

import pytest
from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session

from core import jobs, metrics
from core.db import Database
from core.models import Job, Metric, MetricChunk
from core.points import POINTS
from core.states import JobState
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


def told(session: Session, count: int, *, packed: bool = True) -> Job:
    """A job with so many steps, of each of which `rough` is the loss."""
    job = make.job(session, state=JobState.RUNNING)
    session.execute(insert(Metric), [{"job_id": job.id, "name": "loss", "step": step, "value": rough(step)}
                                     for step in range(1, count + 1)])  # fmt: skip
    if packed:
        metrics.pack(session, job.id)
    return job


def rough(step: int) -> float:
    """The same of a step each time, unlike that of its neighbours."""
    return random.Random(step).gauss(0, 1)


RANGES: list[tuple[int | None, int | None]] = [
    (None, None), (1, 5 * POINTS), (100, None), (None, 700), (300, 310), (POINTS, POINTS + 1), (9_000, None),
]  # fmt: skip


@pytest.mark.parametrize("max_points", [2, 3, 4, 7, 12, 100, 10_000])
def test_packed_points_are_found_like_rows(session: Session, max_points: int) -> None:
    count = 5 * POINTS + 100
    job = told(session, count)
    assert session.scalar(select(func.count()).where(Metric.job_id == job.id)) == 100
    for low, high in RANGES:
        every = [(step, rough(step)) for step in range(1, count + 1) if (low or 0) <= step <= (high or count)]
        read = partial(metrics.series, session, job.id, names=["loss"], from_step=low, to_step=high)
        assert read(max_points=None)["loss"] == every
        thinned = read(max_points=max_points)["loss"]
        assert len(thinned) <= max_points
        assert thinned == sorted(thinned)
        assert set(thinned) <= set(every)
        if every:
            assert {every[0], every[-1]} <= set(thinned)
        if every and max_points >= 4:
            # Whatever the stretches: of the whole no extreme is missing.
            assert {min(every, key=itemgetter(1)), max(every, key=itemgetter(1))} <= set(thinned)
        if len(every) <= max_points:
            assert thinned == every


def test_of_each_stretch_that_chunks_make_both_extremes_are_there(session: Session) -> None:
    job = told(session, 12 * POINTS)
    # Five stretches of the two chunks at the ends, point by point, and of the ten between, as they are.
    thinned = metrics.series(session, job.id, max_points=12)["loss"]
    assert len(thinned) <= 12
    cut = 12 * POINTS // 5
    for number in range(5):
        # A chunk belongs where it begins, so up to one chunk more or less.
        sure = {step: rough(step) for step in range(number * cut + POINTS, (number + 1) * cut)}
        kept = [value for step, value in thinned if number * cut < step <= (number + 1) * cut + POINTS]
        assert max(kept) >= max(sure.values())
        assert min(kept) <= min(sure.values())


def test_a_point_that_comes_late_takes_its_place_among_packed_ones(session: Session) -> None:
    job = make.job(session, state=JobState.RUNNING)
    even = range(2, 2 * POINTS + 2, 2)
    for step in even:
        metrics.append(session, job.id, step, {"validation_loss": float(step)})
    metrics.pack(session, job.id)
    for late in (101, 1, 2 * POINTS + 1):
        metrics.insert_between(
            session, job.id, late, {"validation_loss": -float(late), "validation_token_accuracy": 0.5}
        )
    found = metrics.series(session, job.id, max_points=None)
    assert [step for step, _ in found["validation_loss"]] == sorted([*even, 101, 1, 2 * POINTS + 1])
    assert dict(found["validation_loss"])[101] == -101.0
    assert [step for step, _ in found["validation_token_accuracy"]] == [1, 101, 2 * POINTS + 1]
    assert metrics.has(session, job.id, "validation_loss", 101)
    assert not metrics.has(session, job.id, "validation_loss", 103)
    thinned = metrics.series(session, job.id, names=["validation_loss"], max_points=4)["validation_loss"]
    assert (2 * POINTS + 1, -2.0 * POINTS - 1) in thinned


def test_a_run_packs_its_steps_as_it_goes_and_a_resumed_one_repeats_none(session: Session) -> None:
    job = make.job(session, state=JobState.RUNNING)
    jobs.record(session, job.id, fence=1, events=[make.step(n) for n in range(1, 2 * POINTS + 10)])
    # Another attempt would go on from a checkpoint, and tell steps again with numbers of its own.
    again = [make.step(2 * POINTS + n, step=n, loss=9.0) for n in range(POINTS - 5, 2 * POINTS + 20)]
    jobs.record(session, job.id, fence=1, events=again)
    assert session.scalar(select(func.count()).select_from(MetricChunk).where(MetricChunk.name == "loss")) == 2
    losses = metrics.series(session, job.id, names=["loss"], max_points=None)["loss"]
    assert [step for step, _ in losses] == list(range(1, 2 * POINTS + 20))
    assert [step for step, value in losses if value == 9.0] == list(range(2 * POINTS + 10, 2 * POINTS + 20))
    assert metrics.names(session, job.id) == sorted(metrics.series(session, job.id))
    assert {len(points) for points in metrics.series(session, job.id, max_points=None).values()} == {2 * POINTS + 19}


def test_who_reads_while_points_are_packed_misses_none_and_sees_none_twice(database: Database) -> None:
    with database.session() as session:
        job_id = told(session, 3 * POINTS + 49, packed=False).id
    every = [(step, rough(step)) for step in range(1, 3 * POINTS + 50)]
    started, stop = Event(), Event()

    def pack() -> None:
        started.wait(10)
        with database.session() as session:
            metrics.pack(session, job_id)
        stop.set()

    with ThreadPoolExecutor(1) as pool:
        packing = pool.submit(pack)
        looks = 0
        while not stop.is_set() or looks < 3:
            with database.reading() as session:
                assert metrics.series(session, job_id, max_points=None)["loss"] == every
            looks += 1
            started.set()
        packing.result(10)


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


def test_a_whole_curve_is_read_point_by_point_with_few_of_them_in_memory(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "CHUNKS_AT_ONCE", 2)
    job, chunks = make.job(session), 100
    steps = range(chunks * POINTS + 7)
    for start in range(0, chunks * POINTS, POINTS):
        points = [(step, rough(step)) for step in steps[start : start + POINTS]]
        session.add(metrics.chunk(job.id, "loss", points))
    session.execute(
        insert(Metric), [{"job_id": job.id, "name": "loss", "step": step, "value": rough(step)} for step in steps[-7:]]
    )
    session.flush()
    session.expunge_all()
    tracemalloc.start()
    try:
        for step, (told_step, value) in enumerate(metrics.each(session, job.id, "loss")):
            assert (told_step, value) == (step, rough(step))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert step == steps[-1]
    # Sixteen bytes a point are 410 kB; as Python's numbers, of which nobody may hold all, they are 3 MB.
    assert most < 300_000
    assert list(metrics.each(session, job.id, "lr")) == []
