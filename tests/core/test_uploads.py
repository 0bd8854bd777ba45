"""Uploads in parts: what makes a file is decided once, whoever asks at once; what ended leaves nothing behind."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from sqlalchemy import func, select, update

from core import files, uploads
from core.db import Database
from core.errors import FileTooLarge, InvalidFile, InvalidMove, InvalidRequest, NotFound
from core.keys import DEFAULT_PROJECT, Account
from core.models import File, Job, Upload, UploadPart, database_now
from core.states import JobState
from core.storage import Storage
from tests import make

MAX_BYTES = 1000
DEADLINE_SECONDS = 20
PARTS = (b"Once upon ", b"a ", b"time.")
TEXT = b"".join(PARTS)


def begin(database: Database, owner: Account, num_bytes: int = len(TEXT), **fields: str) -> str:
    with database.session() as session:
        values = {"filename": "story.txt", "purpose": "pretrain"} | fields
        return uploads.create(session, owner, num_bytes=num_bytes, max_bytes=MAX_BYTES, **values).id


def send(
    database: Database, storage: Storage, owner: Account, upload: str, parts: Sequence[bytes] = PARTS
) -> list[str]:
    return [uploads.add_part(database, storage, owner, upload, [part]).id for part in parts]


def complete(
    database: Database, storage: Storage, owner: Account, upload: str, part_ids: Sequence[str], md5: str | None = None
) -> File:
    with database.reading() as session:
        gathered = uploads.gather(session, owner, upload, part_ids, md5=md5)
    uploads.complete(database, storage, owner, gathered, md5=md5, max_bytes=MAX_BYTES)
    with database.reading() as session:
        row = uploads.get(session, owner, upload)
        assert uploads.status(session, row) == "completed"
        file = uploads.file(session, row)
    assert file is not None
    return file


def stored(storage: Storage) -> list[str]:
    return sorted(found.key for found in storage.list("uploads"))


def make_late(database: Database, upload: str, seconds: float = 1) -> None:
    with database.session() as session:
        session.execute(update(Upload).where(Upload.id == upload).values(expires_at=database_now() - seconds))


def test_parts_become_the_file_in_the_order_that_is_asked_for(
    database: Database, storage: Storage, owner: Account
) -> None:
    upload = begin(database, owner)
    third, first, second = send(database, storage, owner, upload, [PARTS[2], PARTS[0], PARTS[1]])
    file = complete(database, storage, owner, upload, [first, second, third], hashlib.md5(TEXT).hexdigest().upper())
    assert b"".join(files.content(storage, file)) == TEXT
    assert (file.sha256, file.filename, file.purpose) == (hashlib.sha256(TEXT).hexdigest(), "story.txt", "pretrain")
    assert stored(storage) == []


class Meeting(Storage):
    """A storage in which two files are put at the same moment."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage._store)
        self.barrier = Barrier(2)

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> int:
        if key.startswith("files/"):
            self.barrier.wait(DEADLINE_SECONDS)
        return super().put_stream(key, chunks)


def test_of_two_completions_at_once_one_makes_the_file_and_both_are_told_it(
    database: Database, storage: Storage, owner: Account
) -> None:
    upload = begin(database, owner)
    ids = send(database, storage, owner, upload)
    meeting = Meeting(storage)
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(lambda _: complete(database, meeting, owner, upload, ids).id, range(2)))
    assert told[0] == told[1]
    with database.reading() as session:
        assert session.scalars(select(File.id)).all() == told[:1]
    assert [found.key for found in storage.list("files")] == [f"files/{told[0]}"]


def test_a_completion_is_told_that_the_upload_was_cancelled_meanwhile(
    database: Database, storage: Storage, owner: Account
) -> None:
    upload = begin(database, owner)
    with database.reading() as session:
        gathered = uploads.gather(
            session, owner, upload, send(database, storage, owner, upload), md5=None
        )  # fmt: skip
    with database.session() as session:
        uploads.cancel(session, storage, owner, upload)
    with pytest.raises(InvalidMove, match="cancelled"):
        uploads.complete(database, storage, owner, gathered, md5=None, max_bytes=MAX_BYTES)
    assert list(storage.list("files")) == []


def test_completing_again_from_the_same_parts_answers_the_same_file(
    database: Database, storage: Storage, owner: Account
) -> None:
    upload = begin(database, owner)
    ids = send(database, storage, owner, upload)
    assert complete(database, storage, owner, upload, ids).id == complete(database, storage, owner, upload, ids).id
    with database.reading() as session, pytest.raises(InvalidMove, match="completed"):
        uploads.gather(session, owner, upload, ids[:2], md5=None)
    with pytest.raises(InvalidMove, match="completed"):
        send(database, storage, owner, upload)
    assert stored(storage) == []


@pytest.mark.parametrize(
    ("choose", "md5", "said", "param"),
    [
        pytest.param(lambda ids: [], None, "Name the parts", "part_ids", id="none"),
        pytest.param(lambda ids: [*ids[:2], ids[0]], None, "twice", "part_ids", id="one twice"),
        pytest.param(lambda ids: [*ids[:2], "part-0"], None, "no part 'part-0'", "part_ids", id="an unknown one"),
        pytest.param(lambda ids: ids[:2], None, "12 bytes together, and the upload was announced with 17", "part_ids",
                     id="too few bytes"),
        pytest.param(lambda ids: ids, "0" * 32, hashlib.md5(TEXT).hexdigest(), "md5", id="another md5"),
        pytest.param(lambda ids: ids, "x" * 32, "32 hexadecimal digits", "md5", id="no md5 at all"),
        pytest.param(lambda ids: ids[::-1], hashlib.md5(TEXT).hexdigest(), "md5", "md5", id="another order"),
    ],
)  # fmt: skip
def test_what_does_not_make_the_announced_file_is_refused_and_the_upload_stays_open(
    database: Database, storage: Storage, owner: Account, choose, md5, said, param
) -> None:
    upload = begin(database, owner)
    ids = send(database, storage, owner, upload)
    with pytest.raises(InvalidRequest, match=said) as refused:
        complete(database, storage, owner, upload, choose(ids), md5)
    assert refused.value.param == param
    assert list(storage.list("files")) == []
    assert complete(database, storage, owner, upload, ids)


def test_a_part_of_another_upload_is_as_unknown_as_one_that_is_nowhere(
    database: Database, storage: Storage, owner: Account
) -> None:
    mine, other = begin(database, owner), begin(database, owner)
    (foreign,) = send(database, storage, owner, other, [TEXT])
    with pytest.raises(InvalidRequest, match="has no part"):
        complete(database, storage, owner, mine, [foreign])


def test_a_file_that_is_judged_bad_leaves_the_upload_open(database: Database, storage: Storage, owner: Account) -> None:
    good, bad = b'{"text": "a"}\n', b'{"text": 1}\n'
    upload = begin(database, owner, len(good) * 2, filename="a.jsonl")
    first, wrong, right = send(database, storage, owner, upload, [good, b" " + bad + b"\n", good])
    with pytest.raises(InvalidFile, match="line 2"):
        complete(database, storage, owner, upload, [first, wrong])
    assert complete(database, storage, owner, upload, [first, right]).report["examples"] == 2


def test_an_upload_takes_twice_what_was_announced_and_no_more(
    database: Database, storage: Storage, owner: Account
) -> None:
    upload = begin(database, owner)
    send(database, storage, owner, upload, [TEXT, TEXT])
    with pytest.raises(FileTooLarge, match="17 bytes"):
        send(database, storage, owner, upload, [b"!"])
    assert len(stored(storage)) == 2
    with pytest.raises(InvalidRequest, match="empty"):
        send(database, storage, owner, begin(database, owner), [b""])
    with pytest.raises(FileTooLarge, match=r"1,001 bytes"):
        begin(database, owner, MAX_BYTES + 1)


def test_an_upload_whose_hour_is_over_takes_nothing_and_leaves_nothing(
    database: Database, storage: Storage, owner: Account
) -> None:
    upload, open_one = begin(database, owner), begin(database, owner)
    ids = send(database, storage, owner, upload)
    kept = send(database, storage, owner, open_one)
    make_late(database, upload)
    with database.reading() as session:
        assert uploads.status(session, uploads.get(session, owner, upload)) == "expired"
    for late in (
        lambda: send(database, storage, owner, upload),
        lambda: complete(database, storage, owner, upload, ids),
    ):
        with pytest.raises(InvalidMove, match="expired"):
            late()
    assert uploads.expire(database, storage) == []
    make_late(database, upload, uploads.GRACE_SECONDS + 1)
    assert uploads.expire(database, storage) == [upload]
    assert len(stored(storage)) == len(kept)
    with database.reading() as session:
        assert uploads.get(session, owner, upload).status == "expired"
        assert session.scalar(select(func.count()).where(UploadPart.upload_id == upload)) == 0


def test_a_day_later_an_upload_is_forgotten_with_what_a_killed_process_left_of_it(
    database: Database, storage: Storage, owner: Account
) -> None:
    upload, open_one = begin(database, owner), begin(database, owner)
    with database.session() as session:
        uploads.cancel(session, storage, owner, upload)
        uploads.cancel(session, storage, owner, upload)
    storage.put_bytes(f"uploads/{upload}/part-1", b"left behind")
    uploads.forget(database, storage)
    assert stored(storage)
    for one in (upload, open_one):
        make_late(database, one, uploads.REMEMBERED_SECONDS + 1)
    uploads.forget(database, storage)
    assert stored(storage) == []
    with database.reading() as session:
        uploads.get(session, owner, open_one)
        with pytest.raises(NotFound):
            uploads.get(session, owner, upload)


def test_nobody_sees_or_fills_another_projects_upload(database: Database, storage: Storage, owner: Account) -> None:
    upload = begin(database, owner)
    with database.session() as session:
        stranger = Account(make.project(session).id, "key-1", frozenset({"admin"}))
    with pytest.raises(NotFound):
        send(database, storage, stranger, upload)
    with database.session() as session, pytest.raises(NotFound):
        uploads.cancel(session, storage, stranger, upload)
    assert stored(storage) == []


def test_a_file_expires_with_its_content_but_not_before_the_job_that_needs_it_has_ended(
    database: Database, storage: Storage, owner: Account
) -> None:
    made = {
        name: files.create(
            database, storage, owner, filename=name, purpose="pretrain", chunks=[TEXT], max_bytes=MAX_BYTES,
            expires_after=3600 if name != "stays" else None,
        )
        for name in ("needed", "unneeded", "stays", "later")
    }  # fmt: skip
    assert made["needed"].expires_at == made["needed"].created_at + 3600
    with database.session() as session:
        job = make.job(session, spec=make.spec(data={"train": [made["needed"].id]}).model_dump(mode="json"))
        over = [made[name].id for name in ("needed", "unneeded")]
        session.execute(update(File).where(File.id.in_(over)).values(expires_at=database_now() - 1))
    assert files.expire(database, storage) == [made["unneeded"].id]
    assert len(list(storage.list("files"))) == 3
    with database.session() as session:
        session.execute(update(Job).where(Job.id == job.id).values({"state": JobState.SUCCEEDED}))
    assert files.expire(database, storage) == [made["needed"].id]
    left = sorted(made[name].id for name in ("stays", "later"))
    assert sorted(found.key.removeprefix("files/") for found in storage.list("files")) == left
    with database.reading() as session:
        assert sorted(session.scalars(select(File.id).where(File.project_id == DEFAULT_PROJECT))) == left


def test_what_expires_goes_a_few_at_a_time_and_all_in_the_end(
    database: Database, storage: Storage, owner: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "AT_ONCE", 2)
    made = [
        files.create(database, storage, owner, filename="a", purpose="pretrain", chunks=[TEXT], max_bytes=MAX_BYTES).id
        for _ in range(5)
    ]
    with database.session() as session:
        # The first ones that are looked at are needed, and hold up none of the others.
        needed = sorted(made)[:2]
        make.job(session, spec=make.spec(data={"train": needed}).model_dump(mode="json"))
        # One moment for all: PostgreSQL's clock goes on from row to row.
        moment = session.scalars(select(database_now())).one() - 1
        session.execute(update(File).where(File.id.in_(made)).values(expires_at=moment))
    begun = [begin(database, owner) for _ in range(5)]
    for upload in begun:
        make_late(database, upload, uploads.GRACE_SECONDS + 1)
    assert files.expire(database, storage) == sorted(made)[2:]
    assert sorted(uploads.expire(database, storage)) == sorted(begun)
