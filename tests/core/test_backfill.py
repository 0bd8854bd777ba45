"""Who may start before a larger job that waits: only who keeps it no longer than it waits already."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from core.placing import FAR_BEHIND, MOST_REASONED, Held, Host, Placement, Reservation, Waiting, decide

# Four slots, of which one is free: two are held for another 100 s, one for another 300.
HOST = Host("a", "cpu", 4, (3,), (Held(2, 1100.0), Held(1, 1300.0)))
NOW = 1000.0


def started(*line: Waiting, hosts: tuple[Host, ...] = (HOST,)) -> list[str]:
    return [placement.job_id for placement in decide(line, hosts, now=NOW).placements]


def job(name: str, needs: int, runtime: float | None = None) -> Waiting:
    return Waiting(name, needs, runtime=runtime)


@pytest.mark.parametrize(
    ("needs", "at"),
    [(2, 1100.0), (3, 1100.0), (4, 1300.0)],
)
def test_a_job_that_cannot_start_reserves_the_moment_when_enough_will_have_ended(needs: int, at: float) -> None:
    assert decide([job("large", needs)], [HOST], now=NOW).reservation == Reservation("large", "a", at)


@pytest.mark.parametrize(
    ("needs", "runtime", "starts"),
    [
        pytest.param(4, 300.0, True, id="gone in time"),
        pytest.param(4, 301.0, False, id="a second too long"),
        pytest.param(4, None, False, id="nobody knows how long"),
        pytest.param(3, 301.0, False, id="all three that are free then are wanted"),
        pytest.param(2, 301.0, True, id="one slot is left over then"),
        pytest.param(2, None, True, id="on it even for ever"),
    ],
)
def test_a_later_job_starts_first_if_it_is_gone_or_not_in_the_way_when_the_large_one_can_start(
    needs: int, runtime: float | None, starts: bool
) -> None:
    assert started(job("large", needs), job("small", 1, runtime)) == (["small"] if starts else [])


def test_what_is_left_over_is_given_once() -> None:
    host = Host("a", "cpu", 4, (2, 3), (Held(2, 1100.0),))
    # At 1100 four will be free, of which the large one leaves one.
    assert started(job("large", 3), job("first", 1), job("second", 1), hosts=(host,)) == ["first"]


def test_a_host_of_which_nobody_knows_when_it_is_free_is_kept_whole() -> None:
    host = Host("a", "cpu", 4, (2, 3), (Held(2, inf),))
    decision = decide([job("large", 3), job("small", 1, 1.0)], [host], now=NOW)
    assert decision.placements == []
    assert decision.reservation == Reservation("large", "a", inf)
    assert decision.reasons["small"] == "needs 1 slot; 0 are free, and a is kept for a larger job, which is next"


def test_the_host_that_is_free_earliest_is_reserved_though_more_is_free_elsewhere() -> None:
    hosts = (
        Host("soon", "cpu", 4, (3,), (Held(3, 1010.0),)),
        Host("late", "cpu", 4, (1, 2, 3), (Held(1, 9000.0),)),
    )
    decision = decide([job("large", 4), job("small", 3)], hosts, now=NOW)
    assert decision.reservation == Reservation("large", "soon", 1010.0)
    assert [placement.node for placement in decision.placements] == ["late"]


def test_what_starts_in_the_same_look_counts_for_when_its_host_is_free() -> None:
    host = Host("a", "cpu", 4, (0, 1, 2, 3))
    decision = decide([job("first", 2, 50.0), job("large", 4), job("small", 2, 50.0)], [host], now=NOW)
    assert [placement.job_id for placement in decision.placements] == ["first", "small"]
    assert decision.reservation == Reservation("large", "a", NOW + 50)


def test_who_is_kept_back_by_a_reservation_with_an_end_learns_what_would_help() -> None:
    reason = decide([job("large", 4), job("small", 1)], [HOST], now=NOW).reasons["small"]
    assert reason == (
        "needs 1 slot; 0 are free, and a is kept for a larger job, which is next; with a short enough max_runtime it"
        " would start before that"
    )


def test_who_is_far_behind_is_told_so_and_nothing_that_changes_with_each_job_ahead() -> None:
    line = [job(f"j{number:04}", 4) for number in range(MOST_REASONED + 2)]
    reasons = decide([*line, job("never", 5)], [HOST], now=NOW).reasons
    assert {reasons[one.job_id] for one in line[:MOST_REASONED]} == {"needs 4 slots, 1 is free"}
    assert {reasons[one.job_id] for one in line[MOST_REASONED:]} == {FAR_BEHIND}
    assert reasons["never"] == "needs 5 slots; the largest node that is online has 4"


@pytest.mark.parametrize("seed", range(20))
def test_what_starts_before_a_job_that_waits_never_makes_it_wait_for_longer(seed: int) -> None:
    """In one order, runs may end early and never late; then a reserved moment only comes nearer (Lifka 1995)."""
    random = Random(seed)
    line = [
        Waiting(f"j{number:03}", random.choice((1, 1, 2, 3, 4)), runtime=random.choice((None, 10.0, 40.0, 160.0)))
        for number in range(80)
    ]
    free = {name: [*range(4)] for name in ("a", "b")}
    runs: dict[str, tuple[Placement, float, float]] = {}
    """By job: where it is, when it really ends, and when it will have at the latest."""
    reserved: dict[str, float] = {}
    now = 0.0
    while line or runs:
        held = [(placement, limit) for placement, _, limit in runs.values()]
        hosts = [
            Host(name, "cpu", 4, tuple(free[name]),
                 tuple(Held(len(each.slots), limit) for each, limit in held if each.node == name))
            for name in free
        ]  # fmt: skip
        decision = decide(line, hosts, now=now)
        jobs = {each.job_id: each for each in line}
        for placement in decision.placements:
            assert now <= reserved.get(placement.job_id, inf)
            started, limit = jobs[placement.job_id], jobs[placement.job_id].runtime or inf
            lasts = min(limit, 200.0) * random.choice((0.1, 0.5, 1.0))
            runs[started.job_id] = (placement, now + lasts, now + limit)
            free[placement.node] = [slot for slot in free[placement.node] if slot not in placement.slots]
            line.remove(started)
        if decision.reservation is not None:
            assert decision.reservation.at <= reserved.get(decision.reservation.job_id, inf)
            reserved[decision.reservation.job_id] = decision.reservation.at
        if runs:
            placement, now, _ = runs.pop(min(runs, key=lambda job_id: runs[job_id][1]))
            free[placement.node] = sorted([*free[placement.node], *placement.slots])
    assert len([at for at in reserved.values() if at < inf]) > 5
