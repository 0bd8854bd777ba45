"""Whose runs make way for a job of higher priority, and what becomes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy.orm import Session

from core import events, jobs, projects, scheduler
from core.forecast import Running
from core.keys import DEFAULT_PROJECT, Account
from core.placing import Host, Waiting
from core.preemption import making_way
from core.states import JobState
from tests import make

S = JobState


def run(
    name: str, slots: int = 1, *, node: str = "a", priority: int = 0, whose: str = "any", **fields: object
) -> Running:
    made = Running(node, tuple(range(slots)), "p", job_id=name, priority=priority, preemption=whose)
    return replace(made, **fields)  # type: ignore[arg-type]


def host(name: str = "a", free: int = 0) -> Host:
    return Host(name, "cpu", 4, tuple(range(4 - free, 4)))


def chosen(needs: int, *running: Running, priority: int = 1, project: str = "p", hosts: tuple[Host, ...] = (host(),)):  # type: ignore[no-untyped-def]
    found = making_way(Waiting("urgent", needs, priority=priority, project=project), hosts, running)
    return None if found is None else [one.job_id for one in found]


def test_the_lowest_priority_makes_way_and_of_equals_what_began_last() -> None:
    runs = (run("old", started_at=1.0), run("young", started_at=2.0), run("low", priority=-1, started_at=0.0))
    assert chosen(1, *runs) == ["low"]
    assert chosen(2, *runs) == ["low", "young"]


def test_no_more_are_stopped_than_are_needed() -> None:
    assert chosen(3, run("small", priority=-1), run("large", 3)) == ["large"]
    assert chosen(2, run("one"), run("two"), hosts=(host(free=1),)) in (["one"], ["two"])


def test_the_host_where_it_costs_least_is_chosen() -> None:
    hosts = (host("a"), host("b"))
    assert chosen(2, run("a", 4), run("b", 2, node="b"), hosts=hosts) == ["b"]
    assert chosen(2, run("a", 4, priority=-1), run("b", 2, node="b"), hosts=hosts) == ["a"]


@pytest.mark.parametrize(
    ("running", "project", "stops"),
    [
        pytest.param(run("r", 4, whose="never"), "p", None, id="its project lets nobody"),
        pytest.param(run("r", 4, whose="own"), "p", ["r"], id="its own project's job may"),
        pytest.param(run("r", 4, whose="own"), "q", None, id="another's may not"),
        pytest.param(run("r", 4, whose="any"), "q", ["r"], id="anybody may"),
        pytest.param(run("r", 4, priority=1), "p", None, id="one of the same priority never does"),
        pytest.param(run("r", 4, is_stopping=True), "p", [], id="what it needs is on its way"),
    ],
)
def test_a_run_makes_way_where_its_project_lets_it(running: Running, project: str, stops: list[str] | None) -> None:
    assert chosen(4, running, project=project) == stops


def test_a_run_is_told_once_and_keeps_its_slots_until_its_state_is_saved(session: Session, owner: Account) -> None:
    make.node(session, num_slots=2)
    projects.change(session, owner, DEFAULT_PROJECT, {"preemption": "own"})
    low = make.job(session, state=S.RUNNING, slots=2, created_at=1.0)
    late = make.job(session, created_at=2.0)
    urgent = make.job(session, slots=2, priority=1, created_at=3.0)
    for _ in range(2):
        assert scheduler.tick(session) == []
    session.refresh(low)
    session.refresh(urgent)
    assert (low.state, low.makes_way) == (S.RUNNING, True)
    told = [event.message for event in events.since(session, low.id, 1)]
    assert told == ["makes way for a job of higher priority: saves its state and goes back to the queue"]
    assert (
        urgent.queue_reason == "needs 2 slots, 0 are free; runs of lower priority save their state and make way for it"
    )

    jobs.requeue(session, low.id, fence=1, reason="makes way for a job of higher priority")
    assert [placement.job_id for placement in scheduler.tick(session)] == [urgent.id]
    session.refresh(low)
    assert (low.state, low.makes_way, low.losses, low.retry_at) == (S.QUEUED, False, 0, None)
    # Not behind who came after it.
    assert [scheduler.position(session, job) for job in (low, late)] == [1, 2]


def test_what_nobody_has_claimed_yet_makes_way_at_once(session: Session, owner: Account) -> None:
    make.node(session, num_slots=1)
    projects.change(session, owner, DEFAULT_PROJECT, {"preemption": "any"})
    low = make.job(session, created_at=1.0)
    scheduler.tick(session)
    urgent = make.job(session, priority=1)
    assert scheduler.tick(session) == []
    assert jobs.find(session, low.id).state is S.QUEUED
    assert [placement.job_id for placement in scheduler.tick(session)] == [urgent.id]


def test_without_leave_nobody_is_stopped(session: Session) -> None:
    make.node(session, num_slots=1)
    low = make.job(session, state=S.RUNNING)
    make.job(session, priority=100)
    scheduler.tick(session)
    session.refresh(low)
    assert not low.makes_way


def test_who_has_run_for_its_time_goes_behind_those_that_wait(session: Session) -> None:
    make.node(session, num_slots=1)
    first = make.job(session, state=S.RUNNING, created_at=1.0)
    second = make.job(session, created_at=2.0)
    jobs.requeue(session, first.id, fence=1, reason="it ran for its time", to_the_end=True)
    scheduler.tick(session)
    assert jobs.find(session, second.id).state is S.STARTING
    assert jobs.find(session, first.id).state is S.QUEUED
