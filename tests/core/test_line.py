"""The order of the line: priority, what a project had, age; and numbers that keep it."""

from __future__ import annotations

from random import Random

import pytest

from core.line import ordered
from core.numbering import renumbered
from core.placing import Waiting
from core.shares import CHARGE_SECONDS, Standing, faded, gained

HOUR = 3600.0


def names(*line: Waiting, now: float = 0.0, slots: int = 1, **standings: Standing) -> list[str]:
    return [job.job_id for job in ordered(line, standings, now=now, slots=slots, patience=24 * HOUR)]


def job(name: str, project: str = "a", *, needs: int = 1, priority: int = 0, at: float = 0.0) -> Waiting:
    return Waiting(name, needs, project=project, priority=priority, queued_at=at)


# Shares


def test_usage_is_half_after_a_half_life_and_a_quarter_after_two() -> None:
    assert faded(80.0, 24 * HOUR, 24 * HOUR) == pytest.approx(40.0)
    assert faded(80.0, 48 * HOUR, 24 * HOUR) == pytest.approx(20.0)


def test_what_is_held_adds_up_as_each_moment_fades() -> None:
    half_life, seconds, parts = 1000.0, 2500.0, 100_000
    width = seconds / parts
    # The sum over small stretches, each faded by its age.
    summed = sum(3 * width * 0.5 ** ((number + 0.5) * width / half_life) for number in range(parts))
    assert gained(3, seconds, half_life) == pytest.approx(summed, rel=1e-6)
    later = Standing(usage=100.0, held=3).after(seconds, half_life)
    assert later.usage == pytest.approx(100 * 0.5**2.5 + summed, rel=1e-6)
    # In two steps as in one.
    twice = Standing(usage=100.0, held=3).after(1000.0, half_life).after(1500.0, half_life)
    assert twice.usage == pytest.approx(later.usage)


# Order


# `urgent` counts as an hour of its project's before the others are looked at.
def test_priority_comes_before_everything_then_what_the_project_had_then_age() -> None:
    line = (job("old", at=1.0), job("young", at=2.0), job("theirs", "b", at=3.0), job("urgent", priority=1, at=4.0))
    assert names(*line, now=5.0) == ["urgent", "theirs", "old", "young"]
    assert names(*line, now=5.0, b=Standing(usage=90 * 60.0)) == ["urgent", "old", "theirs", "young"]
    assert names(*line, now=5.0, b=Standing(usage=10 * HOUR)) == ["urgent", "old", "young", "theirs"]


def test_projects_take_turns_by_the_slots_that_their_jobs_want() -> None:
    flood = [job(f"a{number}", at=float(number)) for number in range(4)]
    line = names(*flood, job("b0", "b", needs=2, at=10.0), job("b1", "b", needs=2, at=11.0), now=12.0, slots=8)
    # a0, then b0 of two slots; then a's two that weigh as much, then b1.
    assert line == ["a0", "b0", "a1", "a2", "b1", "a3"]


def test_what_runs_counts_as_if_it_had_run_for_longer_already() -> None:
    assert names(job("mine"), job("theirs", "b", at=1.0), now=1.0, a=Standing(held=1)) == ["theirs", "mine"]
    assert Standing(usage=5.0, held=2).weight == 5.0 + 2 * CHARGE_SECONDS


def test_two_hours_of_waiting_make_up_for_one_of_the_cluster_and_a_half_life_is_the_most() -> None:
    slots = 8
    had = Standing(usage=8 * 2 * HOUR)  # two hours of all of it
    late = job("theirs", "b", at=6 * HOUR)
    assert names(job("mine", at=1.5 * HOUR), late, now=6 * HOUR, slots=slots, a=had)[0] == "mine"
    assert names(job("mine", at=2.5 * HOUR), late, now=6 * HOUR, slots=slots, a=had)[0] == "theirs"
    much = Standing(usage=8 * 25 * HOUR)
    week = 7 * 24 * HOUR
    assert names(job("mine"), job("theirs", "b", at=week), now=week, slots=slots, a=much)[0] == "theirs"


# Numbers


def test_a_job_that_leaves_or_comes_last_changes_no_other_number() -> None:
    numbers = renumbered(["a", "b", "c"], {})
    assert sorted(numbers, key=numbers.__getitem__) == ["a", "b", "c"]
    assert renumbered(["a", "c"], numbers) == {}
    assert renumbered(["a", "b", "c", "d"], numbers).keys() == {"d"}
    assert renumbered(["x", "a", "b", "y", "c"], numbers).keys() == {"x", "y"}
    assert renumbered(["c", "a", "b"], numbers).keys() == {"c"}
    assert renumbered([], {}) == {}


def test_numbers_rise_along_the_line_whatever_comes_leaves_or_moves() -> None:
    rng = Random(0)
    line: list[str] = []
    numbers: dict[str, float] = {}
    for number in range(400):
        line.insert(rng.randrange(len(line) + 1), f"j{number}")
        if len(line) > 40:
            numbers.pop(line.pop(rng.randrange(len(line))), None)
        if number % 7 == 0:
            line.insert(rng.randrange(len(line)), line.pop(rng.randrange(len(line))))
        new = renumbered(line, numbers)
        assert new.keys() <= set(line)
        numbers |= new
        values = [numbers[job_id] for job_id in line]
        assert values == sorted(set(values))


def test_where_a_gap_is_used_up_all_get_new_numbers() -> None:
    numbers = {"a": 1.0, "b": 1.0 + 2**-52}
    assert renumbered(["a", "x", "b"], numbers) == {"a": 0.0, "x": 1.0, "b": 2.0}
