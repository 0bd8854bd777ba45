"""What was left undone is done again: by the rows, however often, and by however many."""

from __future__ import annotations

from threading import Event, Thread

import pytest
from sqlalchemy import select, update

from core import jobs, projects, scheduler
from core.db import Database
from core.keys import DEFAULT_PROJECT, Account
from core.models import AuditLog, Job, Slot, database_now
from core.services import Services
from core.states import JobState
from tests import make
from tests.fakes.hints import Heard
from tests.workers.conftest import place_job
from workers.clock import Clock
from workers.orders import Orders
from workers.outcome import Wish
from workers.upkeep import Duty, Upkeep

DEADLINE_SECONDS = 20


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def upkeep(services: Services, heard: Heard) -> Upkeep:
    services.db.close()
    services.db = Database(services.settings.database, hints=heard)
    return Upkeep(services)


def claimed_and_silent(services: Services, state: JobState) -> str:
    """A job in `state` whose holder has not been heard for longer than its lease."""
    job_id = place_job(services)
    with services.db.session() as session:
        jobs.claim(session, job_id, "somebody", services.settings.lease, node="here")
        jobs.move(session, job_id, JobState.RUNNING)
        if state is not JobState.RUNNING:
            jobs.move(session, job_id, state)
        session.execute(update(Job).where(Job.id == job_id).values(lease_expires_at=database_now() - 1))
    return job_id


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (JobState.RUNNING, JobState.QUEUED),
        (JobState.CANCELLING, JobState.CANCELLED),
        (JobState.PAUSING, JobState.PAUSED),
    ],
)
def test_a_job_without_a_living_supervisor_goes_where_it_was_going(
    services: Services, upkeep: Upkeep, before: JobState, after: JobState
) -> None:
    job_id = claimed_and_silent(services, before)

    upkeep.reclaim()

    with services.db.reading() as session:
        assert session.get_one(Job, job_id).state is after
        assert session.scalars(select(Slot).where(Slot.job_id == job_id)).all() == []


HOUR = 3600.0


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_clock_that_is_set_costs_no_job_its_attempt(
    services: Services, upkeep: Upkeep, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    job_id = claimed_and_silent(services, JobState.RUNNING)
    with services.db.session() as session:
        # As far in the future or in the past as the clock was set.
        session.execute(update(Job).where(Job.id == job_id).values(lease_expires_at=database_now() + 1 - jump))
    looks = iter([True, False])
    monkeypatch.setattr(Clock, "was_set", lambda *_, **__: next(looks))

    upkeep.reclaim()

    with services.db.reading() as session:
        assert session.get_one(Job, job_id).state is JobState.RUNNING
        # It ends all the same, should nobody renew it.
        latest = database_now() + scheduler.CLAIM_WITHIN.total_seconds() + 1
        assert session.scalar(select(Job.lease_expires_at < latest).where(Job.id == job_id))

    upkeep.trusts_leases_at = 0.0
    with services.db.session() as session:
        session.execute(update(Job).where(Job.id == job_id).values(lease_expires_at=database_now() - 1))
    upkeep.reclaim()
    with services.db.reading() as session:
        assert session.get_one(Job, job_id).state is JobState.QUEUED


def test_a_wait_after_a_loss_is_no_longer_because_a_clock_was_set_back(services: Services, upkeep: Upkeep) -> None:
    job_id = place_job(services, state=JobState.QUEUED, node=None, retry_at=database_now() + HOUR)
    upkeep.reclaim()
    with services.db.reading() as session:
        assert session.scalar(select(Job.retry_at <= database_now()).where(Job.id == job_id))


@pytest.mark.parametrize(
    ("looks", "set_at_last"),
    [
        ([(100.0, 0.0, 0.0)], False),
        ([(100.0, 0.0, 0.0), (110.5, 10.0, 10.1)], False),
        ([(100.0, 0.0, 0.0), (110.0, 10.0, 60.0), (170.0, 70.0, 70.1)], False),
        ([(100.0, 0.0, 0.0), (3710.0, 10.0, 10.1)], True),
        ([(100.0, 0.0, 0.0), (-3490.0, 10.0, 10.1)], True),
        ([(100.0, 0.0, 0.0), (3710.0, 10.0, 10.1), (3720.0, 20.0, 20.1)], False),
    ],
    ids=["first", "slewed", "a slow answer", "forward", "back", "told once"],
)
def test_a_clock_was_set_when_it_went_another_way_than_a_monotonic_one(
    looks: list[tuple[float, float, float]], set_at_last: bool
) -> None:
    clock = Clock()
    assert [clock.was_set(at, asked=asked, answered=answered) for at, asked, answered in looks][-1] is set_at_last


def test_a_start_that_nobody_claimed_is_sent_again(services: Services, upkeep: Upkeep, heard: Heard) -> None:
    job_id = place_job(services)
    claimed_and_silent(services, JobState.RUNNING)

    upkeep.resend()

    assert heard.starts == [(job_id, "here")]


def test_a_queued_job_is_placed_without_any_message(services: Services, upkeep: Upkeep, heard: Heard) -> None:
    with services.db.session() as session:
        make.file(session)
        job_id = make.job(session).id

    upkeep.tick()

    with services.db.reading() as session:
        assert session.get_one(Job, job_id).state is JobState.STARTING
    assert heard.starts == [(job_id, "here")]


def test_a_duty_that_fails_does_not_keep_the_others_from_theirs(services: Services) -> None:
    upkeep, orders, done = Upkeep(services), Orders(), Event()

    def fail() -> None:
        raise RuntimeError("the database is away")

    upkeep.duties = (Duty("fails", 0.01, fail), Duty("works", 0.01, done.set))
    thread = Thread(target=upkeep.run, args=(orders,))
    thread.start()
    try:
        for _ in range(3):
            done.clear()
            assert done.wait(DEADLINE_SECONDS)
    finally:
        orders.give(Wish.DRAIN)
        thread.join(DEADLINE_SECONDS)

    assert not thread.is_alive()


def test_all_jobs_of_an_archived_project_end_some_a_transaction_in_the_name_of_who_archived_it(
    services: Services, upkeep: Upkeep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "CANCELLED_AT_ONCE", 2)
    admin = Account(DEFAULT_PROJECT, "key-admin", frozenset({"admin"}))
    with services.db.session() as session:
        project = make.project(session).id
        other = make.job(session).id
        ours = {make.job(session, project_id=project).id for _ in range(5)}
    with services.db.session() as session:
        projects.archive(session, admin, project)
        assert len(jobs.cancel_all(session, admin, project)) == 2

    upkeep.close()

    with services.db.reading() as session:
        states = {job.id: job.state for job in session.scalars(select(Job))}
        entries = session.scalars(select(AuditLog).where(AuditLog.action == "job.cancelled")).all()
    assert {states[id_] for id_ in ours} == {JobState.CANCELLED}
    assert states[other] is JobState.QUEUED
    assert {(entry.object_id, entry.actor_key_id) for entry in entries} == {(id_, "key-admin") for id_ in ours}
