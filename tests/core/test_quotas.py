"""What a project uses is counted from rows, and what is beyond its quotas waits, is paused, or is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from core import files, jobs, projects, quotas, scheduler
from core.db import Database
from core.errors import QuotaExceeded
from core.keys import DEFAULT_PROJECT, Account
from core.models import Artifact, File, Holding, Job
from core.placing import Host, Waiting, decide
from core.quotas import Allowance
from core.settings import Settings
from core.states import JobState
from core.storage import Storage
from tests import make
from tests.core.test_races import at_once

S = JobState


def at(*when: int) -> float:
    return datetime(*when, tzinfo=UTC).timestamp()  # type: ignore[arg-type]


def hold(
    session: Session, slots: int, started_at: float, ended_at: float | None, project: str = DEFAULT_PROJECT
) -> None:
    session.add(Holding(project_id=project, slots=slots, started_at=started_at, ended_at=ended_at))
    session.flush()


# Counting


def test_gpu_hours_are_the_hours_of_each_slot_in_this_month(session: Session) -> None:
    make.project(session, "proj-other")
    now = at(2026, 3, 1, 2)
    hold(session, 2, at(2026, 3, 1, 0, 30), at(2026, 3, 1, 1, 30))
    hold(session, 4, at(2026, 2, 28, 23), at(2026, 3, 1, 0, 15))
    hold(session, 1, at(2026, 3, 1, 1), None)
    hold(session, 8, at(2026, 2, 1), at(2026, 2, 28))
    hold(session, 1, at(2026, 3, 1, 0), at(2026, 3, 1, 1), project="proj-other")
    # 2 x 1 h, 4 x 15 min of this month, 1 x 1 h so far.
    assert quotas.gpu_hours(session, [DEFAULT_PROJECT], now=now) == {DEFAULT_PROJECT: pytest.approx(4.0)}
    assert quotas.month_begin(at(2026, 12, 31, 23, 59)) == at(2026, 12, 1)


def test_a_job_holds_its_slots_from_when_it_is_placed_until_it_gives_them_back(
    session: Session, owner: Account
) -> None:
    make.node(session, num_slots=4)
    job_id = make.job(session, slots=3).id
    (placed,) = scheduler.tick(session)
    (holding,) = session.scalars(select(Holding))
    assert (holding.job_id, holding.project_id, holding.slots) == (job_id, DEFAULT_PROJECT, len(placed.slots))
    assert holding.ended_at is None
    assert quotas.usage(session, [DEFAULT_PROJECT])[DEFAULT_PROJECT].concurrent_jobs == 1
    jobs.cancel(session, owner, job_id)
    session.refresh(holding)
    assert holding.ended_at is not None
    assert 0 <= holding.ended_at - holding.started_at < 60
    assert quotas.usage(session, [DEFAULT_PROJECT])[DEFAULT_PROJECT].concurrent_jobs == 0


def test_storage_is_files_checkpoints_and_results(session: Session) -> None:
    make.project(session, "proj-other")
    make.file(session, bytes=1000)
    make.file(session, "file-other", bytes=5, project_id="proj-other")
    job = make.job(session)
    make.checkpoint(session, job, 10, bytes=200)
    session.add(Artifact(job_id=job.id, path="a", kind="model", bytes=30, sha256="0" * 64, storage_key="a"))
    session.flush()
    assert quotas.storage_bytes(session, [DEFAULT_PROJECT, "proj-other"]) == {DEFAULT_PROJECT: 1230, "proj-other": 5}


# Scheduling


def test_a_job_that_its_project_keeps_back_waits_and_keeps_nobody_else_waiting() -> None:
    hosts = [Host("a", "cpu", 4, (0, 1, 2, 3))]
    waiting = [Waiting("large", 4, project="full"), Waiting("spent", 1, project="spent"),
               *(Waiting(f"j{number}", 1, project="two") for number in range(3)), Waiting("free", 1)]  # fmt: skip
    allowances = {"full": Allowance(jobs=0, at_once=1), "spent": Allowance(hours_spent=10.0),
                  "two": Allowance(jobs=2, at_once=2)}  # fmt: skip
    decision = decide(waiting, hosts, allowances)
    assert [placement.job_id for placement in decision.placements] == ["j0", "j1", "free"]
    assert decision.reasons == {
        "large": "the project runs as many jobs at once as it may, 1",
        "spent": "the project has used its 10 GPU-hours of this month",
        "j2": "the project runs as many jobs at once as it may, 2",
    }


def test_the_scheduler_runs_no_more_of_a_project_at_once_than_it_may(session: Session, owner: Account) -> None:
    make.node(session, num_slots=4)
    make.project(session, "proj-other")
    projects.change(session, owner, DEFAULT_PROJECT, {"concurrent_jobs": 1})
    first, second = (make.job(session, created_at=float(number)).id for number in range(2))
    theirs = make.job(session, project_id="proj-other", created_at=3.0).id
    assert [placement.job_id for placement in scheduler.tick(session)] == [first, theirs]
    assert jobs.find(session, second).queue_reason == "the project runs as many jobs at once as it may, 1"
    jobs.cancel(session, owner, first)
    assert [placement.job_id for placement in scheduler.tick(session)] == [second]


# Hours used up


def test_hours_that_are_used_up_refuse_new_jobs_keep_back_queued_ones_and_pause_running_ones(
    session: Session, owner: Account, settings: Settings
) -> None:
    make.node(session, num_slots=4)
    make.file(session)
    running = make.job(session, state=S.RUNNING).id
    unclaimed = make.job(session, state=S.STARTING, holder=None, attempt=0).id
    queued = make.job(session).id
    projects.change(session, owner, DEFAULT_PROJECT, {"gpu_hours": 1.0})
    assert jobs.pause_spent(session) == []
    now = datetime.now(UTC)
    begin = datetime(now.year, now.month, 1, tzinfo=UTC)
    # Two hours of slots in a second: whatever the day of the month.
    hold(session, 7200, begin.timestamp(), (begin + timedelta(seconds=1)).timestamp())
    assert {job.id: job.state for job in jobs.pause_spent(session)} == {running: S.PAUSING, unclaimed: S.PAUSED}
    assert jobs.pause_spent(session) == []
    assert scheduler.tick(session) == []
    assert jobs.find(session, queued).queue_reason == "the project has used its 1 GPU-hours of this month"
    with pytest.raises(QuotaExceeded, match=r"used 2\.\d\d of its 1 GPU-hours"):
        make.submitted(session, owner, make.spec(), settings=settings)
    projects.change(session, owner, DEFAULT_PROJECT, {"gpu_hours": None})
    assert make.submitted(session, owner, make.spec(), settings=settings).state is S.QUEUED
    jobs.resume(session, owner, unclaimed)
    assert len(scheduler.tick(session)) == 3


# Storage used up


def test_of_two_uploads_at_once_that_do_not_both_fit_one_is_kept(
    database: Database, storage: Storage, owner: Account
) -> None:
    line = b"To be, or not to be.\n"
    with database.session() as session:
        projects.change(session, owner, DEFAULT_PROJECT, {"storage_bytes": 3 * len(line)})

    def upload(session: Session) -> File:
        session.rollback()
        chunks = iter([line, line])
        return files.create(
            database, storage, owner, filename="a.txt", purpose="pretrain", chunks=chunks, max_bytes=10**6
        )

    outcomes = at_once(database, upload, upload, upload)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["File", "QuotaExceeded", "QuotaExceeded"]
    with database.reading() as session:
        kept = session.scalars(select(File)).all()
        assert quotas.storage_left(session, DEFAULT_PROJECT) == len(line)
    assert [stored.key for stored in storage.list("files")] == [file.storage_key for file in kept]


def test_an_upload_is_refused_as_soon_as_it_is_too_much(database: Database, storage: Storage, owner: Account) -> None:
    with database.session() as session:
        projects.change(session, owner, DEFAULT_PROJECT, {"storage_bytes": 10})
    taken = []

    def chunks():  # type: ignore[no-untyped-def]
        for number in range(100):
            taken.append(number)
            yield b"abcd\n"

    with pytest.raises(QuotaExceeded, match="may store 10 bytes, of which 10 are left"):
        files.create(database, storage, owner, filename="a", purpose="pretrain", chunks=chunks(), max_bytes=10**6)
    assert taken == [0, 1, 2]
    assert list(storage.list("files")) == []


def test_a_project_that_is_over_its_storage_gets_no_new_job(
    session: Session, owner: Account, settings: Settings
) -> None:
    make.file(session, bytes=1000)
    projects.change(session, owner, DEFAULT_PROJECT, {"storage_bytes": 1000})
    with pytest.raises(QuotaExceeded, match="may store 1,000 bytes"):
        make.submitted(session, owner, make.spec(), settings=settings)
    assert session.scalars(select(Job)).all() == []
