"""What was left undone is done again: by the rows, however often, and by however many."""

from __future__ import annotations

from threading import Event, Thread

import pytest
from sqlalchemy import select, update

from core import jobs, projects
from core.db import Database
from core.keys import DEFAULT_PROJECT, Account
from core.models import AuditLog, Job, Slot, database_now
from core.services import Services
from core.states import JobState
from tests import make
from tests.fakes.hints import Heard
from tests.workers.conftest import place_job
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
