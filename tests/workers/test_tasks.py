"""What a message sets off, however often it comes."""

from __future__ import annotations

import sys
from threading import Event
from time import monotonic

import psutil
import pytest
from sqlalchemy import update

from core import jobs
from core.models import Job
from core.services import Services
from tests.workers.conftest import place_job
from workers import tasks

DEADLINE_SECONDS = 30


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch, services: Services) -> None:
    """Starts what stays until it is killed, in the place of a supervisor that has not come as far as its claim."""
    monkeypatch.setattr(tasks, "SUPERVISOR", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(tasks, "services", lambda: services)


def started(services: Services, job_id: str) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if job_id in command_line(child)]


def command_line(child: psutil.Process) -> list[str]:
    """Which the kernel writes down a moment after the program has begun, and forgets when it has ended."""
    deadline, pause = monotonic() + DEADLINE_SECONDS, Event()
    while not (said := child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
        assert monotonic() < deadline
        pause.wait(0.001)
    return said


def test_however_often_a_start_is_sent_one_supervisor_is_on_its_way(services: Services) -> None:
    job_id = place_job(services)
    for _ in range(3):
        tasks.run_job(job_id)
    (first,) = started(services, job_id)

    first.kill()
    deadline, pause = monotonic() + DEADLINE_SECONDS, Event()
    while started(services, job_id):
        assert monotonic() < deadline
        pause.wait(0.01)
    tasks.run_job(job_id)
    (second,) = started(services, job_id)
    second.kill()


def test_nobody_is_started_for_a_job_that_is_claimed_or_was_placed_elsewhere(services: Services) -> None:
    claimed, elsewhere = place_job(services), place_job(services)
    with services.db.session() as session:
        jobs.claim(session, claimed, "somebody", services.settings.lease, node="here")
        session.execute(update(Job).where(Job.id == elsewhere).values(node="there"))
    for job_id in (claimed, elsewhere, "job-of-nobody"):
        tasks.run_job(job_id)
        assert not started(services, job_id)
