"""Checkpoints and artifacts: listed when they are whole, and only by the attempt that holds the job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest

from core import artifacts, catalog, checkpoints, events, files, jobs, result_files
from core.errors import InvalidMove, NotFound
from core.keys import Account
from core.models import Job
from core.services import Services
from core.settings import Settings
from core.states import JobState
from engine.events import Evaluated, RolledBack
from tests import make
from tests.core.test_catalog import CONFIG

S = JobState
LEASE = timedelta(seconds=60)


@pytest.fixture
def services(settings: Settings, no_broker: None) -> Iterator[Services]:
    with Services(settings) as services:
        yield services


def running(services: Services, **columns: object) -> Job:
    with services.db.session() as session:
        return make.job(session, state=S.RUNNING, **columns)


def again(services: Services, job: Job) -> Job:
    """The job in its next attempt."""
    with services.db.session() as session:
        jobs.requeue(session, job.id, fence=job.attempt, reason="the host goes down")
        jobs.place(session, job.id, "node-1", [], claim_within=LEASE)
    with services.db.session() as session:
        claimed = jobs.claim(session, job.id, "supervisor-2", LEASE, node="node-1")
        assert claimed is not None
        return claimed


def saved(folder: Path, text: str = "weights") -> Path:
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_text(text)
    (folder / "manifest.json").write_text("{}")
    return folder


def exported(folder: Path) -> Path:
    files = {
        "model/config.json": json.dumps(CONFIG).encode(),
        "model/model.safetensors": b"weights",
        "adapter/a.json": b"{}",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    listed = [
        {"path": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    ]
    (folder / "manifest.json").write_text(json.dumps({"files": listed, "seed": 1}))
    return folder


# Checkpoints


def test_a_checkpoint_is_listed_told_and_can_be_fetched(services: Services, tmp_path: Path) -> None:
    job = running(services, losses=3)
    folder = saved(tmp_path / "step")
    made = checkpoints.publish(services, job.id, fence=1, step=50, folder=folder, metrics={"loss": 1.5})
    assert made.id.startswith("ftckpt-"), "as OpenAI names them"
    with services.db.reading() as session:
        found = checkpoints.latest(session, job.id)
        assert found is not None
        assert (found.id, found.step, found.attempt, found.metrics) == (made.id, 50, 1, {"loss": 1.5})
        assert found.bytes == len("weights") + len("{}")
        told = events.since(session, job.id, 1)[0]
        assert (told.type, told.data["step"], told.data["id"]) == ("checkpoint", 50, made.id)
        # Progress is safe: what was lost before no longer counts.
        assert jobs.find(session, job.id).losses == 0
    checkpoints.stage(services.storage, found, tmp_path / "copy")
    assert (tmp_path / "copy" / "weights.bin").read_text() == "weights"


@pytest.mark.parametrize("back", [False, True], ids=["damaged", "gone back from"])
def test_no_loss_is_forgiven_before_a_checkpoint_comes_further_than_any_before(
    services: Services, tmp_path: Path, back: bool
) -> None:
    """Else a storage that damages what it keeps, or a run that goes back and dies, would be tried again for ever."""
    job, number = running(services), count()

    def losses(step: int) -> int:
        folder = saved(tmp_path / str(next(number)))
        checkpoints.publish(services, job.id, fence=1, step=step, folder=folder, metrics={})
        checkpoints.prune(services, job.id, keep=1)
        with services.db.reading() as session:
            return jobs.find(session, job.id).losses

    for step in (10, 20, 30):
        losses(step)
    with services.db.session() as session:
        session.get_one(Job, job.id).losses = 4
        if back:
            jobs.record(session, job.id, fence=1, events=[RolledBack(seq=7, step=0, from_step=34, rows=70)])
    # Those that an attempt that begins anew saves on its way to where an earlier one was.
    assert [losses(step) for step in (10, 20, 30)] == [4, 4, 4]
    assert losses(31) == 0


def test_an_attempt_that_was_replaced_publishes_nothing(services: Services, tmp_path: Path) -> None:
    job = running(services, attempt=2)
    with pytest.raises(InvalidMove):
        checkpoints.publish(services, job.id, fence=1, step=50, folder=saved(tmp_path / "step"), metrics={})
    with services.db.reading() as session:
        assert checkpoints.latest(session, job.id) is None
    assert list(services.storage.list("jobs")) == []


def test_a_checkpoint_that_is_not_listed_leaves_nothing_in_storage(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = running(services)
    put_file = services.storage.put_file

    def full_at_the_end(key: str, path: Path) -> None:
        if path.name == "manifest.json":
            raise OSError(28, "No space left on device")
        put_file(key, path)

    monkeypatch.setattr(services.storage, "put_file", full_at_the_end)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.publish(services, job.id, fence=1, step=50, folder=saved(tmp_path / "step"), metrics={})
    assert list(services.storage.list("jobs")) == []


def test_a_checkpoint_that_is_listed_stays_when_its_second_upload_fails(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, folder = running(services), saved(tmp_path / "step")
    made = checkpoints.publish(services, job.id, fence=1, step=50, folder=folder, metrics={})
    with services.db.session() as session:
        jobs.requeue(session, job.id, fence=1, reason="the host goes down")
    with pytest.raises(InvalidMove):
        checkpoints.publish(services, job.id, fence=1, step=50, folder=folder, metrics={})
    checkpoints.stage(services.storage, made, tmp_path / "copy")
    assert (tmp_path / "copy" / "weights.bin").read_text() == "weights"


def test_an_attempt_that_comes_to_a_step_again_replaces_its_checkpoint_whole(
    services: Services, tmp_path: Path
) -> None:
    job = running(services)
    first = checkpoints.publish(services, job.id, fence=1, step=50, folder=saved(tmp_path / "1", "first"), metrics={})
    was = first.storage_prefix
    # It went back beyond the step, and left out some rows since.
    second = checkpoints.publish(services, job.id, fence=1, step=50, folder=saved(tmp_path / "2", "other"), metrics={})
    assert second.id == first.id
    assert not list(services.storage.list(was))
    checkpoints.stage(services.storage, second, tmp_path / "staged")
    assert {path.name: path.read_bytes() for path in (tmp_path / "2").rglob("*") if path.is_file()} == {
        path.name: path.read_bytes() for path in (tmp_path / "staged").rglob("*") if path.is_file()
    }


def test_a_step_that_was_saved_twice_is_listed_once_with_the_later_content(services: Services, tmp_path: Path) -> None:
    job = running(services)
    checkpoints.publish(services, job.id, fence=1, step=50, folder=saved(tmp_path / "1", "first"), metrics={})
    job = again(services, job)
    checkpoints.publish(services, job.id, fence=2, step=50, folder=saved(tmp_path / "2", "second"), metrics={})
    with services.db.reading() as session:
        page = checkpoints.page(session, job)
        assert [(found.step, found.attempt) for found in page.data] == [(50, 2)]
    checkpoints.stage(services.storage, page.data[0], tmp_path / "copy")
    assert (tmp_path / "copy" / "weights.bin").read_text() == "second"
    assert list(services.storage.list(f"jobs/{job.id}/1")) == []


def test_only_the_newest_checkpoints_are_kept(services: Services, tmp_path: Path) -> None:
    job = running(services)
    for step in (10, 20, 30):
        checkpoints.publish(services, job.id, fence=1, step=step, folder=saved(tmp_path / str(step)), metrics={})
    checkpoints.prune(services, job.id, keep=2)
    with services.db.reading() as session:
        assert sorted(found.step for found in checkpoints.page(session, job).data) == [20, 30]
    kept = {stored.key.split("/")[4] for stored in services.storage.list(f"jobs/{job.id}")}
    assert kept == {"step-00000020", "step-00000030"}


def test_after_going_back_the_next_attempt_starts_where_the_run_went_on(services: Services, tmp_path: Path) -> None:
    job = running(services)
    # From 30 it went back to 20, and was told to stop at 25; later it comes to 30 again.
    for number, (step, newest, kept) in enumerate([
        (10, 10, [10]), (20, 20, [10, 20]), (30, 30, [20, 30]), (25, 25, [20, 25]), (30, 30, [25, 30]),
    ]):  # fmt: skip
        checkpoints.publish(services, job.id, fence=1, step=step, folder=saved(tmp_path / str(number)), metrics={})
        with services.db.reading() as session:
            latest = checkpoints.latest(session, job.id)
            assert latest is not None
            assert latest.step == newest
        checkpoints.prune(services, job.id, keep=2)
        with services.db.reading() as session:
            assert sorted(found.step for found in checkpoints.page(session, job).data) == kept


def test_a_run_that_went_back_and_died_starts_from_none_that_it_had_left_behind(
    services: Services, tmp_path: Path
) -> None:
    job = running(services)
    for step in (10, 20, 30):
        checkpoints.publish(services, job.id, fence=1, step=step, folder=saved(tmp_path / str(step)), metrics={})
    with services.db.session() as session:
        jobs.record(session, job.id, fence=1, events=[RolledBack(seq=7, step=10, from_step=34, rows=70)])
    with services.db.reading() as session:
        assert [found.step for found in checkpoints.newest_first(session, job.id)] == [10]

    # What was on its way into storage when it went back is not listed any more, and leaves nothing.
    with pytest.raises(checkpoints.GoneBackFrom):
        checkpoints.publish(
            services, job.id, fence=1, step=34, folder=saved(tmp_path / "34"), metrics={}, is_on_the_way=lambda: False
        )
    assert not [stored for stored in services.storage.list(f"jobs/{job.id}") if "step-00000034" in stored.key]

    # Another attempt comes to the steps again, and what was left behind makes room.
    job = again(services, job)
    checkpoints.publish(services, job.id, fence=2, step=20, folder=saved(tmp_path / "20b", "anew"), metrics={})
    checkpoints.prune(services, job.id, keep=5)
    with services.db.reading() as session:
        assert [found.step for found in checkpoints.newest_first(session, job.id)] == [20, 10]
        assert {found.step for found in checkpoints.page(session, job).data} == {20, 10}


def test_a_step_that_comes_again_after_going_back_changes_nothing_for_who_starts_from_the_earlier_one(
    services: Services, tmp_path: Path
) -> None:
    job = running(services)
    first = checkpoints.publish(services, job.id, fence=1, step=20, folder=saved(tmp_path / "1", "first"), metrics={})
    with services.db.session() as session:
        make.job(session, base_model=first.id)
        jobs.record(session, job.id, fence=1, events=[RolledBack(seq=7, step=10, from_step=24, rows=70)])
    anew = checkpoints.publish(services, job.id, fence=1, step=20, folder=saved(tmp_path / "2", "anew"), metrics={})
    checkpoints.prune(services, job.id, keep=1)
    with services.db.reading() as session:
        assert [found.id for found in checkpoints.newest_first(session, job.id)] == [anew.id]
        assert [found.id for found in checkpoints.page(session, job).data] == [anew.id, first.id]
    for checkpoint, weights in ((first, "first"), (anew, "anew")):
        checkpoints.stage(services.storage, checkpoint, tmp_path / checkpoint.id)
        assert (tmp_path / checkpoint.id / "weights.bin").read_text() == weights


def test_one_that_was_gone_back_from_and_that_others_start_from_is_kept_and_not_gone_on_from(
    services: Services, tmp_path: Path
) -> None:
    job = running(services)
    for step in (20, 30, 25):
        made = checkpoints.publish(services, job.id, fence=1, step=step, folder=saved(tmp_path / str(step)), metrics={})
        if step == 30:
            with services.db.session() as session:
                make.job(session, base_model=made.id)
    checkpoints.prune(services, job.id, keep=1)
    with services.db.reading() as session:
        assert [found.step for found in checkpoints.newest_first(session, job.id)] == [25, 30]


def test_a_checkpoint_that_a_job_starts_from_is_kept_for_it_also_once_that_has_ended(
    services: Services, tmp_path: Path
) -> None:
    job = running(services)
    first = checkpoints.publish(services, job.id, fence=1, step=1, folder=saved(tmp_path / "1"), metrics={})
    with services.db.session() as session:
        waiting = make.job(session, base_model=first.id)
    checkpoints.publish(services, job.id, fence=1, step=2, folder=saved(tmp_path / "2"), metrics={})
    checkpoints.prune(services, job.id, keep=1)
    with services.db.session() as session:
        assert sorted(found.step for found in checkpoints.page(session, job).data) == [1, 2]
        jobs.move(session, waiting.id, S.CANCELLED)
    # It may be retried, and then needs what it needed.
    checkpoints.prune(services, job.id, keep=1)
    with services.db.session() as session:
        assert sorted(found.step for found in checkpoints.page(session, job).data) == [1, 2]
        assert catalog.base_source(session, jobs.find(session, waiting.id)) == f"checkpoint:{first.id}"


def test_the_best_checkpoint_outlives_newer_ones_and_the_newest_knows_it(services: Services, tmp_path: Path) -> None:
    job = running(services)
    for step in (10, 20, 30, 40):
        folder, best = saved(tmp_path / str(step)), min(step, 20)
        checkpoints.publish(services, job.id, fence=1, step=step, folder=folder, metrics={"best_step": best})
        checkpoints.prune(services, job.id, keep=1, spare=best)
    with services.db.reading() as session:
        newest = checkpoints.latest(session, job.id)
        assert newest is not None
        best_ = checkpoints.best(session, newest)
        assert best_ is not None
        assert (newest.step, best_.step) == (40, 20)
        assert checkpoints.best(session, best_) is None, "it is the newest of its time"
        assert sorted(found.step for found in checkpoints.page(session, job).data) == [20, 40]
    kept = {stored.key.split("/")[4] for stored in services.storage.list(f"jobs/{job.id}")}
    assert kept == {"step-00000020", "step-00000040"}


# Artifacts


def test_a_result_is_listed_with_its_hashes_its_manifest_and_its_model(
    services: Services, tmp_path: Path, owner: Account
) -> None:
    job = running(services, name="demo")
    artifacts.publish(services, job, exported(tmp_path / "export"))
    with services.db.session() as session:
        jobs.move(session, job.id, S.SUCCEEDED, fence=1)
    with services.db.reading() as session:
        done = jobs.get(session, owner, job.id)
        listed = artifacts.of_job(session, job.id)
        assert [(artifact.path, artifact.kind) for artifact in listed] == [
            ("adapter/a.json", "adapter"),
            ("manifest.json", "manifest"),
            ("model/config.json", "model"),
            ("model/model.safetensors", "model"),
        ]
        for artifact in listed:
            content = b"".join(services.storage.stream(artifact.storage_key))
            assert (len(content), hashlib.sha256(content).hexdigest()) == (artifact.bytes, artifact.sha256)
        manifest = artifacts.manifest(session, services.storage, job.id)
        assert manifest is not None
        assert manifest["seed"] == 1
        assert done.result_model is not None
        model = catalog.get(session, owner, done.result_model, models=tmp_path)
        assert model.shape == make.shape().model_dump(mode="json")
        assert artifacts.get(session, done, "model/config.json").kind == "model"
        with pytest.raises(NotFound):
            artifacts.get(session, done, "../../etc/passwd")
        assert events.since(session, job.id, 1)[0].data["model"] == done.result_model


def test_before_there_is_a_result_there_is_no_manifest(services: Services) -> None:
    job = running(services)
    with services.db.reading() as session:
        assert artifacts.manifest(session, services.storage, job.id) is None
        assert artifacts.of_job(session, job.id) == []


def test_a_file_that_is_not_what_the_manifest_says_is_not_published(services: Services, tmp_path: Path) -> None:
    job = running(services)
    export = exported(tmp_path / "export")
    (export / "model" / "model.safetensors").write_bytes(b"weighty")
    with pytest.raises(artifacts.Damaged, match=r"model/model\.safetensors"):
        artifacts.publish(services, job, export)
    with services.db.reading() as session:
        assert artifacts.of_job(session, job.id) == []


@pytest.mark.parametrize("meanwhile", ["cancelled", "replaced"])
def test_a_result_that_comes_too_late_is_not_seen(
    services: Services, tmp_path: Path, owner: Account, meanwhile: str
) -> None:
    job = running(services)
    if meanwhile == "cancelled":
        with services.db.session() as session:
            jobs.cancel(session, owner, job.id)
    else:
        with services.db.reading() as session:
            stale = jobs.find(session, job.id)
        again(services, job)
        job = stale
    with pytest.raises(InvalidMove):
        artifacts.publish(services, job, exported(tmp_path / "export"))
    with services.db.reading() as session:
        assert artifacts.of_job(session, job.id) == []
        assert catalog.list_(session, owner, models=tmp_path / "none") == []
    assert list(services.storage.list("jobs")) == []


def test_a_second_publication_takes_the_place_of_the_first(services: Services, tmp_path: Path) -> None:
    job = running(services)
    artifacts.publish(services, job, exported(tmp_path / "1"))
    job = again(services, job)
    artifacts.publish(services, job, exported(tmp_path / "2"))
    with services.db.reading() as session:
        listed = {artifact.storage_key for artifact in artifacts.of_job(session, job.id)}
    assert {key.split("/")[2] for key in listed} == {"2"}
    assert {stored.key for stored in services.storage.list(f"jobs/{job.id}")} == listed


def test_a_fine_tune_leaves_one_table_of_its_losses_that_of_its_last_attempt(
    services: Services, owner: Account, tmp_path: Path
) -> None:
    job = running(services, base_model="tiny", kind="finetune")
    with services.db.session() as session:
        steps = [make.step(1, loss=2.5, token_accuracy=0.5), make.step(2, loss=1.25)]
        validation = Evaluated(step=2, loss=3, token_accuracy=0.25, tokens=9)
        jobs.record(session, job.id, fence=1, events=[*steps, validation])
    artifacts.publish(services, job, exported(tmp_path / "1"))
    with services.db.reading() as session:
        first = files.get(session, owner, result_files.of_jobs(session, [job.id])[job.id])
    assert (first.purpose, first.filename) == ("fine-tune-results", "step_metrics.csv")
    table = b"".join(files.content(services.storage, first))
    assert (len(table), hashlib.sha256(table).hexdigest()) == (first.bytes, first.sha256)
    assert table.decode().split("\n") == [
        "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy",
        "1,2.5,0.5,,", "2,1.25,,3.0,0.25", "",
    ]  # fmt: skip
    job = again(services, job)
    artifacts.publish(services, job, exported(tmp_path / "2"))
    with services.db.reading() as session:
        assert result_files.of_jobs(session, [job.id, "job-other"]) == {job.id: first.id}
        assert files.get(session, owner, first.id).storage_key != first.storage_key
    assert not services.storage.exists(first.storage_key)


def test_a_job_from_scratch_leaves_no_such_table(services: Services, tmp_path: Path) -> None:
    job = running(services)
    artifacts.publish(services, job, exported(tmp_path / "1"))
    with services.db.reading() as session:
        assert result_files.of_jobs(session, [job.id]) == {}
