"""What goes after its time, what stays because somebody may need it, and that nothing is left of what goes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from core import catalog, checkpoints, events, files, retention, stays
from core.errors import NotFound
from core.keys import DEFAULT_PROJECT, Account
from core.models import Artifact, Checkpoint, CheckpointPermission, File, Job, JobEvent, database_now, new_id
from core.resolve import BaseFacts
from core.retention import LEFTOVERS, Tally
from core.services import Services
from core.settings import Settings
from core.states import JobState
from core.stays import Stay, over, parse
from tests import make
from tests.core.conftest import waits_or_is_done

DAY = 24 * 3600.0


@dataclass(frozen=True)
class Thing:
    owner: str
    created_at: float


@pytest.mark.parametrize(
    ("stay", "gone"),
    [
        (Stay(), []),
        (Stay(age=timedelta(days=2)), [("a", 1), ("b", 1)]),
        (Stay(count=1), [("a", 1), ("a", 9)]),
        (Stay(count=0), [("a", 1), ("a", 9), ("a", 10), ("b", 1)]),
        (Stay(age=timedelta(days=2), count=2), [("a", 1), ("b", 1)]),
        (Stay(age=timedelta(days=20), count=1), [("a", 1), ("a", 9)]),
    ],
)
def test_what_is_too_old_or_not_among_the_newest_goes(stay: Stay, gone: list[tuple[str, int]]) -> None:
    things = [Thing("a", 1 * DAY), Thing("b", 1 * DAY), Thing("a", 10 * DAY), Thing("a", 9 * DAY)]
    found = over(things, stay, 11 * DAY)
    assert sorted((each.owner, round(each.created_at / DAY)) for each in found) == gone


def test_rules_are_read_from_one_line() -> None:
    assert parse("checkpoints.age=30d, checkpoints.count=1,logs.age=2w,events.count=5000,files.age=12h") == {
        "checkpoints": Stay(timedelta(days=30), 1), "logs": Stay(timedelta(weeks=2)), "events": Stay(None, 5000),
        "files": Stay(timedelta(hours=12)),
    }  # fmt: skip
    assert parse(None) == parse(" , ") == {}


@pytest.mark.parametrize(
    "said",
    [
        "logs",
        "logs=30d",
        "logs.age",
        "logs.age=30",
        "logs.age=-1d",
        "models.age=1d",
        "logs.count=x",
        "logs.age=1d,logs.age=2d",
    ],
)
def test_what_is_no_rule_is_named(said: str) -> None:
    with pytest.raises(ValueError, match=r"is no rule|two rules"):
        stays.parse(said)
    with pytest.raises(ValueError, match="retention"):
        Settings(retention=said)


@pytest.fixture
def services(settings: Settings, no_broker: None) -> Iterator[Services]:
    with Services(settings) as services:
        yield services


def ended(services: Services, *, days: float, state: JobState = JobState.SUCCEEDED, **columns: Any) -> str:
    """A job that ended so long ago; its id."""
    with services.db.session() as session:
        job = make.job(session, state=state, **columns)
        then = database_now() - days * DAY
        session.execute(update(Job).where(Job.id == job.id).values(created_at=then, finished_at=then, last_event=1))
        return job.id


def checkpoint(services: Services, job_id: str, step: int, *, days: float) -> str:
    """One with ten bytes in two objects; its id."""
    with services.db.session() as session:
        prefix = f"jobs/{job_id}/1/checkpoints/step-{step:08d}"
        row = make.checkpoint(session, session.get_one(Job, job_id), step, storage_prefix=prefix, bytes=10)
        session.execute(
            update(Checkpoint).where(Checkpoint.id == row.id).values(created_at=database_now() - days * DAY)
        )
    for name in ("manifest.json", "rank-00000.safetensors"):
        services.storage.put_bytes(f"{prefix}/{name}", b"12345")
    return row.id


def checkpoints_of(services: Services, job_id: str) -> list[int]:
    with services.db.reading() as session:
        return list(
            session.scalars(select(Checkpoint.step).where(Checkpoint.job_id == job_id).order_by(Checkpoint.step))
        )


def keys(services: Services, prefix: str = "jobs") -> set[str]:
    return {stored.key for stored in services.storage.list(prefix)}


def test_old_checkpoints_go_with_their_files_and_a_dry_run_says_so_and_leaves_them(services: Services) -> None:
    job_id = ended(services, days=50)
    for step, days in ((1, 50), (2, 40), (3, 1)):
        checkpoint(services, job_id, step, days=days)
    rules = parse("checkpoints.age=30d")
    expected = {"checkpoints": Tally(things=2, objects=4, bytes=20), LEFTOVERS: Tally()}
    assert retention.sweep(services, rules, dry_run=True) == expected
    assert checkpoints_of(services, job_id) == [1, 2, 3]
    assert len(keys(services)) == 6
    assert retention.sweep(services, rules) == expected
    assert checkpoints_of(services, job_id) == [3]
    assert keys(services) == {f"jobs/{job_id}/1/checkpoints/step-00000003/{name}"
                              for name in ("manifest.json", "rank-00000.safetensors")}  # fmt: skip
    assert retention.sweep(services, rules) == {"checkpoints": Tally(), LEFTOVERS: Tally()}


@pytest.mark.parametrize(
    "state", [state for state in JobState if state not in {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}]
)
def test_nothing_of_a_job_that_has_not_ended_goes(services: Services, state: JobState) -> None:
    job_id = ended(services, days=50, state=state)
    checkpoint(services, job_id, 1, days=50)
    services.storage.put_bytes(f"jobs/{job_id}/logs/1/rank-0.log", b"x")
    add_events(services, job_id, count=3, days=50)
    before = keys(services)
    tallies = retention.sweep(services, parse("checkpoints.count=0,logs.count=0,events.count=0"))
    assert set(tallies.values()) == {Tally()}
    assert (checkpoints_of(services, job_id), keys(services)) == ([1], before)


def test_a_checkpoint_that_another_job_started_from_or_another_project_may_use_stays(services: Services) -> None:
    job_id = ended(services, days=50)
    used, shared, spare = (checkpoint(services, job_id, step, days=50) for step in (1, 2, 3))
    ended(services, days=1, base_model=used, kind="finetune")
    with services.db.session() as session:
        other = make.project(session).id
        session.add(CheckpointPermission(id=new_id("cp"), checkpoint_id=shared, project_id=other))
    assert spare
    assert retention.sweep(services, parse("checkpoints.count=0"))["checkpoints"] == Tally(1, 2, 10)
    assert checkpoints_of(services, job_id) == [1, 2]
    assert len(keys(services)) == 4


def test_a_checkpoint_that_somebody_came_to_need_after_it_was_chosen_stays(services: Services) -> None:
    job_id = ended(services, days=50, state=JobState.FAILED)
    checkpoint(services, job_id, 1, days=50)
    (going,) = retention._checkpoints(services, Stay(count=0), 0.0)
    with services.db.session() as session:
        session.execute(update(Job).where(Job.id == job_id).values(state=JobState.QUEUED))
    assert not retention._remove_checkpoint(services, going)
    assert (checkpoints_of(services, job_id), len(keys(services))) == ([1], 2)


@pytest.mark.parametrize("by", ["the job that goes on", "its age"])
def test_a_checkpoint_that_a_job_is_about_to_start_from_stays(services: Services, owner: Account, by: str) -> None:
    job_id = ended(services, days=50, state=JobState.RUNNING if by == "the job that goes on" else JobState.FAILED)
    started_from, _ = (checkpoint(services, job_id, step, days=50) for step in (1, 2))

    found = retention._checkpoints(services, Stay(count=0), 0.0)
    chosen = [each for each in found if each.id == started_from]

    def remove() -> None:
        if by == "its age":
            assert not any([retention._remove_checkpoint(services, going) for going in chosen])
        else:
            checkpoints.prune(services, job_id, keep=1)

    with ThreadPoolExecutor(1) as pool:
        with services.db.session() as session:
            base = BaseFacts(name=started_from, shape=make.shape())
            catalog.keep(session, owner, base, models=services.settings.models)
            removing = pool.submit(remove)
            waits_or_is_done(services.db, removing)
            make.job(session, base_model=started_from, kind="finetune")
        removing.result(timeout=30)
    assert len(chosen) == (by == "its age")
    assert checkpoints_of(services, job_id) == [1, 2]


def test_a_checkpoint_that_has_just_gone_is_no_base(
    services: Services, owner: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = ended(services, days=50)
    id_ = checkpoint(services, job_id, 1, days=50)
    with services.db.session() as session:
        found = catalog.get(session, owner, id_, models=services.settings.models)
        session.execute(delete(Checkpoint).where(Checkpoint.id == id_))
        # As another transaction does between the two statements.
        monkeypatch.setattr(catalog, "_still_there", lambda *_: found)
        with pytest.raises(NotFound, match="just removed"):
            catalog.keep(session, owner, BaseFacts(id_, make.shape()), models=services.settings.models)


def test_logs_go_by_the_age_of_their_job_and_by_attempts(services: Services) -> None:
    old, young = ended(services, days=50), ended(services, days=1)
    for job_id in (old, young):
        for attempt in (9, 10):
            for rank in (0, 1):
                services.storage.put_bytes(f"jobs/{job_id}/logs/{attempt}/rank-{rank}.log", b"abc")
    services.storage.put_bytes(f"jobs/{old}/1/artifacts/model/logs", b"no log")
    assert retention.sweep(services, parse("logs.count=1"))["logs"] == Tally(things=2, objects=4, bytes=12)
    assert {key.split("/")[3] for key in keys(services) if "/logs/" in key} == {"10"}
    assert retention.sweep(services, parse("logs.age=30d"))["logs"] == Tally(things=1, objects=2, bytes=6)
    assert {key.split("/")[1] for key in keys(services) if "/logs/" in key} == {young}
    assert f"jobs/{old}/1/artifacts/model/logs" in keys(services)


def add_events(services: Services, job_id: str, *, count: int, days: float, type: str = "step") -> None:
    with services.db.session() as session:
        job = session.get_one(Job, job_id)
        for _ in range(count):
            job.last_event += 1
            session.add(
                JobEvent(job_id=job_id, seq=job.last_event, attempt=1, type=type, message="ten bytes.", data={},
                         created_at=0.0)
            )  # fmt: skip
        session.flush()
        then = database_now() - days * DAY
        session.execute(
            update(JobEvent).where(JobEvent.job_id == job_id, JobEvent.created_at == 0.0).values(created_at=then)
        )


def seqs(services: Services, job_id: str) -> list[int]:
    with services.db.reading() as session:
        return [event.seq for event in events.since(session, job_id, 0)]


def test_events_go_but_for_the_states_and_the_newest(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "ROWS_AT_ONCE", 2)
    job_id = ended(services, days=50)
    add_events(services, job_id, count=5, days=50)
    add_events(services, job_id, count=1, days=50, type="state")
    add_events(services, job_id, count=2, days=1, type="log")
    assert seqs(services, job_id) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    # Those of type step are 2 to 6; 8 may go, and 9 is the newest.
    assert retention.sweep(services, parse("events.count=3"), dry_run=True)["events"] == Tally(things=3, bytes=36)
    assert retention.sweep(services, parse("events.count=3"))["events"] == Tally(things=3, bytes=36)
    assert seqs(services, job_id) == [1, 5, 6, 7, 8, 9]
    assert retention.sweep(services, parse("events.age=30d"))["events"].things == 2
    assert seqs(services, job_id) == [1, 7, 8, 9]
    assert retention.sweep(services, parse("events.count=0"))["events"].things == 1
    assert seqs(services, job_id) == [1, 7, 9]


def put_file(services: Services, *, days: float, **columns: Any) -> str:
    id_ = new_id("file")
    with services.db.session() as session:
        make.file(session, id_, bytes=4, **columns)
        session.execute(update(File).where(File.id == id_).values(created_at=database_now() - days * DAY))
    services.storage.put_bytes(f"files/{id_}", b"text")
    return id_


def files_there(services: Services) -> set[str]:
    with services.db.reading() as session:
        rows = set(session.scalars(select(File.id)))
    assert {f"files/{id_}" for id_ in rows} == keys(services, "files"), (
        "a row for each content, and the other way round"
    )
    return rows


def test_old_files_go_unless_a_job_still_needs_them(services: Services) -> None:
    needed, old, young = put_file(services, days=50), put_file(services, days=50), put_file(services, days=1)
    result = put_file(services, days=50, purpose="fine-tune-results")
    spec = make.spec(data={"train": [needed]}).model_dump(mode="json", by_alias=True, exclude_unset=True)
    job_id = ended(services, days=1, state=JobState.PAUSED, spec=spec)
    assert retention.sweep(services, parse("files.age=30d"), dry_run=True)["files"] == Tally(1, 1, 4)
    assert retention.sweep(services, parse("files.age=30d"))["files"] == Tally(1, 1, 4)
    assert files_there(services) == {needed, young, result}
    assert old
    with services.db.session() as session:
        session.execute(update(Job).where(Job.id == job_id).values(state=JobState.CANCELLED))
    retention.sweep(services, parse("files.age=30d"))
    assert files_there(services) == {young, result}


def test_files_are_counted_for_each_project(services: Services) -> None:
    with services.db.session() as session:
        make.project(session, "proj-b")
    ours = [put_file(services, days=days, project_id=DEFAULT_PROJECT) for days in (3, 2, 1)]
    theirs = put_file(services, days=50, project_id="proj-b")
    retention.sweep(services, parse("files.count=2"))
    assert files_there(services) == {*ours[1:], theirs}


def test_a_file_that_a_job_came_to_need_after_it_was_chosen_stays(services: Services) -> None:
    id_ = put_file(services, days=50)
    (going,) = retention._files(services, Stay(count=0), 0.0)
    spec = make.spec(data={"train": [id_]}).model_dump(mode="json", by_alias=True, exclude_unset=True)
    ended(services, days=0, state=JobState.QUEUED, spec=spec)
    assert retention._remove_files(services, [going]) == []
    assert files_there(services) == {id_}


def test_what_jobs_need_is_read_once_for_many_files_that_go(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, *_ = (put_file(services, days=50) for _ in range(5))
    spec = make.spec(data={"train": [kept]}).model_dump(mode="json", by_alias=True, exclude_unset=True)
    ended(services, days=0, state=JobState.QUEUED, spec=spec)
    asked, real = list[str](), files._needed

    def needed(session: Session, project_id: str) -> dict[str, str]:
        asked.append(project_id)
        return real(session, project_id)

    monkeypatch.setattr(files, "_needed", needed)
    assert retention.sweep(services, parse("files.count=0"))["files"] == Tally(4, 4, 16)
    assert files_there(services) == {kept}
    # To find them, and as they go.
    assert asked == [DEFAULT_PROJECT] * 2


def test_content_of_an_ended_job_that_no_row_names_goes_after_a_day(
    services: Services, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    over_, going_on = ended(services, days=2), ended(services, days=2, state=JobState.RUNNING)
    checkpoint(services, over_, 1, days=2)
    services.storage.put_bytes(f"jobs/{over_}/logs/1/rank-0.log", b"x")
    before = keys(services)
    for job_id in (over_, going_on):
        services.storage.put_bytes(f"jobs/{job_id}/1/checkpoints/step-00000002/rank-00000.safetensors", b"half")
        services.storage.put_bytes(f"jobs/{job_id}/1/artifacts/model/config.json", b"{}")
    assert retention.sweep(services, {})[LEFTOVERS] == Tally()
    monkeypatch.setattr(retention, "LEFT_AFTER", timedelta(0))
    assert retention.sweep(services, {}, dry_run=True)[LEFTOVERS] == Tally(things=2, objects=2, bytes=6)
    assert retention.sweep(services, {})[LEFTOVERS] == Tally(things=2, objects=2, bytes=6)
    assert {key for key in keys(services) if key.startswith(f"jobs/{over_}/")} == before
    assert len([key for key in keys(services) if key.startswith(f"jobs/{going_on}/")]) == 2


def test_whatever_is_left_of_a_job_that_is_no_more_goes_after_a_day(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("logs/1/rank-0.log", "1/checkpoints/step-00000002/manifest.json", "1/artifacts/manifest.json"):
        services.storage.put_bytes(f"jobs/{new_id('job')}/{path}", b"x")
    assert retention.sweep(services, {})[LEFTOVERS] == Tally()
    monkeypatch.setattr(retention, "LEFT_AFTER", timedelta(0))
    assert retention.sweep(services, {})[LEFTOVERS] == Tally(things=3, objects=3, bytes=3)
    assert keys(services) == set()


def test_content_that_rows_name_is_told_from_what_is_left_a_few_objects_at_a_time(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "LEFT_AFTER", timedelta(0))
    monkeypatch.setattr(retention, "OBJECTS_AT_ONCE", 2)
    job_id = ended(services, days=2)
    for step in (1, 2):
        checkpoint(services, job_id, step, days=2)
    model, result = f"jobs/{job_id}/1/artifacts/model/config.json", f"jobs/{job_id}/1/results.csv"
    with services.db.session() as session:
        session.add(
            Artifact(job_id=job_id, path="model/config.json", kind="model", bytes=2, sha256="", storage_key=model)
        )
        make.file(session, new_id("file"), purpose="fine-tune-results", storage_key=result)
    named = keys(services) | {model, result}
    left = [f"jobs/{job_id}/1/checkpoints/step-0000000{step}/half" for step in (3, 4, 5)]
    for key in (model, result, *left):
        services.storage.put_bytes(key, b"{}")
    assert retention.sweep(services, {}) == {LEFTOVERS: Tally(things=3, objects=3, bytes=6)}
    assert keys(services) == named
