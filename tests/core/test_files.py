"""Uploads: what is taken in, what is refused with a line to go to, and that nothing of a refused one is kept."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from core import files
from core.db import Database
from core.errors import FileTooLarge, InUse, InvalidFile, InvalidRequest, NotFound
from core.keys import Account
from core.models import File
from core.states import JobState
from core.storage import Storage
from tests import make

CHAT = b'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}\n'


def upload(
    database: Database, storage: Storage, owner: Account, data: bytes, *, filename: str = "train.jsonl",
    purpose: str = "fine-tune", max_bytes: int = 10**6,
) -> File:  # fmt: skip
    chunks = (data[start : start + 7] for start in range(0, len(data), 7))
    return files.create(
        database, storage, owner, filename=filename, purpose=purpose, chunks=chunks, max_bytes=max_bytes
    )


def nothing_is_kept(database: Database, storage: Storage) -> bool:
    with database.reading() as session:
        return not session.scalars(select(File)).all() and not list(storage.list("files"))


def test_an_upload_is_kept_as_it_came_with_what_was_found(database: Database, storage: Storage, owner: Account) -> None:
    file = upload(database, storage, owner, CHAT * 3)
    assert b"".join(files.content(storage, file)) == CHAT * 3
    assert b"".join(files.content(storage, file, 2, 10)) == (CHAT * 3)[2:10]
    assert (file.bytes, file.sha256) == (len(CHAT) * 3, hashlib.sha256(CHAT * 3).hexdigest())
    with database.reading() as session:
        facts = files.facts(session, owner, file.id)
    assert (facts.format, facts.examples, facts.is_plain_text) == ("chat", 3, False)
    # "hi" and "hello", three times.
    assert facts.characters == 21


@pytest.mark.parametrize(
    ("data", "filename", "format", "plain"),
    [
        (b"Once upon a time.\n", "story.txt", "text", True),
        (b"Once upon a time.\n", "story", "text", True),
        (b'\xef\xbb\xbf\n{"text": "Once"}\n', "lines.jsonl", "text", False),
        (b'{"prompt": "a", "completion": "b"}\n', "pairs.jsonl", "completion", False),
    ],
)
def test_the_content_says_what_a_file_is(
    database: Database, storage: Storage, owner: Account, data: bytes, filename: str, format: str, plain: bool
) -> None:
    file = upload(database, storage, owner, data, filename=filename, purpose="pretrain")
    assert (file.report["format"], file.report["plain_text"]) == (format, plain)


def test_a_broken_line_is_named_and_nothing_is_kept(database: Database, storage: Storage, owner: Account) -> None:
    with pytest.raises(InvalidFile) as refusal:
        upload(database, storage, owner, CHAT * 2 + b'{"messages": [{"role": "user", content: "hi"}]}\n' + b"[]\n")
    assert refusal.value.message.startswith("line 3")
    assert [error["line"] for error in refusal.value.errors] == [3, 4]
    assert set(refusal.value.errors[0]) == {"line", "column", "field", "message"}
    assert nothing_is_kept(database, storage)


@pytest.mark.parametrize("data", [b"", b"\n\n  \n"], ids=["empty", "blank"])
def test_an_empty_file_is_refused(database: Database, storage: Storage, owner: Account, data: bytes) -> None:
    with pytest.raises(InvalidFile, match="empty"):
        upload(database, storage, owner, data)
    assert nothing_is_kept(database, storage)


def test_an_upload_beyond_the_limit_is_stopped_while_it_comes_in(
    database: Database, storage: Storage, owner: Account
) -> None:
    asked = 0

    def endless() -> Iterator[bytes]:
        nonlocal asked
        while True:
            asked += 1
            yield b"x" * 100

    with pytest.raises(FileTooLarge, match="1,000 bytes"):
        files.create(database, storage, owner, filename="x.txt", purpose="pretrain", chunks=endless(), max_bytes=1000)
    assert asked == 11
    assert nothing_is_kept(database, storage)


def test_a_client_that_goes_away_leaves_nothing(database: Database, storage: Storage, owner: Account) -> None:
    def broken() -> Iterator[bytes]:
        yield CHAT
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        files.create(database, storage, owner, filename="x", purpose="fine-tune", chunks=broken(), max_bytes=1000)
    assert nothing_is_kept(database, storage)


def test_an_object_without_a_row_is_removed_again(
    database: Database, storage: Storage, owner: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    def power_cut(*arguments: object, **named: object) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr("core.audit.record", power_cut)
    with pytest.raises(RuntimeError, match="power cut"):
        upload(database, storage, owner, CHAT)
    assert nothing_is_kept(database, storage)


@pytest.mark.parametrize(
    ("filename", "label"),
    [
        ("train.jsonl", "train.jsonl"),
        ("../../../../tmp/evil.jsonl", "evil.jsonl"),
        ("/etc/x.jsonl", "x.jsonl"),
        ("C:\\temp\\x.jsonl", "x.jsonl"),
        ("a\x00b\r\n.jsonl", "ab.jsonl"),
        ("..", "upload"),
        ("", "upload"),
        ("dir/", "upload"),
        ("n" * 300 + ".jsonl", "n" * 249 + ".jsonl"),
        ("日本.txt", "日本.txt"),
        ("x\ud800.txt", "x.txt"),
    ],
)
def test_a_clients_name_is_a_label_and_never_a_path(filename: str, label: str) -> None:
    assert files.label(filename) == label


def test_a_file_whose_commit_came_through_stays_when_word_of_it_got_lost(
    database: Database, storage: Storage, owner: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Session.commit

    def lost(session: Session) -> None:
        commit(session)
        raise OperationalError("COMMIT", None, ConnectionResetError())

    with monkeypatch.context() as patch:
        patch.setattr(Session, "commit", lost)
        with pytest.raises(OperationalError):
            upload(database, storage, owner, CHAT)
    with database.reading() as session:
        file = session.scalars(select(File)).one()
    assert b"".join(files.content(storage, file)) == CHAT


def test_an_evil_name_writes_nothing_outside(database: Database, storage: Storage, owner: Account) -> None:
    file = upload(database, storage, owner, CHAT, filename="../../evil.jsonl")
    assert file.storage_key == f"files/{file.id}"
    assert [stored.key for stored in storage.list("files")] == [file.storage_key]


def test_an_unknown_purpose_is_refused(database: Database, storage: Storage, owner: Account) -> None:
    with pytest.raises(InvalidRequest, match="fine-tune or pretrain"):
        upload(database, storage, owner, CHAT, purpose="fun")


def test_what_is_not_for_training_is_kept_unjudged(database: Database, storage: Storage, owner: Account) -> None:
    file = upload(database, storage, owner, b"\x00\x01", purpose="user_data")
    with database.reading() as session:
        assert files.facts(session, owner, file.id).format is None


def test_a_tokenizer_is_known_by_its_vocabulary(database: Database, storage: Storage, owner: Account) -> None:
    content = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 5, "content": "<end>"}]}
    file = upload(database, storage, owner, json.dumps(content).encode(), purpose="tokenizer")
    with database.reading() as session:
        assert files.facts(session, owner, file.id).vocab_size == 6
    for broken in (b"", b"[]", b'{"model": {}}', b'{"model": {"vocab": {}}}', b"[" * 100_000):
        with pytest.raises(InvalidFile, match=r"tokenizer\.json"):
            upload(database, storage, owner, broken, purpose="tokenizer")


@pytest.mark.parametrize("id", ["1e400", "NaN", "-1", "1.5", "true", '"1"', str(2**64)])
def test_what_is_no_id_of_a_token_is_refused(database: Database, storage: Storage, owner: Account, id: str) -> None:
    content = '{"model": {"vocab": {"a": 0, "b": %s}}}' % id  # noqa: UP031
    with pytest.raises(InvalidFile, match=r"tokenizer\.json"):
        upload(database, storage, owner, content.encode(), purpose="tokenizer")
    assert nothing_is_kept(database, storage)


def test_another_projects_file_looks_like_none(database: Database, storage: Storage, owner: Account) -> None:
    with database.session() as session:
        make.project(session, "proj-other")
    other = Account(project_id="proj-other", key_id="k", scopes=frozenset({"admin"}))
    file = upload(database, storage, owner, CHAT)
    with database.session() as session:
        with pytest.raises(NotFound):
            files.get(session, other, file.id)
        with pytest.raises(NotFound):
            files.delete(session, storage, other, file.id)
        assert files.page(session, other).data == []


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.RUNNING, JobState.PAUSED])
def test_a_file_that_a_job_needs_stays(database: Database, storage: Storage, owner: Account, state: JobState) -> None:
    file = upload(database, storage, owner, CHAT)
    with database.session() as session:
        spec = make.spec(data={"train": [make.FILE_ID], "validation": file.id})
        job_id = make.job(session, state=state, spec=spec.model_dump(mode="json", exclude_unset=True)).id
    with database.session() as session, pytest.raises(InUse, match=job_id):
        files.delete(session, storage, owner, file.id)
    assert storage.exists(file.storage_key)


def test_a_deleted_file_is_gone_with_its_content_once_committed(
    database: Database, storage: Storage, owner: Account
) -> None:
    file = upload(database, storage, owner, CHAT)
    with database.session() as session:
        spec = make.spec(data={"train": [file.id]}).model_dump(mode="json", exclude_unset=True)
        make.job(session, state=JobState.SUCCEEDED, spec=spec)
    with database.session() as session:
        files.delete(session, storage, owner, file.id)
        assert storage.exists(file.storage_key)
    assert nothing_is_kept(database, storage)


def test_files_are_listed_by_age_and_purpose(database: Database, storage: Storage, owner: Account) -> None:
    made = [
        upload(database, storage, owner, CHAT, purpose=purpose).id for purpose in ("fine-tune", "pretrain", "fine-tune")
    ]
    with database.session() as session:
        for age, file_id in enumerate(made):
            files.get(session, owner, file_id).created_at = float(age)
    with database.reading() as session:
        assert [file.id for file in files.page(session, owner).data] == made[::-1]
        assert [file.id for file in files.page(session, owner, order="asc", limit=2).data] == made[:2]
        assert [file.id for file in files.page(session, owner, purpose="pretrain").data] == [made[1]]


def test_content_that_a_killed_process_left_without_a_row_goes_after_a_day_and_nothing_else_does(
    database: Database, storage: Storage, owner: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "AT_ONCE", 2)
    listed = [upload(database, storage, owner, CHAT).storage_key for _ in range(3)]
    orphans, young = [f"files/file-orphan{number}" for number in range(3)], "files/file-just-stored"
    for key in (*orphans, young):
        storage.put_bytes(key, CHAT)
    two_days_ago = time.time() - 2 * 24 * 3600
    for key in (*listed, *orphans):
        os.utime(tmp_path / "storage" / key, (two_days_ago, two_days_ago))
    assert sorted(files.sweep(database, storage)) == orphans
    assert {stored.key for stored in storage.list("files")} == {*listed, young}
