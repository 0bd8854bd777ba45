"""Uploads: judged when they come in, kept whole or not at all. What a line means is `engine.data.format`'s business."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import IO, Any

from sqlalchemy import Select, bindparam, select, tuple_
from sqlalchemy.orm import Session

from core import audit, inspecting, paging, quotas
from core.db import Database, after_commit, directly
from core.errors import FileTooLarge, InUse, InvalidFile, InvalidRequest, NotFound
from core.keys import Account
from core.models import File, Job, database_now, new_id
from core.paging import Order, Page
from core.spec import JobSpec
from core.states import UNENDED
from core.storage import Storage, nothing_unlisted
from engine.data.format import Finding, Format, validate

TRAINING = ("fine-tune", "pretrain")
"""Purposes whose files are training data and are judged as such."""
TOKENIZER = "tokenizer"
"""Purpose of a `tokenizer.json`."""
PURPOSES = (*TRAINING, TOKENIZER, "user_data", "evals", "batch", "assistants", "vision")
"""What an upload may be for. Files for other than training and tokenizers are kept as they are."""
WRITTEN_HERE = ("fine-tune-results", "assistants_output", "batch_output")
"""Purposes in OpenAI's list of what its service writes itself."""
SHORTEST_STAY, LONGEST_STAY = 3600, 30 * 24 * 3600
"""Seconds after which a file may be told to expire."""
ORPHANED_AFTER = timedelta(days=1)
"""How long content may wait for its row: far longer than any commit takes."""
AT_ONCE = 100
"""Files that one transaction of keeping up looks at, so that nobody waits for long behind it."""

MOST_TOKENS = 2**20
"""Entries of a vocabulary: as many as a model may have."""

_CONTENT = "files"
"""Beneath it lies all content, in storage."""
_READ_BYTES = 1024**2
_MAX_NAME = 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class FileFacts:
    """What resolving a job needs to know of a file."""

    id: str
    bytes: int
    sha256: str
    storage_key: str
    format: Format | None
    """None for a file that isn't training data."""
    examples: int = 0
    characters: int = 0
    is_plain_text: bool = False
    """Not JSON Lines, but text as it is."""
    vocab_size: int | None = None
    """Of a tokenizer; None for other files."""
    container: str | None = None
    """Of a file of ids: parquet or megatron."""
    tokens: int | None = None
    """Of a file of ids; of others nobody knows before a base reads them."""
    max_id: int | None = None
    """The largest id of a file of ids."""
    longest: Mapping[str, int] | None = None
    """`line` and `tokens` of the longest document of a file of ids; None where nobody counted."""
    masked: bool = False
    """A file of ids says which of them are learned."""


def create(
    db: Database,
    storage: Storage,
    owner: Account,
    *,
    filename: str,
    purpose: str,
    chunks: Iterable[bytes],
    max_bytes: int,
    expires_after: int | None = None,
) -> File:
    """Take an upload in. Raises InvalidFile, with all findings, FileTooLarge or QuotaExceeded, and then keeps nothing.

    It has a transaction of its own, at the end: none is open while bytes come in.
    """
    chunks = quotas.within_storage(db, owner.project_id, chunks)
    with (
        taken_in(db, storage, owner, filename=filename, purpose=purpose, chunks=chunks, max_bytes=max_bytes) as file,
        db.session() as session,
    ):
        add(session, owner, file, expires_after=expires_after)
    return file


@contextmanager
def taken_in(
    db: Database,
    storage: Storage,
    owner: Account,
    *,
    filename: str,
    purpose: str,
    chunks: Iterable[bytes],
    max_bytes: int,
) -> Iterator[File]:
    """A file that was judged good and lies in storage, for the caller to `add` and commit; else it is removed again."""
    check_purpose(purpose)
    with tempfile.TemporaryFile(prefix="trainshed-upload-") as spool:
        size, sha256 = _receive(chunks, spool, max_bytes)
        report = _judge(spool, purpose, filename, most_ids=max_bytes)
        id_ = new_id("file")
        key = f"{_CONTENT}/{id_}"
        spool.seek(0)
        stored = storage.put_stream(key, _pieces(spool))
        assert stored == size, "what was received is what is kept"

    def listed() -> bool:
        with db.reading() as session:
            return session.get(File, id_) is not None

    with nothing_unlisted(partial(storage.delete, key), listed=listed):
        yield File(
            id=id_,
            project_id=owner.project_id,
            filename=label(filename),
            purpose=purpose,
            bytes=size,
            sha256=sha256,
            storage_key=key,
            report=report,
        )


def add(session: Session, owner: Account, file: File, *, expires_after: int | None) -> None:
    """Give the file its row, and the seconds it may stay, from now on. QuotaExceeded where it fits no more."""
    quotas.take_storage(session, owner.project_id, file.bytes)
    session.add(file)
    audit.record(session, owner, "file.created", file.id, filename=file.filename, bytes=file.bytes)
    session.flush()
    if expires_after is not None:
        file.expires_at = file.created_at + expires_after
        session.flush()


def check_purpose(purpose: str) -> None:
    """Raise InvalidRequest unless an upload may be for this."""
    if purpose in WRITTEN_HERE:
        raise InvalidRequest(f"{purpose} is for what a service writes itself; upload with another.", param="purpose")
    if purpose not in PURPOSES:
        raise InvalidRequest(
            f"There is no purpose {purpose[:64]!r}; use fine-tune or pretrain for training data.", param="purpose"
        )


def check_stay(seconds: int, *, param: str) -> None:
    """Raise InvalidRequest unless a file may be told to expire after so many seconds."""
    if not SHORTEST_STAY <= seconds <= LONGEST_STAY:
        raise InvalidRequest(
            f"A file may expire {SHORTEST_STAY} to {LONGEST_STAY} seconds (an hour to 30 days) after it was created.",
            param=param,
        )


def label(filename: str) -> str:
    """The client's name for a file, fit to be shown. It never becomes a path here."""
    last = re.split(r"[/\\]", _CONTROL.sub("", filename))[-1].strip()[-_MAX_NAME:]
    return "upload" if last in {"", ".", ".."} else last


def get(session: Session, owner: Account, file_id: str) -> File:
    """A file of the owner's project."""
    return _one(session, _own(owner, file_id), file_id)


def facts(session: Session, owner: Account, file_id: str, *, param: str | None = None) -> FileFacts:
    """What is known about a file. NotFound blames `param`, the field that named it."""
    file = directly(session, _FACTS, {"file": file_id, "project": owner.project_id}).one_or_none()
    if file is None:
        raise _missing(file_id, param)
    report = file.report
    return FileFacts(
        id=file_id,
        bytes=file.bytes,
        sha256=file.sha256,
        storage_key=file.storage_key,
        format=report.get("format"),
        examples=report.get("examples", 0),
        characters=report.get("characters", 0),
        is_plain_text=report.get("plain_text", False),
        vocab_size=report.get("vocab_size"),
        container=report.get("container"),
        tokens=report.get("tokens"),
        max_id=report.get("max_id"),
        longest=report.get("longest"),
        masked=report.get("masked", False),
    )


_FACTS = select(File.bytes, File.sha256, File.storage_key, File.report).where(
    File.id == bindparam("file"), File.project_id == bindparam("project")
)


def keep(session: Session, owner: Account, named: Iterable[tuple[str, str]]) -> None:
    """Let files stay until the commit, each given with the field that names it; NotFound where one is gone."""
    fields = {id_: param for param, id_ in named}
    # In order, so that two who want the same files do not wait for each other.
    kept = set(directly(session, _KEPT, {"files": sorted(fields), "project": owner.project_id}).scalars())
    for id_, param in fields.items():
        if id_ not in kept:
            raise _missing(id_, param)


_KEPT = (
    select(File.id)
    .where(File.id.in_(bindparam("files", expanding=True)), File.project_id == bindparam("project"))
    .order_by(File.id)
    .with_for_update(read=True)
)


def page(
    session: Session,
    owner: Account,
    *,
    after: str | None = None,
    limit: int = 100,
    order: Order = "desc",
    purpose: str | None = None,
) -> Page[File]:
    """The project's files by age."""
    query = select(File).where(File.project_id == owner.project_id)
    wanted = [] if purpose is None else [File.purpose == purpose]
    return paging.by_age(session, query, File.created_at, File.id, after=after, limit=limit, order=order, where=wanted)


def delete(session: Session, storage: Storage, owner: Account, file_id: str) -> None:
    """Remove a file; InUse while a job that hasn't ended needs it."""
    # Locked first: a job that is just being made with it either is seen below, or won't find the file.
    file = _one(session, _own(owner, file_id).with_for_update(), file_id)
    if job_id := _needed(session, owner.project_id).get(file_id):
        raise InUse(f"Job {job_id} still needs this file; cancel it or wait for its end.", param="file_id")
    _remove(session, storage, file)
    audit.record(session, owner, "file.deleted", file.id, filename=file.filename, bytes=file.bytes)
    session.flush()


def expire(db: Database, storage: Storage) -> list[str]:
    """Remove the files whose time has come, but for those that a job still needs; their ids. A few a transaction."""
    gone, after = list[str](), (0.0, "")
    while True:
        with db.session() as session:
            # In the order of their time, along its index: in that of ids it is a walk through all files.
            place = tuple_(File.expires_at, File.id)
            over = select(File).where(File.expires_at < database_now(), place > after)
            over = over.order_by(File.expires_at, File.id)
            # Locked first, as in `delete`. What is locked by others is about to be deleted, or needed by a new job.
            expired = session.scalars(over.limit(AT_ONCE).with_for_update(skip_locked=True)).all()
            gone += sorted(_remove_unneeded(session, storage, expired))
        if len(expired) < AT_ONCE:
            return gone
        after = (expired[-1].expires_at or 0.0, expired[-1].id)


def sweep(db: Database, storage: Storage, *, age: timedelta = ORPHANED_AFTER) -> list[str]:
    """Remove content that has no row: a process was killed after it had stored it. Their keys.

    Of an upload that goes on the content is younger than `age`: its row follows as soon as it is stored.
    """
    removed, old = list[str](), storage.older(_CONTENT, age)
    while keys := [stored.key for stored in islice(old, AT_ONCE)]:
        with db.reading() as session:
            listed = set(session.scalars(select(File.storage_key).where(File.storage_key.in_(keys))))
        for key in keys:
            if key not in listed:
                storage.delete(key)
                removed.append(key)
    return removed


def needed(session: Session, project_ids: Collection[str]) -> set[str]:
    """The files that unfinished jobs of these projects need."""
    return {id_ for project_id in project_ids for id_ in _needed(session, project_id)}


def remove_unneeded(session: Session, storage: Storage, file_ids: Collection[str]) -> set[str]:
    """Remove these files, but for those that a job needs by now; which went. Let it be `AT_ONCE` at most."""
    # Locked first, as in `delete`, and in one order.
    wanted = select(File).where(File.id.in_(file_ids)).order_by(File.id)
    return _remove_unneeded(session, storage, session.scalars(wanted.with_for_update(skip_locked=True)).all())


def _remove_unneeded(session: Session, storage: Storage, locked: Sequence[File]) -> set[str]:
    """What each job needs is read once for all of them."""
    needing = needed(session, {file.project_id for file in locked})
    gone = [file for file in locked if file.id not in needing]
    for file in gone:
        _remove(session, storage, file)
    return {file.id for file in gone}


def _needed(session: Session, project_id: str) -> dict[str, str]:
    """The files that the project's unfinished jobs need, each with one of those."""
    unfinished = session.execute(select(Job.id, Job.spec).where(Job.project_id == project_id, Job.state.in_(UNENDED)))
    return {id_: job_id for job_id, spec in unfinished for _, id_ in JobSpec.model_validate(spec).files()}


def _remove(session: Session, storage: Storage, file: File) -> None:
    session.delete(file)
    session.flush()
    after_commit(session, lambda: storage.delete(file.storage_key))


def content(storage: Storage, file: File, start: int | None = None, end: int | None = None) -> Iterator[bytes]:
    """The file's bytes from `start` up to, not including, `end`."""
    return storage.stream(file.storage_key, start, end)


def _own(owner: Account, file_id: str) -> Select[File]:
    return select(File).where(File.id == file_id, File.project_id == owner.project_id)


def _one(session: Session, query: Select[File], file_id: str) -> File:
    file = session.scalars(query).one_or_none()
    if file is None:
        raise _missing(file_id, "file_id")
    return file


def _missing(file_id: str, param: str | None) -> NotFound:
    return NotFound(f"There is no file {file_id!r}.", param=param)


def _receive(chunks: Iterable[bytes], spool: IO[bytes], max_bytes: int) -> tuple[int, str]:
    size, digest = 0, hashlib.sha256()
    for chunk in chunks:
        size += len(chunk)
        if size > max_bytes:
            raise FileTooLarge(
                f"The file is larger than {max_bytes:,} bytes, the most that this server takes; split it."
            )
        digest.update(chunk)
        spool.write(chunk)
    return size, digest.hexdigest()


def _pieces(spool: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: spool.read(_READ_BYTES), b"")


def _judge(spool: IO[bytes], purpose: str, filename: str, *, most_ids: int) -> dict[str, Any]:
    """What is in it, as `GET /v1/files/{id}/report` shows it."""
    spool.seek(0)
    if purpose == TOKENIZER:
        return _tokenizer(spool)
    if purpose not in TRAINING:
        return {"format": None, "errors": [], "warnings": []}
    if inspecting.holds_ids(spool.read(inspecting.HEAD_BYTES)):
        spool.seek(0)
        told = inspecting.inspect(spool, most_ids=most_ids)
        _refuse_any([Finding(**error) for error in told["errors"]])
        return told
    spool.seek(0)
    report = validate(_pieces(spool), name_hint=filename)
    _refuse_any(report.errors)
    spool.seek(0)
    return report.to_dict() | {"plain_text": report.format == "text" and not _is_json(spool)}


def _refuse_any(errors: Sequence[Finding]) -> None:
    if errors:
        more = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
        raise InvalidFile(f"{errors[0]}{more}", errors=[finding.to_dict() for finding in errors])


def _is_json(spool: IO[bytes]) -> bool:
    """Whether text that was found good is JSON Lines: then its first line that isn't blank is an object."""
    for raw in spool:
        line = raw.removeprefix(b"\xef\xbb\xbf").strip()
        if line:
            try:
                return isinstance(json.loads(line), dict)
            except ValueError:
                return False
    return False


def _tokenizer(spool: IO[bytes]) -> dict[str, Any]:
    try:
        content = json.load(spool)
        added = [token["id"] for token in content.get("added_tokens") or ()]
        size = max(_token_id(token) for token in (*content["model"]["vocab"].values(), *added)) + 1
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidFile("This is not a tokenizer.json of Hugging Face's tokenizers with a vocabulary.") from error
    return {"format": None, "vocab_size": size, "errors": [], "warnings": []}


def _token_id(value: object) -> int:
    # Exactly: a truth value is an int to Python, and an infinity is a number to its JSON.
    if type(value) is int and 0 <= value < MOST_TOKENS:
        return value
    raise ValueError(f"{value!r} is not the id of a token")
