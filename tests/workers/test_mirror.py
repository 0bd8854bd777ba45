"""What Weights & Biases is told of a job: every number once, by a process of its own, and only where there is a key."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core import jobs
from core.models import Job
from core.services import Services
from core.settings import Settings
from core.states import JobState
from engine.events import Evaluated
from tests import fetched, make
from workers import mirror

INTEGRATIONS = [{"type": "wandb", "wandb": {"project": "p", "tags": ["t"]}}]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def services(settings: Settings, no_broker: None) -> Iterator[Services]:
    with Services(settings) as services:
        yield services


class Told:
    """A run that remembers; what is known of it, `step`, is given."""

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.said: list[tuple[int, dict[str, Any]]] = []
        self.ended: list[Any] = []

    def log(self, data: dict[str, Any], step: int) -> None:
        self.said.append((step, data))

    def mark_preempting(self) -> None:
        self.ended.append("goes on")

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


def running(services: Services) -> Job:
    with services.db.session() as session:
        spec = make.spec().model_dump(mode="json", by_alias=True, exclude_unset=True) | {"integrations": INTEGRATIONS}
        job = make.job(session, state=JobState.RUNNING, spec=spec)
        steps = [make.step(number, loss=number / 4) for number in (1, 2)]
        validation = Evaluated(seq=3, step=2, loss=0.75, token_accuracy=0.5, tokens=9, is_best=True)
        jobs.record(session, job.id, fence=1, events=[*steps, validation])
    return job


def end(services: Services, job: Job, state: JobState) -> None:
    with services.db.session() as session:
        jobs.move(session, job.id, state, fence=1)


def told(services: Services, job: Job, *runs: Told) -> None:
    mirror.mirror(services, job.id, 1, open_=lambda _: runs)


def test_every_number_is_told_once_and_how_it_ended(services: Services) -> None:
    job, run = running(services), Told()
    end(services, job, JobState.SUCCEEDED)
    told(services, job, run)
    assert [step for step, _ in run.said] == [1, 2, 2]
    assert [data.get("train_loss") for _, data in run.said] == [0.25, 0.5, None]
    assert run.said[2][1]["full_valid_loss"] == 0.75
    assert "is_best" not in run.said[2][1]
    assert run.ended == [0]


def test_a_later_attempt_tells_what_the_run_has_not_been_told(services: Services) -> None:
    job, run = running(services), Told(step=2)
    end(services, job, JobState.FAILED)
    told(services, job, run)
    assert [step for step, _ in run.said] == [2, 2]
    assert run.ended == [1]


def test_a_run_of_a_job_that_will_go_on_says_so(services: Services) -> None:
    job, run = running(services), Told()
    with services.db.session() as session:
        jobs.requeue(session, job.id, fence=1, reason="the host goes down")
    told(services, job, run)
    assert run.ended == ["goes on", 1]


def test_without_a_key_or_a_wish_nothing_is_started(services: Services, settings: Settings) -> None:
    with_key = settings.model_copy(update={"wandb_api_key": "k" * 40})
    with services.db.session() as session:
        wishless = make.job(session, state=JobState.RUNNING)
    assert not mirror.start(settings, running(services))
    assert not mirror.start(with_key, wishless)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite"])
def test_their_package_writes_it_down_where_it_is_offline(
    services: Services, settings: Settings, kind: str, tmp_path: Path
) -> None:
    folder = fetched.packages("wandb==0.31.0", dependencies=True)
    job = running(services)
    environment = settings.environment() | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "WANDB_MODE": "offline", "HOME": str(tmp_path),
        "TRAINSHED_WANDB_API_KEY": "k" * 40, "PATH": os.environ["PATH"], "DATABASE_URL": settings.database,
    }  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "workers.mirror", job.id, "1"], env=environment, cwd=tmp_path)
    try:
        end(services, job, JobState.SUCCEEDED)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    (written,) = (settings.data_dir / "wandb").rglob(f"offline-run-*/run-{job.id}.wandb")
    said = written.read_bytes()
    for word in (b"train_loss", b"0.25", b"full_valid_loss", b"0.75", job.id.encode()):
        assert word in said
