"""Estimated starts and fairness, on a simulated cluster and clock."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.scheduling import DAY, HOUR, POLICIES, Asked, cluster, replay, told, workload
from core.forecast import Running, starts
from core.placing import Held, Host, Waiting
from core.quotas import Allowance


@pytest.mark.parametrize("seed", range(4))
def test_an_estimate_is_when_the_job_starts_if_runs_take_what_they_say_and_nobody_else_comes(seed: int) -> None:
    exact = [
        Asked(one.job._replace(runtime=one.lasts, queued_at=0.0), one.lasts)
        for one in workload(150, gpus=24, seed=seed, load=0.9)
    ]
    hosts = cluster(24)
    ran = replay(exact, hosts, POLICIES["ours"])
    estimated = starts([one.job for one in exact], hosts, now=0.0, most=len(exact))
    assert estimated == pytest.approx({job_id: run.started for job_id, run in ran.items()})
    assert max(estimated.values()) > 12 * HOUR, "some had to wait"


def test_runs_that_are_under_way_end_when_they_say() -> None:
    host = Host("a", "cpu", 2, (), (Held(1, 130.0), Held(1, 150.0)))
    running = [Running("a", (0,), ends_at=130.0), Running("a", (1,), ends_at=150.0)]
    line = [Waiting("one", 1, runtime=100.0), Waiting("two", 2, runtime=5.0), Waiting("short", 1, runtime=20.0)]
    assert starts(line, [host], now=100.0, running=running) == {"one": 130.0, "two": 230.0, "short": 150.0}


def test_behind_a_run_of_which_nobody_knows_there_is_no_estimate() -> None:
    host = Host("a", "cpu", 2, (0,), (Held(1),))
    line = [Waiting("small", 1, runtime=10.0), Waiting("large", 2, runtime=10.0), Waiting("next", 2, runtime=10.0)]
    line = [one._replace(queued_at=float(number)) for number, one in enumerate(line)]
    assert starts(line, [host], now=100.0, running=[Running("a", (1,))]) == {"small": 100.0}


def test_a_job_that_tries_again_later_starts_then_and_a_project_at_its_limit_when_one_of_its_own_ends() -> None:
    host = Host("a", "cpu", 4, (0, 1, 2, 3))
    line = [Waiting("later", 1, runtime=10.0, ready_at=160.0)]
    assert starts(line, [host], now=100.0) == {"later": 160.0}
    mine = [Waiting(name, 1, project="p", runtime=30.0) for name in ("first", "second")]
    assert starts(mine, [host], now=100.0, allowances={"p": Allowance(jobs=1, at_once=1)}) == {
        "first": 100.0,
        "second": 130.0,
    }


def test_only_so_many_are_reckoned() -> None:
    host = Host("a", "cpu", 1, (0,))
    line = [Waiting(f"j{number}", 1, runtime=10.0) for number in range(9)]
    assert starts(line, [host], now=0.0, most=3) == {"j0": 0.0, "j1": 10.0, "j2": 20.0}


# Fairness


def stream(count: int, *, gpus: int) -> list[Asked]:
    """One job that needs a whole host among small ones that would keep it busy for ever, from another project."""
    rng = Random(1)
    small = [
        Asked(Waiting(f"s{number:04}", 1, "cuda", "many", 4 * HOUR, 0, number * HOUR / gpus), rng.uniform(1, 4) * HOUR)
        for number in range(count)
    ]
    return [*small, Asked(Waiting("large", 8, "cuda", "one", 4 * HOUR, 0, 3 * HOUR), HOUR)]


def test_a_job_of_a_whole_host_waits_no_longer_than_the_longest_run_before_it() -> None:
    asked = stream(600, gpus=8)
    ran = {name: replay(asked, cluster(8), policy) for name, policy in POLICIES.items()}
    # All that ran when it came ends within four hours, and what starts in between is gone by then.
    assert ran["ours"]["large"].wait <= 4 * HOUR
    assert ran["greedy"]["large"].wait > 24 * HOUR


def test_in_a_small_replay_everyone_starts_and_nobody_waits_for_much_longer_than_first_come_first_served() -> None:
    asked = workload(700, gpus=64, seed=3, load=0.95)
    ran = {name: replay(asked, cluster(64), policy) for name, policy in POLICIES.items()}
    assert ran["ours"].keys() == {one.job.job_id for one in asked}
    worst = {name: max(run.wait for run in found.values()) for name, found in ran.items()}
    assert worst["ours"] <= worst["fifo"] + DAY
    assert told(ran["ours"], gpus=64)["utilisation"] >= told(ran["fifo"], gpus=64)["utilisation"]  # type: ignore[operator]


def test_a_project_that_asks_for_little_is_not_kept_waiting_by_one_that_asks_for_very_much() -> None:
    flood = [Asked(Waiting(f"f{number:03}", 1, "cuda", "flood", HOUR, 0, 0.0), HOUR) for number in range(400)]
    few = [Asked(Waiting(f"g{number}", 1, "cuda", "few", HOUR, 0, number * 5 * HOUR), HOUR) for number in range(1, 8)]
    ran = replay([*flood, *few], cluster(8), POLICIES["ours"])
    # It has the next slot that is free, as the flood has all of them and the few have none.
    assert max(ran[one.job.job_id].wait for one in few) <= HOUR
    by_age = replay([*flood, *few], cluster(8), POLICIES["fifo"])
    assert min(by_age[one.job.job_id].wait for one in few) > 10 * HOUR
