"""Where a step's time goes: spans by a clock that is told, and the parts of real steps."""

import time
from contextlib import suppress

import pytest

from engine.data.loader import Loader
from engine.stopwatch import PARTS, Stopwatch
from engine.whereabouts import Whereabouts, path_of, read
from tests.engine.train import runs

HELD_UP = 0.2


class Told:
    """A clock that shows what it is told to."""

    now = 0.0

    def mark(self):
        return self.now

    def seconds(self, start, end):
        return end - start

    def reach(self, mark):
        pass


def test_a_span_within_another_is_the_others_time():
    clock = Told()
    stopwatch = Stopwatch(clock=clock)
    with stopwatch.span("checkpoint"):
        clock.now = 1.0
        with stopwatch.span("communication"):
            clock.now = 3.0
    with suppress(KeyError), stopwatch.span("bubble"):
        clock.now = 7.0
        raise KeyError
    with stopwatch.span("checkpoint"):
        clock.now = 7.5
    parts = stopwatch.lap()
    assert {part: seconds for part, seconds in parts.items() if part != "compute"} == {
        "communication": 0.0, "bubble": 4.0, "data": 0.0, "evaluation": 0.0, "checkpoint": 3.5,
    }  # fmt: skip
    assert not any(seconds for part, seconds in stopwatch.lap().items() if part != "compute")


def test_whoever_looks_sees_whether_a_rank_waits_for_others(tmp_path):
    path = path_of(tmp_path, 3)
    assert read(path) is None
    stopwatch = Stopwatch(whereabouts=Whereabouts(path))
    stopwatch.whereabouts.go_on("step", step=7)
    seen = [read(path)]
    with stopwatch.span("checkpoint"):
        seen.append(read(path))
        with stopwatch.span("communication"):
            seen.append(read(path))
    seen.append(read(path))
    assert [(place.waiting, place.waits) for place in seen] == [(False, 0), (False, 0), (True, 1), (False, 1)]
    assert {(place.phase, place.step) for place in seen} == {("step", 7)}
    assert seen[0].moves == seen[1].moves < seen[2].moves < seen[3].moves


def test_the_parts_of_a_lap_are_the_time_that_passed():
    begun = time.perf_counter()
    stopwatch = Stopwatch()
    with stopwatch.span("data"):
        runs.config()
    first, second = stopwatch.lap(), stopwatch.lap()
    passed = time.perf_counter() - begun
    assert first["data"] > 0
    assert 0 < sum(first.values()) + sum(second.values()) <= passed


def steps_of(run_dir, run):
    return [event.model_dump() for event in runs.events_of(run_dir, run) if event.type == "step"]


def parts_of(step):
    return {part: step[f"{part}_seconds"] for part in PARTS}


def test_the_parts_add_up_and_what_follows_a_step_counts_in_the_next(tmp_path):
    run = runs.config(
        training={"steps": 5, "eval_every": 2, "checkpoint_every": 3}, data={"validation": 0.2},
        peak_flops_per_rank=1e12,
    )  # fmt: skip
    steps = steps_of(tmp_path, run)
    for step in steps:
        assert sum(parts_of(step).values()) == pytest.approx(step["step_seconds"], rel=1e-9)
        assert min(step["compute_seconds"], step["data_seconds"]) > 0
        # Alone, a rank waits for nobody.
        assert step["communication_seconds"] == step["bubble_seconds"] == 0
        assert step["hfu"] > step["mfu"] > 0
        training = step["step_seconds"] - step["evaluation_seconds"] - step["checkpoint_seconds"]
        assert step["tokens_per_second"] == pytest.approx(4 * 32 / training, rel=1e-9)
    assert [step["step"] for step in steps if step["evaluation_seconds"]] == [3, 5]
    assert [step["step"] for step in steps if step["checkpoint_seconds"]] == [4]


def held_up(run_dir, run):
    """What rank 0 tells when rank 1 is slow to make its batches."""
    make_batches = Loader.step

    def slowly(self, step_index):
        until = time.perf_counter() + (HELD_UP if self.data_rank == 1 else 0)
        while time.perf_counter() < until:
            pass
        return make_batches(self, step_index)

    Loader.step = slowly
    try:
        return steps_of(run_dir, run)
    finally:
        Loader.step = make_batches


def test_parts_are_means_over_ranks_of_whom_one_waits_for_the_other(world2, tmp_path):
    run = runs.config(parallel={"data": 2}, training={"steps": 2})
    runs.write(tmp_path, run)
    first, second = world2.run(held_up, tmp_path, run)
    assert [parts_of(step) for step in first] == [parts_of(step) for step in second]
    for step in first:
        assert sum(parts_of(step).values()) == pytest.approx(step["step_seconds"], rel=1e-9)
        # One rank makes data for so long, and the other waits in a collective: half of it each in the mean.
        assert step["data_seconds"] >= HELD_UP / 2
        assert step["communication_seconds"] >= HELD_UP / 3
