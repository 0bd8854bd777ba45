"""Who runs next, where, and why the others wait."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from math import log
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from core import jobs, nodes, scheduler, shares
from core.db import Database
from core.errors import InUse, NotFound
from core.keys import DEFAULT_PROJECT, Account
from core.models import Holding, QueuePlace, Share, Slot, database_now
from core.placing import NO_WORKER, Decision, Host, Placement, Waiting, decide
from core.states import JobState
from engine.events import Started
from tests import make
from tests.fakes.hints import Heard

S = JobState


def host(name: str = "a", num_slots: int = 4, free: tuple[int, ...] | None = None, device: str = "cpu") -> Host:
    return Host(name, device, num_slots, tuple(range(num_slots)) if free is None else free)


def waiting(*needs: int, device: str = "cpu") -> list[Waiting]:
    """Jobs j0, j1, … in their order."""
    return [Waiting(f"j{index}", need, device) for index, need in enumerate(needs)]


# Deciding


def test_jobs_get_exact_slots_in_their_order() -> None:
    decision = decide(waiting(1, 2), [host(num_slots=4, free=(1, 2, 3))])
    assert decision.placements == [Placement("j0", "a", (1,)), Placement("j1", "a", (2, 3))]
    assert decision.reasons == {}


def test_a_job_goes_where_it_leaves_the_smallest_gap() -> None:
    hosts = [host("large", 8), host("small", 2)]
    assert [placement.node for placement in decide(waiting(2, 2), hosts).placements] == ["small", "large"]


def test_a_job_made_for_gpus_runs_on_them_alone() -> None:
    hosts = [host("cpus", 8), host("gpus", 2, device="cuda")]
    decision = decide(waiting(2, 2, device="cuda"), hosts)
    assert decision.placements == [Placement("j0", "gpus", (0, 1))]
    assert decision.reasons == {"j1": "needs 2 GPUs, 0 are free"}
    without = decide(waiting(1, device="cuda"), [host("cpus", 8)])
    assert without.reasons == {"j0": "needs 1 GPU; the largest node that is online has 0"}


def test_a_job_made_for_cpus_leaves_gpus_to_others_where_it_can() -> None:
    hosts = [host("gpus", 2, device="cuda"), host("cpus", 8)]
    assert [placement.node for placement in decide(waiting(8, 1), hosts).placements] == ["cpus", "gpus"]


def test_a_job_stays_within_one_node() -> None:
    decision = decide(waiting(3), [host("a", 2), host("b", 2)])
    assert decision.placements == []
    assert decision.reasons == {"j0": "needs 3 slots; the largest node that is online has 2"}


@pytest.mark.parametrize(
    ("needs", "hosts", "reasons"),
    [
        ([1], [], {"j0": NO_WORKER}),
        ([2], [host(num_slots=2, free=(1,))], {"j0": "needs 2 slots, 1 is free"}),
        ([1], [host(num_slots=2, free=())], {"j0": "needs 1 slot, 0 are free"}),
        ([8], [host(num_slots=4)], {"j0": "needs 8 slots; the largest node that is online has 4"}),
        (
            [4, 1],
            [host(num_slots=4, free=(0, 1))],
            {
                "j0": "needs 4 slots, 2 are free",
                "j1": "needs 1 slot; 0 are free, and a is kept for a larger job, which is next",
            },
        ),
    ],
    ids=["no node", "partly free", "full", "too large", "kept for another"],
)
def test_a_job_that_waits_says_why(needs: list[int], hosts: list[Host], reasons: dict[str, str]) -> None:
    assert decide(waiting(*needs), hosts).reasons == reasons


def test_a_large_job_is_not_starved_by_small_ones_that_came_later() -> None:
    # Small jobs keep coming while the large one waits; each ends after one round. Greedy would never let it start.
    free: tuple[int, ...] = (1,)
    for _ in range(3):
        decision = decide([Waiting("large", 2), Waiting("small", 1)], [host(num_slots=2, free=free)])
        assert "small" not in {placement.job_id for placement in decision.placements}
        if decision.placements:
            break
        free = (0, 1)
    assert [placement.job_id for placement in decision.placements] == ["large"]


def test_the_other_nodes_serve_those_behind_a_waiting_job() -> None:
    hosts = [host("a", 4, free=(0, 1)), host("b", 2)]
    decision = decide(waiting(4, 1, 1, 1), hosts)
    assert decision.placements == [Placement("j1", "b", (0,)), Placement("j2", "b", (1,))]
    assert set(decision.reasons) == {"j0", "j3"}


def test_a_job_that_fits_nowhere_holds_nobody_up() -> None:
    decision = decide(waiting(16, 1), [host(num_slots=4)])
    assert [placement.job_id for placement in decision.placements] == ["j1"]


def starting(num_slots: int, *, at_once: float, starting: int = 0, name: str = "a") -> Host:
    return replace(host(name, num_slots), starting=starting, starts_at_once=at_once)


@pytest.mark.parametrize(
    ("needs", "hosts", "starts"),
    [
        pytest.param([1, 1, 1], [starting(8, at_once=2)], ["j0", "j1"], id="two at once"),
        pytest.param([1, 1], [starting(8, at_once=2, starting=1)], ["j0"], id="beside one that is being started"),
        pytest.param([1], [starting(8, at_once=2, starting=2)], [], id="none beside two"),
        pytest.param([4, 1], [starting(8, at_once=2)], ["j0"], id="a larger one starts alone"),
        pytest.param([1, 4], [starting(8, at_once=2)], ["j0"], id="and waits to be alone"),
        pytest.param([1, 2, 1], [starting(8, at_once=2)], ["j0"], id="and nobody overtakes it"),
        pytest.param(
            [1, 1, 1],
            [starting(8, at_once=1, name="a"), starting(4, at_once=1, name="b")],
            ["j0", "j1"],
            id="another host starts it at once",
        ),
        pytest.param([1, 1], [host(num_slots=8)], ["j0", "j1"], id="no limit"),
    ],
)
def test_a_host_starts_so_many_ranks_at_once(needs: list[int], hosts: list[Host], starts: list[str]) -> None:
    assert [placement.job_id for placement in decide(waiting(*needs), hosts).placements] == starts


def test_who_waits_for_its_turn_to_start_says_so_and_keeps_its_slots() -> None:
    decision = decide(waiting(1, 1, 2), [starting(2, at_once=1)])
    assert [placement.job_id for placement in decision.placements] == ["j0"]
    assert decision.upcoming == [Placement("j1", "a", (1,))]
    assert decision.reasons == {
        "j1": "a has room for it and starts 1 rank at once: it is among the next",
        "j2": "needs 2 slots, 0 are free",
    }


# Carrying it out


def test_a_host_is_given_more_as_those_that_it_starts_begin_to_train_or_take_long(database: Database) -> None:
    with database.session() as session:
        make.node(session, num_slots=4, starts_at_once=1)
        first, second, third = (make.job(session, created_at=float(number)).id for number in range(3))
    with database.session() as session:
        assert [placement.job_id for placement in scheduler.tick(session)] == [first]
        assert scheduler.tick(session) == []
        assert jobs.find(session, second).queue_reason == (
            "node-1 has room for it and starts 1 rank at once: it is among the next"
        )
    with database.session() as session:
        claimed = jobs.claim(session, first, "who", timedelta(seconds=60), node="node-1")
        assert claimed is not None
        assert scheduler.tick(session) == []
        jobs.move(session, first, S.RUNNING, fence=claimed.attempt)
        assert [placement.job_id for placement in scheduler.tick(session)] == [second]
        assert scheduler.tick(session) == []
    with database.session() as session:
        # It waits for data, mostly.
        long_ago = database_now() - scheduler.STARTS_WITHIN.total_seconds() - 1
        session.execute(update(Holding).where(Holding.job_id == second).values(started_at=long_ago))
        assert [placement.job_id for placement in scheduler.tick(session)] == [third]


def test_the_scheduler_is_told_when_a_job_trains(database: Database, hints: Heard) -> None:
    with database.session() as session:
        make.node(session)
        job = make.job(session, state=S.STARTING, node="node-1")
    hints.nudges = 0
    event = Started(seq=1, time=0.0, total_steps=1, start_step=0, ranks=1, parameters=1, trainable_parameters=1,
                    train_rows=1, train_tokens=1, vocab_size=260, device="cpu")  # fmt: skip
    with database.session() as session:
        jobs.record(session, job.id, fence=job.attempt, events=[event])
    assert hints.nudges == 1


def test_higher_priority_goes_first_then_age(session: Session) -> None:
    make.node(session, num_slots=2)
    young = make.job(session, created_at=3.0)
    old = make.job(session, created_at=1.0)
    urgent = make.job(session, created_at=4.0, priority=5)
    assert [scheduler.position(session, job) for job in (urgent, old, young)] == [1, 2, 3]
    assert [placement.job_id for placement in scheduler.tick(session)] == [urgent.id, old.id]
    assert scheduler.position(session, jobs.find(session, young.id)) == 1
    assert scheduler.position(session, jobs.find(session, urgent.id)) is None


def test_a_placed_job_holds_its_slots_and_its_node_is_told(database: Database, hints: Heard) -> None:
    with database.session() as session:
        make.node(session, num_slots=3)
        job_id = make.job(session, slots=2).id
    with database.session() as session:
        assert scheduler.tick(session) == [Placement(job_id, "node-1", (0, 1))]
    assert hints.starts == [(job_id, "node-1")]
    with database.reading() as session:
        job = jobs.find(session, job_id)
        assert (job.state, job.node, job.holder, job.queue_reason) == (S.STARTING, "node-1", None, None)
        assert session.scalars(select(Slot.job_id).order_by(Slot.index)).all() == [job_id, job_id, None]
    with database.session() as session:
        assert scheduler.tick(session) == []


def test_a_reason_is_written_down_and_changes_with_the_cluster(session: Session) -> None:
    job = make.job(session, slots=2)
    scheduler.tick(session)
    session.refresh(job)
    assert job.queue_reason == NO_WORKER
    make.node(session, num_slots=1)
    scheduler.tick(session)
    session.refresh(job)
    assert job.queue_reason == "needs 2 slots; the largest node that is online has 1"


def test_a_job_that_lost_an_attempt_waits_for_its_time(session: Session) -> None:
    make.node(session)
    job = make.job(session, state=S.RUNNING)
    jobs.lose(session, job.id, fence=1, reason="rank 0 died", max_losses=5)
    assert scheduler.tick(session) == []
    job.retry_at = 1.0
    session.flush()
    assert [placement.job_id for placement in scheduler.tick(session)] == [job.id]
    assert jobs.find(session, job.id).retry_at is None


@pytest.mark.parametrize("state", [S.PAUSED, S.RUNNING, S.SUCCEEDED, S.CANCELLING])
def test_only_queued_jobs_are_placed(session: Session, state: S) -> None:
    make.node(session, num_slots=4)
    make.job(session, state=state)
    assert scheduler.tick(session) == []


def test_a_job_is_placed_where_its_run_can_compute(session: Session) -> None:
    make.node(session, "cpus", num_slots=4)
    made_for_gpus = make.run_config(device="cuda").model_dump(mode="json")
    job = make.job(session, run_config=made_for_gpus)
    assert scheduler.tick(session) == []
    make.node(session, "gpus", num_slots=1, device="cuda")
    assert scheduler.tick(session) == [Placement(job.id, "gpus", (0,))]


def test_a_job_that_is_cancelled_while_it_is_looked_at_holds_up_nobody(
    kind: str, database: Database, owner: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "sqlite":
        pytest.skip("on SQLite whoever writes is alone")
    with database.session() as session:
        make.node(session, num_slots=2)
        first, second, waits = (make.job(session, slots=slots, created_at=slots) for slots in (1, 1, 2))

    def meanwhile(waiting: list[Waiting], hosts: list[Host], *_: object, **__: object) -> Decision:
        with database.session() as other:
            jobs.cancel(other, owner, first.id)
            jobs.cancel(other, owner, waits.id)
        return decide(waiting, hosts)

    monkeypatch.setattr(scheduler, "decide", meanwhile)
    with database.session() as session:
        assert [placement.job_id for placement in scheduler.tick(session)] == [second.id]
    with database.reading() as session:
        assert jobs.find(session, waits.id).queue_reason is None
        assert session.scalars(select(Slot.job_id).where(Slot.job_id.is_not(None))).all() == [second.id]


# Looking at the line


def test_a_place_in_line_follows_shares_and_is_gone_with_the_wait(session: Session, owner: Account) -> None:
    make.node(session, num_slots=1)
    make.project(session, "proj-other")
    job = make.job(session, state=S.RUNNING)
    session.add(Holding(project_id=job.project_id, job_id=job.id, slots=1, started_at=database_now()))
    flood = [make.job(session, created_at=float(number)) for number in range(3)]
    theirs = make.job(session, project_id="proj-other", created_at=9.0)
    assert [scheduler.position(session, job) for job in (*flood, theirs)] == [1, 2, 3, 4]
    scheduler.tick(session)
    # What runs is the flood's, and each of its jobs counts before the next.
    assert [scheduler.position(session, job) for job in (*flood, theirs)] == [2, 3, 4, 1]
    jobs.cancel(session, owner, flood[0].id)
    assert [scheduler.position(session, job) for job in (flood[1], theirs)] == [2, 1]
    assert scheduler.position(session, jobs.find(session, flood[0].id)) is None
    assert {place.job_id for place in session.scalars(select(QueuePlace))} == {flood[1].id, flood[2].id, theirs.id}


def test_who_lined_up_again_stands_behind_who_waits_before_the_scheduler_has_looked(session: Session) -> None:
    again = make.job(session, created_at=1.0, queued_at=8.0)
    first, last = (make.job(session, created_at=at) for at in (2.0, 9.0))
    assert [scheduler.position(session, job) for job in (first, again, last)] == [1, 2, 3]


def test_an_estimate_is_written_down_and_taken_back(session: Session, owner: Account) -> None:
    make.node(session, num_slots=2)
    first = make.job(session, slots=2, max_runtime=600.0, created_at=1.0)
    second = make.job(session, slots=1, max_runtime=60.0, created_at=2.0)
    third = make.job(session, slots=2, created_at=3.0)
    fourth = make.job(session, slots=2, created_at=4.0)
    scheduler.tick(session)
    scheduler.note(session, scheduler.estimate(session))
    now = session.scalar(select(database_now())) or 0.0
    estimates = [scheduler.prospect(session, job) for job in (second, third, fourth)]
    assert [seen and seen.estimated_start for seen in estimates] == [
        pytest.approx(now + 600, abs=5),
        pytest.approx(now + 660, abs=5),
        None,
    ]
    seen = scheduler.foresee(session, needs=1, device="cpu", priority=0, project=DEFAULT_PROJECT, runtime=30.0)
    # It fits beside the second, and is gone when the third can start.
    assert (seen.position, seen.estimated_start) == (4, pytest.approx(now + 600, abs=5))
    jobs.cancel(session, owner, first.id)
    jobs.cancel(session, owner, second.id)
    session.flush()
    scheduler.note(session, {})
    assert [place.estimated_start for place in session.scalars(select(QueuePlace))] == [None, None]


def test_a_run_ends_by_its_limit_or_by_what_it_says_whichever_is_earlier() -> None:
    now, started_at = 1000.0, 900.0
    assert scheduler.ends_at(now, started_at, 300.0, {}) == 1200.0
    assert scheduler.ends_at(now, started_at, 300.0, {"eta_seconds": 50.0}) == 1050.0
    assert scheduler.ends_at(now, started_at, 300.0, {"eta_seconds": 5000.0}) == 1200.0
    assert scheduler.ends_at(now, started_at, 50.0, {"eta_seconds": None}) == now
    assert scheduler.ends_at(now, None, None, {}) == float("inf")


def test_a_short_job_starts_before_a_large_one_that_waits_for_a_run_to_end(session: Session) -> None:
    make.node(session, num_slots=2)
    running = make.job(session, max_runtime=3600.0)
    scheduler.tick(session)
    large = make.job(session, slots=2, created_at=1.0)
    long = make.job(session, slots=1, max_runtime=7200.0, created_at=2.0)
    short = make.job(session, slots=1, max_runtime=600.0, created_at=3.0)
    assert jobs.find(session, running.id).state is S.STARTING
    assert [placement.job_id for placement in scheduler.tick(session)] == [short.id]
    for job in (large, long):
        session.refresh(job)
    assert (large.queue_reason, long.queue_reason) == (
        "needs 2 slots, 1 is free",
        "needs 1 slot; 0 are free, and node-1 is kept for a larger job, which is next; with a short enough max_runtime"
        " it would start before that",
    )


def test_of_a_long_line_the_front_and_what_is_new_are_looked_at_and_who_could_not_start_is_passed_over(
    session: Session,
) -> None:
    make.node(session, num_slots=2)
    make.job(session, state=S.RUNNING, slots=2)
    line = [make.job(session, created_at=float(number), slots=1 + 2 * (number < 4)) for number in range(9)]
    scheduler.tick(session, depth=None)
    assert [scheduler.position(session, job) for job in line] == list(range(1, 10))
    make.node(session, "node-2", num_slots=1)
    urgent = make.job(session, created_at=20.0, priority=1)
    late = make.job(session, created_at=21.0)
    # The first four need more than any host has.
    assert [placement.job_id for placement in scheduler.tick(session, depth=2)] == [urgent.id]
    make.node(session, "node-3", num_slots=1)
    assert [placement.job_id for placement in scheduler.tick(session, depth=2)] == [line[4].id]
    assert scheduler.position(session, late) == 9
    scheduler.tick(session, depth=None)
    assert [scheduler.position(session, job) for job in (line[5], line[8], late)] == [5, 8, 9]


def test_where_a_job_would_stand_in_a_long_line_is_told_by_its_front_and_by_counting(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MOST_FORESEEN", 3)
    lines: list[int] = []

    def decided(line: list[Waiting], *rest: Any, **more: Any) -> Decision:
        lines.append(len(line))
        return decide(line, *rest, **more)

    monkeypatch.setattr(scheduler, "decide", decided)
    make.node(session, num_slots=1)
    make.job(session, state=S.RUNNING)
    make.project(session, "proj-other")
    # The first needs more than any host has, and is passed over.
    for number in range(3):
        make.job(session, priority=1, created_at=float(number), slots=1 + 2 * (number == 0))
    for number in range(8):
        make.job(session, created_at=float(number))

    def foreseen(priority: int, project: str = DEFAULT_PROJECT) -> int:
        return scheduler.foresee(session, needs=1, device="cpu", priority=priority, project=project).position

    assert [foreseen(2), foreseen(1), foreseen(0), foreseen(-1)] == [1, 4, 12, 12]
    scheduler.tick(session, depth=None)
    lines.clear()
    assert [foreseen(2), foreseen(1), foreseen(0), foreseen(-1)] == [1, 4, 12, 12]
    assert lines == [4] * 4
    make.job(session, priority=1, created_at=9.0)
    assert [foreseen(2), foreseen(1), foreseen(0)] == [1, 5, 13]


# Shares


def test_what_was_held_is_counted_once_and_fades(session: Session) -> None:
    now = session.scalar(select(database_now())) or 0.0
    session.add(Holding(project_id=DEFAULT_PROJECT, slots=4, started_at=now - 7200, ended_at=now - 3600))
    make.node(session, num_slots=3)
    make.job(session, slots=3)
    scheduler.tick(session)
    day = 86400.0
    for _ in range(2):
        found = shares.standings(session, now=now + day, half_life=day, counting=True)[DEFAULT_PROJECT]
        # Four slots for an hour, an hour and a day ago; three held since, each 24 / ln 2 x (1 - 1/2) hours.
        past = 4 * 3600 * 0.5 ** (1 + 1.5 / 24)
        assert found.usage == pytest.approx(past + 3 * day / log(2) * 0.5, rel=1e-3)
        assert found.held == 3
    (share,) = session.scalars(select(Share))
    assert share.as_of == pytest.approx(now, abs=60)


# Nodes


def test_a_node_that_fell_silent_gets_nothing_until_it_is_heard_again(session: Session) -> None:
    node = make.node(session)
    make.job(session)
    node.heartbeat_at -= nodes.DEAD_AFTER.total_seconds()
    session.flush()
    assert scheduler.tick(session) == []
    assert [status.is_alive for status in nodes.listing(session)] == [False]
    nodes.heartbeat(session, "node-1")
    assert len(scheduler.tick(session)) == 1


def test_a_draining_node_gets_nothing_until_it_registers_again(session: Session) -> None:
    make.node(session)
    make.job(session)
    nodes.drain(session, "node-1")
    assert scheduler.tick(session) == []
    make.node(session)
    assert len(scheduler.tick(session)) == 1


def test_a_living_nodes_name_is_nobody_elses(session: Session) -> None:
    make.node(session, holder="one")
    make.job(session)
    with pytest.raises(InUse, match=r"'node-1'.* 15 s"):
        make.node(session, holder="two", num_slots=8)
    for change in (nodes.heartbeat, nodes.drain):
        with pytest.raises(NotFound):
            change(session, "node-1", holder="two")
    nodes.heartbeat(session, "node-1", holder="one")
    assert [placement.slots for placement in scheduler.tick(session)] == [(0,)]
    # What was killed begins again at once, as what it was.
    assert make.node(session, holder="one", num_slots=3).num_slots == 3


def test_the_name_of_a_node_that_is_silent_is_free(session: Session) -> None:
    make.node(session, holder="one").heartbeat_at -= nodes.DEAD_AFTER.total_seconds() + 1
    session.flush()
    assert make.node(session, holder="two", num_slots=5).num_slots == 5
    with pytest.raises(NotFound):
        nodes.heartbeat(session, "node-1", holder="one")


def test_a_node_that_comes_back_smaller_keeps_held_slots_until_they_are_free(session: Session) -> None:
    make.node(session, num_slots=3)
    job = make.job(session, state=S.RUNNING, slots=3)
    make.node(session, num_slots=2)
    assert len(nodes.listing(session)[0].slots) == 3
    jobs.move(session, job.id, S.SUCCEEDED)
    make.job(session, slots=3)
    make.job(session, slots=2, priority=-1)
    assert [placement.slots for placement in scheduler.tick(session)] == [(0, 1)]
    make.node(session, num_slots=2)
    assert len(session.scalars(select(Slot)).all()) == 2


def test_registering_wakes_the_scheduler(database: Database, hints: Heard) -> None:
    with database.session() as session:
        make.node(session)
    assert hints.nudges == 1


def test_a_node_that_nobody_knows_cannot_beat(session: Session) -> None:
    with pytest.raises(NotFound, match="node-9"):
        nodes.heartbeat(session, "node-9")


def test_a_node_that_is_gone_for_good_is_counted_on_no_longer(session: Session) -> None:
    day = 24 * 60 * 60
    make.node(session, "gone", num_slots=8, device="cuda").heartbeat_at -= day + 1
    make.node(session, "down", num_slots=4).heartbeat_at -= day - 60
    make.node(session, "holds", num_slots=2, device="cuda").heartbeat_at -= day + 1
    job = make.job(session, state=S.RUNNING, node="holds")
    session.flush()
    assert nodes.forget(session) == ["gone"]
    assert {slot.node for slot in session.scalars(select(Slot))} == {"down", "holds"}
    jobs.move(session, job.id, S.FAILED)
    assert nodes.forget(session) == ["holds"]
    assert (nodes.cluster(session).device, nodes.cluster(session).largest_node) == ("cpu", 4)


def test_the_cluster_is_what_its_best_kind_of_node_offers(session: Session) -> None:
    assert nodes.cluster(session).largest_node is None
    make.node(session, "cpus", num_slots=64)
    assert (nodes.cluster(session).device, nodes.cluster(session).largest_node) == ("cpu", 64)
    make.node(session, "gpus", num_slots=8, device="cuda", slot_memory_bytes=80 * 2**30, slot_peak_flops=1e15)
    facts = nodes.cluster(session)
    assert (facts.device, facts.largest_node) == ("cuda", 8)
    assert (facts.slot_memory_bytes, facts.slot_peak_flops) == (80 * 2**30, 1e15)
