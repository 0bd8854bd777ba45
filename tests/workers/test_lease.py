"""Holding on to a job: renewals that reach the gang, wishes that reach the supervisor, and the end of both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Event
from time import monotonic

import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from core import broker, jobs
from core.models import Job
from core.services import Services
from core.settings import Settings
from core.states import JobState
from tests.workers.conftest import place_job
from workers import lease
from workers.lease import Lease
from workers.orders import Orders
from workers.outcome import Wish

DEADLINE_SECONDS = 20


def claim(services: Services, job_id: str) -> Job:
    with services.db.session() as session:
        job = jobs.claim(session, job_id, "this one", services.settings.lease, node="here")
    assert job is not None
    return job


def until(claim: Callable[[], bool]) -> None:
    deadline, pause = monotonic() + DEADLINE_SECONDS, Event()
    while not claim():
        assert monotonic() < deadline
        pause.wait(0.02)


def expires_at(services: Services, job_id: str) -> float:
    with services.db.reading() as session:
        job = session.get(Job, job_id)
    assert job is not None
    assert job.lease_expires_at is not None
    return job.lease_expires_at


def test_each_renewal_is_passed_on_to_the_gang(services: Services) -> None:
    job = claim(services, place_job(services))
    before = expires_at(services, job.id)
    beats: list[float] = []

    with Lease(services, job, Orders(), claimed_at=monotonic()) as held:
        held.feed(lambda: beats.append(expires_at(services, job.id)))
        until(lambda: len(beats) >= 3)

    assert before < beats[0] < beats[1] < beats[2]


def test_a_renewal_that_took_too_long_is_kept_from_the_gang(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = claim(services, place_job(services))
    held = Lease(services, job, Orders(), claimed_at=monotonic())
    beats: list[str] = []
    held.feed(lambda: beats.append("beat"))
    times = iter([100.0, 100.0 + 0.25 * services.settings.lease_seconds])
    monkeypatch.setattr(lease, "monotonic", lambda: next(times))

    assert held.renew(), "the row is renewed all the same"
    assert beats == []


@pytest.mark.parametrize(("state", "wish"), [(JobState.CANCELLING, Wish.CANCEL), (JobState.PAUSING, Wish.PAUSE)])
def test_a_wish_in_the_row_is_heard_at_the_next_renewal(services: Services, state: JobState, wish: Wish) -> None:
    job = claim(services, place_job(services))
    orders = Orders()
    with services.db.session() as session:
        jobs.move(session, job.id, state)

    with Lease(services, job, orders, claimed_at=monotonic()):
        assert orders.wait(DEADLINE_SECONDS) is wish


def taken_back(session: Session, job_id: str) -> None:
    """As when the clock was set forward, and the lease seemed to be over."""
    jobs.lose(session, job_id, fence=1, reason="silent", max_losses=5)


def cancelled(session: Session, job_id: str) -> None:
    jobs.move(session, job_id, JobState.CANCELLING)


@pytest.mark.parametrize(("news", "wish"), [(cancelled, Wish.CANCEL), (taken_back, Wish.LOST)])
def test_the_bell_brings_a_wish_or_a_loss_long_before_the_next_renewal(
    services: Services, news: Callable[[Session, str], None], wish: Wish
) -> None:
    settings = Settings(data_dir=services.settings.data_dir, lease_seconds=600, node_name="here")
    orders = Orders()
    with broker.running(settings), Services(settings) as rung:
        job = claim(rung, place_job(rung))
        renewed = Event()
        held = Lease(rung, job, orders, claimed_at=monotonic())
        held.feed(renewed.set)
        with held:
            assert renewed.wait(DEADLINE_SECONDS)
            with rung.db.session() as session:
                news(session, job.id)

            assert orders.wait(DEADLINE_SECONDS) is wish


def test_a_job_that_somebody_else_took_is_lost(services: Services) -> None:
    job = claim(services, place_job(services))
    orders = Orders()
    with services.db.session() as session:
        jobs.lose(session, job.id, fence=1, reason="silent", max_losses=5)

    with Lease(services, job, orders, claimed_at=monotonic()):
        assert orders.wait(DEADLINE_SECONDS) is Wish.LOST


def test_a_database_that_stays_away_past_the_lease_is_a_lost_lease_and_a_shorter_absence_is_not(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = claim(services, place_job(services))
    orders, away, tried, beats = Orders(), Event(), Event(), Event()
    session = services.db.session

    def maybe_away() -> AbstractContextManager[Session]:
        if away.is_set():
            tried.set()
            raise OperationalError("select", {}, Exception("it is away"))
        return session()

    monkeypatch.setattr(services.db, "session", maybe_away)

    with Lease(services, job, orders, claimed_at=monotonic()) as held:
        held.feed(beats.set)
        away.set()
        assert tried.wait(DEADLINE_SECONDS)
        beats.clear()
        away.clear()
        assert beats.wait(DEADLINE_SECONDS)
        assert orders.wait(0) is None

        away.set()
        assert orders.wait(DEADLINE_SECONDS) is Wish.LOST
