"""Objects by key, on local disk or S3, whole or not at all. Keys are ours: no client's name ever becomes one."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

import obstore
from obstore.exceptions import GenericError, JoinError, NotFoundError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, ObjectStore, S3Store

from core.errors import NotFound

if TYPE_CHECKING:
    from obstore.store import RetryConfig

CHUNK_BYTES = 8 * 1024**2
"""Size of a part on its way in or out, and with `_PARTS_AT_ONCE` what bounds the memory of a transfer."""
AWAY = (GenericError, JoinError, PermissionDeniedError, UnauthenticatedError)
"""The storage is not there, is full, or does not let us in: the same can work later."""
_PARTS_AT_ONCE = 4
PATIENCE = timedelta(minutes=3)
"""How long a server of objects may refuse, for who has time."""
_KEY = re.compile(r"[A-Za-z0-9_.\-]+(?:/[A-Za-z0-9_.\-]+)*")
_BEGUN = re.compile(r".+#[0-9]+")
"""What an object's file is called while it comes, where objects are files. No key is like that, and none is listed."""


@dataclass(frozen=True)
class Stored:
    """An object that is there."""

    key: str
    bytes: int


class Storage:
    """A key either has the whole content of one successful put or is not there."""

    def __init__(self, store: ObjectStore, folder: Path | None = None) -> None:
        """`folder` is where the objects lie as files; None where they don't."""
        self._store, self._folder = store, folder

    @property
    def folder(self) -> Path | None:
        """Where the objects lie as files on this host; None where they don't."""
        return self._folder

    def put_file(self, key: str, path: Path) -> None:
        """Store a file's content."""
        with path.open("rb") as file:
            self.put_stream(key, iter(lambda: file.read(CHUNK_BYTES), b""))

    def put_bytes(self, key: str, content: bytes) -> None:
        """Store a few bytes."""
        self._make_room(_checked(key))
        obstore.put(self._store, key, content, use_multipart=False)
        self._settle(key)

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> int:
        """Store what `chunks` yields, holding a few parts in memory at most. Returns how many bytes that was.

        An exception from `chunks` leaves nothing under the key.
        """
        size = 0

        def counted() -> Iterator[bytes]:
            nonlocal size
            for chunk in chunks:
                size += len(chunk)
                yield chunk

        self._make_room(_checked(key))
        obstore.put(self._store, key, counted(), chunk_size=CHUNK_BYTES, max_concurrency=_PARTS_AT_ONCE)
        self._settle(key)
        return size

    def _make_room(self, key: str) -> None:
        """Make the folder of an object, where objects lie in folders, as `_settle` has the disk keep the object."""
        if self._folder is not None:
            _make((self._folder / key).parent)

    def _settle(self, key: str) -> None:
        """Have the disk keep it. Whoever is told that it is stored writes a row, which outlives a loss of power."""
        if self._folder is not None:
            for path in (self._folder / key, (self._folder / key).parent):
                _sync(path)

    def put_tree(self, prefix: str, folder: Path) -> list[Stored]:
        """Store every file beneath `folder`. A `manifest.json` at its top goes last: one without it was cut short.

        Raises ValueError for a link, whose file may lie anywhere on this host.
        """
        if link := next((path for path in folder.rglob("*") if path.is_symlink()), None):
            raise ValueError(f"{link.relative_to(folder).as_posix()!r} is a link, and only files are stored")
        files = sorted(
            (path for path in folder.rglob("*") if path.is_file()),
            key=lambda path: (path == folder / "manifest.json", path),
        )
        stored = [Stored(f"{prefix}/{path.relative_to(folder).as_posix()}", path.stat().st_size) for path in files]
        for path, target in zip(files, stored, strict=True):
            self.put_file(target.key, path)
        return stored

    def size(self, key: str) -> int:
        """Bytes of the object; NotFound if there is none."""
        try:
            return obstore.head(self._store, _checked(key))["size"]
        except (NotFoundError, FileNotFoundError) as error:
            raise _missing(key) from error

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except NotFound:
            return False
        return True

    def stream(self, key: str, start: int | None = None, end: int | None = None) -> Iterator[bytes]:
        """The object's bytes from `start` up to, not including, `end`. NotFound is raised at once."""
        first, last = start or 0, self.size(key) if end is None else end
        if last <= first:
            return iter(())
        try:
            result = obstore.get(self._store, _checked(key), options={"range": (first, last)})
        except (NotFoundError, FileNotFoundError) as error:
            raise _missing(key) from error
        return (bytes(chunk) for chunk in result.stream(min_chunk_size=CHUNK_BYTES // 8))

    def get_to(self, key: str, path: Path) -> None:
        """Write the object to a file, which is there under this name only once it is whole."""
        _checked(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        try:
            with part.open("wb") as file:
                for chunk in self.stream(key):
                    file.write(chunk)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def get_tree(self, prefix: str, folder: Path) -> None:
        """Write every object beneath `prefix` to a file beneath `folder`."""
        found = list(self.list(prefix))
        if not found:
            raise _missing(prefix)
        for stored in found:
            self.get_to(stored.key, folder / stored.key.removeprefix(prefix + "/"))

    def list(self, prefix: str) -> Iterator[Stored]:
        """The objects beneath `prefix`, in no order."""
        for batch in obstore.list(self._store, prefix=_checked(prefix)):
            yield from (Stored(meta["path"], meta["size"]) for meta in batch)

    def older(self, prefix: str, age: timedelta) -> Iterator[Stored]:
        """The objects beneath `prefix` that were put longer ago than this, in no order."""
        latest = datetime.now(UTC) - age
        for batch in obstore.list(self._store, prefix=_checked(prefix)):
            yield from (Stored(meta["path"], meta["size"]) for meta in batch if meta["last_modified"] < latest)

    def delete(self, key: str) -> None:
        """Remove an object; one that isn't there is fine."""
        try:
            obstore.delete(self._store, _checked(key))
        except (NotFoundError, FileNotFoundError):
            return

    def delete_tree(self, prefix: str) -> None:
        """Remove every object beneath `prefix`."""
        for stored in list(self.list(prefix)):
            self.delete(stored.key)
        self._remove_folder(prefix)

    def delete_some(self, prefix: str, *, most: int) -> bool:
        """Remove up to `most` objects beneath `prefix`, without a list of all of them; whether that was all."""
        found = list(islice(self.list(prefix), most + 1))
        for stored in found[:most]:
            self.delete(stored.key)
        if len(found) > most:
            return False
        self._remove_folder(prefix)
        return True

    def _remove_folder(self, prefix: str) -> None:
        """Remove what is left where objects are files: folders, and what puts left whose process was killed."""
        if self._folder is not None:
            shutil.rmtree(self._folder / prefix, ignore_errors=True)

    def remove_begun(self, age: timedelta) -> Sequence[str]:
        """Remove what puts left whose process was killed, and that is older than this. S3 shows no such thing."""
        latest, removed = (datetime.now(UTC) - age).timestamp(), list[str]()
        for folder, _, names in os.walk(self._folder) if self._folder is not None else ():
            for path in (Path(folder, name) for name in names if _BEGUN.fullmatch(name)):
                # Who puts it may be done at this moment.
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < latest:
                        path.unlink()
                        removed.append(path.relative_to(self._folder or folder).as_posix())
        return removed


@contextmanager
def nothing_unlisted(remove: Callable[[], object], *, listed: Callable[[], bool]) -> Iterator[None]:
    """Where what is done within fails, `remove` what it stored, unless it is `listed` all the same.

    A commit may have come through, and only word of it got lost. Where nobody can tell, it stays: bytes without a row
    cost room, a row without bytes costs the data.
    """
    try:
        yield
    except BaseException:
        # Whatever goes wrong here too: the first reason is the one to tell.
        with suppress(Exception):
            if not listed():
                remove()
        raise


def open_storage(url: str, *, patience: timedelta = PATIENCE) -> Storage:
    """The storage that `url` names: `file:///folder` or `s3://bucket/prefix`. S3 reads the usual `AWS_*` variables.

    A server that refuses, or is silent for 30 s, is asked again until `patience` is over.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        folder = Path(url2pathname(parts.path))
        _make(folder)
        return Storage(LocalStore(folder), folder)
    if parts.scheme == "s3":
        retry: RetryConfig = {"retry_timeout": patience}
        return Storage(S3Store(parts.netloc, prefix=parts.path.strip("/") or None, retry_config=retry))
    raise ValueError(f"storage URL {url!r} begins with neither file:// nor s3://")


def _make(folder: Path) -> None:
    """Make a folder and those above it, and have the disk keep each new one's name in the one that it is in."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def sha256_of(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checked(key: str) -> str:
    # Keys are made of our ids and of names that we check; this is the last door before a path.
    if not _KEY.fullmatch(key) or any(part in {".", ".."} for part in key.split("/")):
        raise ValueError(f"{key!r} is not a storage key")
    return key


def _missing(key: str) -> NotFound:
    return NotFound(f"The stored object {key!r} is missing.")
