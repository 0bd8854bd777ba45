"""Files that come in parts: each part is kept by itself, so that what was interrupted goes on where it was.

What the parts make together is judged by `core.files`, as if it had come in at once.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Select, and_, delete, or_, select, update
from sqlalchemy.orm import Session

from core import audit, files, inspecting, paging, quotas
from core.db import Database, after_commit
from core.errors import FileTooLarge, InvalidMove, InvalidRequest, NotFound
from core.keys import Account
from core.models import File, Upload, UploadPart, database_now, new_id
from core.paging import Order, Page
from core.storage import Storage, nothing_unlisted

PART_BYTES = 64 * 1024**2
"""Largest part."""
MOST_PARTS = 10_000
"""Parts of one upload, those that were sent twice among them."""
LIFETIME_SECONDS = 3600.0
GRACE_SECONDS = 900.0
"""Beyond it, before the parts go: for a completion that began in time."""
REMEMBERED_SECONDS = 24 * 3600.0
"""How long after its time it is still told what became of an upload."""
SPARE = 2
"""An upload takes so many times its bytes in all: a part whose answer got lost is sent again, under another id."""

PENDING, COMPLETED, CANCELLED, EXPIRED = "pending", "completed", "cancelled", "expired"
ENDED = (COMPLETED, CANCELLED, EXPIRED)
_MD5 = re.compile(r"[0-9a-fA-F]{32}")


# Beginning


def create(
    session: Session,
    owner: Account,
    *,
    filename: str,
    purpose: str,
    num_bytes: int,
    max_bytes: int,
    file_expires_after: int | None = None,
) -> Upload:
    """Announce a file of exactly so many bytes."""
    files.check_purpose(purpose)
    if num_bytes > max_bytes:
        raise FileTooLarge(
            f"The file has {num_bytes:,} bytes and this server takes {max_bytes:,} at most; split it.", param="bytes"
        )
    upload = Upload(
        id=new_id("upload"),
        project_id=owner.project_id,
        filename=files.label(filename),
        purpose=purpose,
        bytes=num_bytes,
        file_expires_after=file_expires_after,
        expires_at=0.0,
    )
    if (left := quotas.storage_left(session, owner.project_id)) is not None and num_bytes > left:
        raise quotas.storage_full(session, owner.project_id)
    session.add(upload)
    audit.record(session, owner, "upload.created", upload.id, filename=upload.filename, bytes=num_bytes)
    session.flush()
    upload.expires_at = upload.created_at + LIFETIME_SECONDS
    session.flush()
    return upload


# Looking


def get(session: Session, owner: Account, upload_id: str) -> Upload:
    """An upload of the owner's project."""
    upload = session.scalars(_own(owner, upload_id).execution_options(populate_existing=True)).one_or_none()
    if upload is None:
        raise NotFound(f"There is no upload {upload_id!r}.")
    return upload


def page(
    session: Session, owner: Account, *, after: str | None = None, limit: int = 20, wanted: str | None = None
) -> Page[Upload]:
    """The project's uploads, newest first; of one status where it is said."""
    query = select(Upload).where(Upload.project_id == owner.project_id)
    late = Upload.expires_at < database_now()
    of_status = {
        PENDING: (Upload.status == PENDING, ~late),
        EXPIRED: (or_(Upload.status == EXPIRED, and_(Upload.status == PENDING, late)),),
    }
    where = () if wanted is None else of_status.get(wanted, (Upload.status == wanted,))
    return paging.by_age(session, query, Upload.created_at, Upload.id, after=after, limit=limit, where=where)


def status(session: Session, upload: Upload) -> str:
    """Where it stands: its time is over when it is, not when upkeep comes by."""
    return EXPIRED if upload.status == PENDING and _is_late(session, upload) else upload.status


def file(session: Session, upload: Upload) -> File | None:
    """What a completed upload became; None before, and once that was deleted."""
    return None if upload.file_id is None else session.get(File, upload.file_id)


def parts(
    session: Session, owner: Account, upload_id: str, *, after: str | None, limit: int, order: Order
) -> Page[UploadPart]:
    """The parts that are there, by age; those of an upload that has ended are gone."""
    get(session, owner, upload_id)
    query = select(UploadPart).where(UploadPart.upload_id == upload_id)
    return paging.by_age(
        session, query, UploadPart.created_at, UploadPart.id, after=after, limit=limit, order=order
    )  # fmt: skip


def check_open(session: Session, owner: Account, upload_id: str) -> Upload:
    """An upload that takes parts; InvalidMove if it is over."""
    upload = get(session, owner, upload_id)
    if (now := status(session, upload)) != PENDING:
        raise _over(now)
    return upload


def _own(owner: Account, upload_id: str) -> Select[Upload]:
    return select(Upload).where(Upload.id == upload_id, Upload.project_id == owner.project_id)


def _is_late(session: Session, upload: Upload) -> bool:
    return bool(session.scalar(select(database_now() > upload.expires_at)))


def _over(now: str) -> InvalidMove:
    return InvalidMove(f"The upload is {now}; create another one.")


# Filling


def add_part(db: Database, storage: Storage, owner: Account, upload_id: str, chunks: Iterable[bytes]) -> UploadPart:
    """Keep a part. It is there, whole, once this returns; of one that is refused nothing is."""
    id_ = new_id("part")
    key = key_of(upload_id, id_)
    digest = hashlib.md5(usedforsecurity=False)

    def listed() -> bool:
        with db.reading() as session:
            return session.get(UploadPart, id_) is not None

    with nothing_unlisted(partial(storage.delete, key), listed=listed):
        size = storage.put_stream(key, _digested(quotas.within_storage(db, owner.project_id, chunks), digest))
        if size == 0:
            raise InvalidRequest("The part is empty; leave it out.", param="data")
        part = UploadPart(id=id_, upload_id=upload_id, bytes=size, md5=digest.hexdigest())
        with db.session() as session:
            _count(session, owner, upload_id, size)
            quotas.take_storage(session, owner.project_id, size)
            session.add(part)
            session.flush()
    return part


def _count(session: Session, owner: Account, upload_id: str, size: int) -> None:
    """Let an open upload have another part, or say why it can't."""
    counted = session.scalar(
        update(Upload)
        .where(
            Upload.id == upload_id,
            Upload.project_id == owner.project_id,
            Upload.status == PENDING,
            Upload.expires_at >= database_now(),
            Upload.received + size <= SPARE * Upload.bytes,
            Upload.num_parts < MOST_PARTS,
        )
        .values(received=Upload.received + size, num_parts=Upload.num_parts + 1)
        .returning(Upload.id)
    )
    if counted is not None:
        return
    upload = check_open(session, owner, upload_id)
    if upload.num_parts >= MOST_PARTS:
        raise InvalidRequest(f"An upload has {MOST_PARTS:,} parts at most; send larger ones.", param="data")
    raise FileTooLarge(
        f"The upload was announced with {upload.bytes:,} bytes and takes {SPARE} times that, for parts that are sent "
        f"again; {upload.received:,} bytes came already, and {size:,} now.",
        param="data",
    )


def _digested(chunks: Iterable[bytes], digest: hashlib._Hash) -> Iterator[bytes]:
    for chunk in chunks:
        digest.update(chunk)
        yield chunk


def key_of(upload_id: str, part_id: str) -> str:
    """Where a part lies in storage."""
    return f"{_prefix(upload_id)}/{part_id}"


def _prefix(upload_id: str) -> str:
    return f"uploads/{upload_id}"


# Ending


@dataclass(frozen=True)
class Gathered:
    """The parts of an upload in the order that makes the file, found to be what was announced."""

    upload: Upload
    part_ids: tuple[str, ...]

    def may_hold_ids(self, storage: Storage) -> bool:
        """Whether judging it starts a process."""
        if self.upload.purpose not in files.TRAINING or self.upload.status != PENDING:
            return False
        head = b""
        with suppress(NotFound):
            for chunk in self.chunks(storage, None):
                head += chunk
                if len(head) >= inspecting.HEAD_BYTES:
                    break
        return inspecting.may_hold_ids(head[: inspecting.HEAD_BYTES])

    def chunks(self, storage: Storage, md5: str | None) -> Iterator[bytes]:
        """The file, one part after another; InvalidRequest at its end unless it has this `md5`."""
        digest = hashlib.md5(usedforsecurity=False)
        for part_id in self.part_ids:
            yield from _digested(storage.stream(key_of(self.upload.id, part_id)), digest)
        if md5 is not None and digest.hexdigest() != md5.lower():
            raise InvalidRequest(
                f"The parts in this order have the md5 {digest.hexdigest()}; the upload stays open, so that the wrong "
                "part can be sent again, and `GET …/parts` tells the md5 of each.",
                param="md5",
            )


def gather(session: Session, owner: Account, upload_id: str, part_ids: Sequence[str], *, md5: str | None) -> Gathered:
    """Check the parts before any of them is read. What was completed already from the same parts is no error."""
    upload = get(session, owner, upload_id)
    asked = tuple(part_ids)
    if upload.status == COMPLETED and upload.part_ids == list(asked):
        return Gathered(upload, asked)
    upload = check_open(session, owner, upload_id)
    if md5 is not None and not _MD5.fullmatch(md5):
        raise InvalidRequest("An md5 is 32 hexadecimal digits.", param="md5")
    if not asked:
        raise InvalidRequest("Name the parts that make the file, in order.", param="part_ids")
    if (most := Counter(asked).most_common(1)[0])[1] > 1:
        twice = most[0]
        raise InvalidRequest(f"The part {twice[:64]!r} is named twice.", param="part_ids")
    there = session.execute(select(UploadPart.id, UploadPart.bytes).where(UploadPart.upload_id == upload_id))
    sizes: dict[str, int] = {part_id: size for part_id, size in there}
    if unknown := next((part_id for part_id in asked if part_id not in sizes), None):
        raise InvalidRequest(f"The upload has no part {unknown[:64]!r}; `GET …/parts` lists them.", param="part_ids")
    total = sum(sizes[part_id] for part_id in asked)
    if total != upload.bytes:
        raise InvalidRequest(
            f"These parts have {total:,} bytes together, and the upload was announced with {upload.bytes:,}.",
            param="part_ids",
        )
    return Gathered(upload, asked)


class _OvertakenError(Exception):
    """Somebody else ended the upload meanwhile."""


def complete(
    db: Database, storage: Storage, owner: Account, gathered: Gathered, *, md5: str | None, max_bytes: int
) -> None:
    """Make the file, row and end of the upload in one transaction; the parts are removed after it.

    Raises InvalidFile, with all findings, and leaves the upload open. Of two at once that name the same parts, one
    makes the file, and both are told it.
    """
    upload = gathered.upload
    if upload.status == COMPLETED:
        return
    try:
        with (
            files.taken_in(
                db,
                storage,
                owner,
                filename=upload.filename,
                purpose=upload.purpose,
                chunks=gathered.chunks(storage, md5),
                max_bytes=max_bytes,
            ) as made,
            db.session() as session,
        ):
            # The parts first: they count no longer where the file does.
            if not _end(session, upload.id, COMPLETED, file_id=made.id, part_ids=list(gathered.part_ids)):
                raise _OvertakenError
            files.add(session, owner, made, expires_after=upload.file_expires_after)
            audit.record(session, owner, "upload.completed", upload.id, file=made.id)
            after_commit(session, lambda: storage.delete_tree(_prefix(upload.id)))
    except (_OvertakenError, NotFound):
        # Parts that are missing were removed by whoever ended the upload.
        _check_same_end(db, owner, gathered)


def _check_same_end(db: Database, owner: Account, gathered: Gathered) -> None:
    with db.reading() as session:
        now = get(session, owner, gathered.upload.id)
        if now.status == PENDING:
            raise InvalidMove("A part of the upload is gone from storage; create another upload.")
        if now.status != COMPLETED or now.part_ids != list(gathered.part_ids):
            raise _over(now.status)


def cancel(session: Session, storage: Storage, owner: Account, upload_id: str) -> Upload:
    """Give the upload up, with its parts. Asking twice is fine."""
    upload = get(session, owner, upload_id)
    if _end(session, upload_id, CANCELLED):
        audit.record(session, owner, "upload.cancelled", upload_id)
        after_commit(session, lambda: storage.delete_tree(_prefix(upload_id)))
    upload = get(session, owner, upload_id)
    if upload.status != CANCELLED:
        raise InvalidMove(f"The upload is {upload.status} already; there is nothing left to cancel.")
    return upload


def _end(session: Session, upload_id: str, to: str, **values: object) -> bool:
    """End an upload that is pending; False if it is no longer. Its parts' rows go with it."""
    ended = session.scalar(
        update(Upload)
        .where(Upload.id == upload_id, Upload.status == PENDING)
        .values({"status": to, **values})
        .returning(Upload.id)
    )
    if ended is None:
        return False
    session.execute(delete(UploadPart).where(UploadPart.upload_id == upload_id))
    return True


# Keeping up


def expire(db: Database, storage: Storage) -> list[str]:
    """End the uploads whose hour is over, with their parts; their ids. A few a transaction."""
    is_late = (Upload.status == PENDING, Upload.expires_at < database_now() - GRACE_SECONDS)
    all_ended = list[str]()
    while True:
        with db.session() as session:
            late = session.scalars(select(Upload.id).where(*is_late).limit(files.AT_ONCE)).all()
            ended = [id_ for id_ in late if _end(session, id_, EXPIRED)]
            for id_ in ended:
                after_commit(session, partial(storage.delete_tree, _prefix(id_)))
        all_ended += ended
        if len(late) < files.AT_ONCE:
            return all_ended


def forget(db: Database, storage: Storage) -> None:
    """Let go of uploads that ended long ago, and of what a process that was killed left of them in storage."""
    with db.reading() as session:
        is_old = (Upload.status.in_(ENDED), Upload.expires_at < database_now() - REMEMBERED_SECONDS)
        old = session.scalars(select(Upload.id).where(*is_old)).all()
    for id_ in old:
        storage.delete_tree(_prefix(id_))
        with db.session() as session:
            session.execute(delete(Upload).where(Upload.id == id_, Upload.status != PENDING))
