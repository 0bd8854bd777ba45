"""A job that is deleted: nothing of it is left, and nothing goes that others need."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import Any

import pytest
from sqlalchemy import func, select
from structlog.testing import capture_logs

from core import events, jobs, metrics, removal, result_files
from core.db import Database
from core.errors import InUse, NotFound
from core.keys import DEFAULT_PROJECT, Account
from core.models import Artifact, Base, CheckpointPermission, Holding, Job, JobEvent, Metric, Removal, new_id
from core.services import Services
from core.settings import Settings
from core.states import TERMINAL, JobState
from tests import make
from tests.core.conftest import waits_or_is_done
from workers import expiry
from workers.expiry import Expiry

OWNER = Account(key_id="key-1", project_id=DEFAULT_PROJECT, scopes=frozenset({"read", "submit"}))


@pytest.fixture
def services(settings: Settings, no_broker: None) -> Iterator[Services]:
    with Services(settings) as services:
        yield services


def job(services: Services, state: JobState = JobState.SUCCEEDED, **columns: Any) -> str:
    with services.db.session() as session:
        return make.job(session, state=state, **columns).id


def remove(services: Services, job_id: str, **options: Any) -> None:
    with services.db.session() as session:
        removal.remove(session, services, OWNER, job_id, **options)


def full(services: Services) -> str:
    """A job with something in each place where a job can leave something."""
    job_id = job(services, name="full", labels={"team": "a"})
    prefix = f"jobs/{job_id}/1"
    with services.db.session() as session:
        row = session.get_one(Job, job_id)
        make.checkpoint(session, row, 2)
        session.add(Metric(job_id=job_id, name="loss", step=1, value=1.0))
        artifact = {"path": "model/config.json", "kind": "model", "bytes": 2, "sha256": ""}
        session.add(Artifact(job_id=job_id, storage_key=f"{prefix}/artifacts/model/config.json", **artifact))
        for name in ("full-1", "named-by-hand"):
            source = f"storage:{prefix}/artifacts/model"
            make.model(session, name, project_id=DEFAULT_PROJECT, job_id=job_id, source=source)
        row.result_model = "full-1"
        make.file(session, result_files.file_id(job_id), purpose=result_files.PURPOSE, storage_key=f"{prefix}/r.csv")
        make.node(session, num_slots=1)
        session.add(Holding(project_id=DEFAULT_PROJECT, job_id=job_id, slots=2, started_at=0.0, ended_at=3600.0))
    for path in ("checkpoints/step-00000002/manifest.json", "artifacts/model/config.json", "r.csv"):
        services.storage.put_bytes(f"{prefix}/{path}", b"{}")
    services.storage.put_bytes(f"jobs/{job_id}/logs/1/rank-0.log", b"x")
    return job_id


def rows(db: Database) -> dict[str, int]:
    with db.reading() as session:
        tables = Base.metadata.sorted_tables
        return {table.name: session.scalar(select(func.count()).select_from(table)) or 0 for table in tables}


def test_nothing_is_left_of_a_job_but_what_it_used_and_who_deleted_it(services: Services) -> None:
    with services.db.session() as session:
        make.node(session, num_slots=1)
    before, kept = rows(services.db), job(services)
    services.storage.put_bytes(f"jobs/{kept}/1/r.csv", b"{}")
    beside = {name: count - before[name] for name, count in rows(services.db).items()}
    remove(services, full(services))
    left = {name: count - before[name] - beside[name] for name, count in rows(services.db).items()}
    assert {name: count for name, count in left.items() if count} == {"holdings": 1, "audit_logs": 1}
    assert [stored.key for stored in services.storage.list("jobs")] == [f"jobs/{kept}/1/r.csv"]
    with services.db.reading() as session:
        assert session.scalars(select(Holding.job_id)).all() == [None]


LONG = 40
"""Events, rows of metrics, and packs of points, of a job with a long history."""


def long(services: Services) -> str:
    job_id = full(services)
    with services.db.session() as session:
        for number in range(1, LONG + 1):
            session.add(JobEvent(job_id=job_id, seq=number + 1, attempt=1, type="log", message="", data={}))
            session.add(Metric(job_id=job_id, name="lr", step=1000 + number, value=1.0))
            session.add(metrics.chunk(job_id, "lr", [(number * 2, 1.0), (number * 2 + 1, 2.0)]))
    return job_id


def afterwards(services: Services) -> int:
    found = rows(services.db)
    return sum(found[kind.__tablename__] for kind in removal.AFTERWARDS)


@pytest.mark.parametrize("pieces", [0, 1, 5, 12, 13])
def test_a_long_history_goes_piece_by_piece_and_whoever_is_killed_on_the_way_has_another_go_on(
    services: Services, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    monkeypatch.setattr(removal, "ROWS_AT_ONCE", 10)
    with services.db.session() as session:
        make.node(session, num_slots=1)
    kept, before = job(services), afterwards(services)
    services.storage.put_bytes(f"jobs/{kept}/1/r.csv", b"{}")
    gone = long(services)
    total = afterwards(services) - before

    def killed(*_: object, **__: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        # As soon as it is committed.
        patch.setattr(removal, "go_on", killed)
        with pytest.raises(SystemExit):
            remove(services, gone)
    # Of what is there yet, nothing is shown.
    with services.db.reading() as session:
        with pytest.raises(NotFound):
            jobs.get(session, OWNER, gone)
        assert [one.id for one in jobs.page(session, OWNER).data] == [kept]
        assert session.scalars(select(Removal.job_id)).all() == [gone]
    for _ in range(min(pieces, total // 10)):
        before_piece = afterwards(services)
        assert not removal.go_on(services, gone)
        assert before_piece - afterwards(services) == 10
    if pieces > total // 10:
        with monkeypatch.context() as patch:
            patch.setattr(type(services.storage), "delete_some", killed)
            with pytest.raises(SystemExit):
                removal.go_on(services, gone)

    finish(services)
    assert (afterwards(services), rows(services.db)["removals"]) == (before, 0)
    assert [stored.key for stored in services.storage.list("jobs")] == [f"jobs/{kept}/1/r.csv"]
    with services.db.reading() as session:
        assert [event.message for event in events.since(session, kept, 0)] == ["queued"]


def test_much_content_goes_piece_by_piece_and_no_more_than_one_before_the_answer(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "OBJECTS_AT_ONCE", 3)
    kept, gone = job(services), job(services)
    for job_id, objects in ((kept, 1), (gone, 8)):
        for number in range(objects):
            services.storage.put_bytes(f"jobs/{job_id}/1/checkpoints/step-{number:08d}/manifest.json", b"{}")

    def left() -> tuple[int, int]:
        return len(list(services.storage.list(f"jobs/{gone}"))), rows(services.db)["removals"]

    remove(services, gone)
    assert left() == (5, 1)
    assert not removal.go_on(services, gone)
    assert left() == (2, 1)
    assert removal.go_on(services, gone)
    assert left() == (0, 0)
    assert len(list(services.storage.list("jobs"))) == 1


def test_of_two_that_remove_a_history_at_once_neither_takes_it_for_removed(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "ROWS_AT_ONCE", 10)
    gone = job(services)
    with services.db.session() as session:
        for number in range(1, LONG + 1):
            session.add(JobEvent(job_id=gone, seq=number + 1, attempt=1, type="log", message="", data={}))
    with monkeypatch.context() as patch:
        patch.setattr(removal, "go_on", lambda *_: False)
        remove(services, gone)
    remove_some, second = removal._remove_some, list[Future[bool]]()

    with ThreadPoolExecutor(2) as pool:

        def while_another_comes(*args: Any, **options: Any) -> int:
            removed = remove_some(*args, **options)
            if not second:
                second.append(pool.submit(removal.go_on, services, gone))
                waits_or_is_done(services.db, second[0])
            return removed

        monkeypatch.setattr(removal, "_remove_some", while_another_comes)
        first = pool.submit(removal.go_on, services, gone)
        assert (first.result(timeout=30), second[0].result(timeout=30)) == (False, False)
    assert afterwards(services) == LONG + 1 - 2 * 10
    finish(services)
    assert (afterwards(services), rows(services.db)["removals"]) == (0, 0)
    assert removal.go_on(services, gone), "nothing is left of it"


def test_a_storage_that_does_not_answer_keeps_nobody_from_deleting_and_it_is_tried_again(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = job(services), job(services)
    for job_id in (first, second):
        services.storage.put_bytes(f"jobs/{job_id}/1/r.csv", b"{}")
    real = services.storage.delete_some

    def away(key: str, *, most: int) -> bool:
        if first in key:
            raise OSError("away")
        return real(key, most=most)

    with monkeypatch.context() as patch:
        patch.setattr(services.storage, "delete_some", away)
        remove(services, first)
        remove(services, second)
        finish(services, but=1)
        assert [stored.key for stored in services.storage.list("jobs")] == [f"jobs/{first}/1/r.csv"]
    finish(services)
    assert not [*services.storage.list("jobs")]


def test_what_can_not_be_removed_is_tried_later_and_later_and_told_in_a_line(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, tried, clock = job(services), list[float](), [0.0]

    def away(key: str, *, most: int) -> bool:
        tried.append(clock[0])
        raise OSError("away")

    monkeypatch.setattr(services.storage, "delete_some", away)
    remove(services, gone)
    tried.clear()
    upkeep = Expiry(services)
    monkeypatch.setattr(expiry, "monotonic", lambda: clock[0])
    with capture_logs() as told:
        while clock[0] < 1000:
            upkeep.finish_removals()
            clock[0] += expiry.REMOVE_SECONDS
    # 1 s, 4, 16, 64, 256, 300 (by hand), each at the next look, of which there is one every other second.
    assert tried == [0, 2, 6, 22, 86, 342, 642, 942]
    assert [line.get("exc_info", False) for line in told] == [True] + [False] * 7
    assert {(line["job"], line["error"]) for line in told} == {(gone, "away")}


def finish(services: Services, *, but: int = 0) -> None:
    """What upkeep does again and again, until there is nothing left to remove `but` so many."""
    upkeep, deadline = Expiry(services), monotonic() + 60
    while rows(services.db)["removals"] > but:
        assert monotonic() < deadline, "it was not removed in time"
        upkeep.finish_removals()


@pytest.mark.parametrize("state", sorted(set(JobState) - TERMINAL))
def test_a_job_that_has_not_ended_stays(services: Services, state: JobState) -> None:
    job_id = job(services, state)
    with pytest.raises(InUse, match=f"is {state}; cancel it first"):
        remove(services, job_id)
    with services.db.reading() as session:
        assert session.get(Job, job_id)


def test_a_job_of_another_project_is_not_there(services: Services) -> None:
    with services.db.session() as session:
        other = make.project(session).id
    with pytest.raises(NotFound):
        remove(services, job(services, project_id=other))


@pytest.mark.parametrize("named", ["full-1", "named-by-hand"])
def test_a_job_stays_while_one_that_has_not_ended_starts_from_its_model(services: Services, named: str) -> None:
    job_id, needing = full(services), job(services, JobState.PAUSED, base_model=named, kind="finetune")
    with pytest.raises(InUse, match=f"Job {needing} still needs"):
        remove(services, job_id, force=True)
    assert len(list(services.storage.list(f"jobs/{job_id}"))) == 4


def test_a_job_stays_while_an_adapter_stands_on_its_checkpoint(services: Services) -> None:
    job_id = job(services)
    with services.db.session() as session:
        base = make.checkpoint(session, session.get_one(Job, job_id), 2).id
    on_it = job(services, base_model=base, kind="finetune")
    with services.db.session() as session:
        adapter = {"project_id": DEFAULT_PROJECT, "job_id": on_it, "source": f"adapter:{on_it}:x"}
        make.model(session, "tuned", **adapter)
    with pytest.raises(InUse, match="adapter tuned was trained on"):
        remove(services, job_id, force=True)
    remove(services, on_it)
    remove(services, job_id)


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.SUCCEEDED])
def test_of_a_job_of_another_project_that_stands_on_it_no_more_is_told_than_that(
    services: Services, state: JobState
) -> None:
    job_id = job(services)
    with services.db.session() as session:
        base = make.checkpoint(session, session.get_one(Job, job_id), 2).id
        other = make.project(session).id
        make.node(session, num_slots=1)
        theirs = make.job(session, state=state, project_id=other, base_model=base, kind="finetune").id
        make.model(session, "theirs", project_id=other, job_id=theirs, source=f"adapter:{theirs}:x")
    with pytest.raises(InUse, match="Another project") as refused:
        remove(services, job_id)
    assert theirs not in refused.value.message
    if state is JobState.RUNNING:
        with pytest.raises(InUse, match="once that has ended"):
            remove(services, job_id, force=True)
    else:
        remove(services, job_id, force=True)


def test_a_checkpoint_that_another_project_may_use_goes_by_force_alone(services: Services) -> None:
    job_id = job(services)
    with services.db.session() as session:
        shared = make.checkpoint(session, session.get_one(Job, job_id), 2).id
        other = make.project(session).id
        session.add(CheckpointPermission(id=new_id("cp"), checkpoint_id=shared, project_id=other))
    with pytest.raises(InUse, match=f"Another project may use {shared}"):
        remove(services, job_id)
    remove(services, job_id, force=True)
    assert rows(services.db)["checkpoint_permissions"] == 0
