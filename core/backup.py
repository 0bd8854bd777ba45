"""A copy of all that can't be made again, taken while the service runs, and a service made of such a copy.

That is the database, at one moment, and each object in storage that its rows name. The database comes first: what a row
names was stored before it. What is removed before it is copied, as old checkpoints are, shows as missing; then the
database is looked at once more, and only what is new since is copied. So a backup that has its `backup.json` is whole.
In a restoration the database comes last.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, inspect, make_url, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from core import downloads, joblogs, schema, uploads
from core.db import open_engine
from core.errors import NotFound
from core.models import Artifact, Checkpoint, File, HubDownload, UploadPart
from core.settings import Settings
from core.storage import Storage, open_storage, sha256_of

ABOUT, STORAGE = "backup.json", "storage"
SQLITE, POSTGRESQL = "database.db", "database.dump"
FORMAT = 1
TRIES = 5
"""How often it is begun again because something went while it was copied."""


class Refused(Exception):
    """It can't be done here and now; the text says what would help."""


class _MissingError(Exception):
    """Objects that rows name are gone, or are others: what was read of the database is out of date."""

    def __init__(self, what: Sequence[str]) -> None:
        super().__init__(what[0])
        self.what = frozenset(what)


@dataclass(frozen=True)
class Named:
    """Objects that belong to one row."""

    at: str
    """The key, or of a checkpoint what those of its files begin with."""
    bytes: int
    """Of all of them together."""
    sha256: str | None = None
    """Where there is one object, and the row knows it."""
    is_tree: bool = False


@dataclass(frozen=True)
class Copied:
    """An object that the backup has. What is stored under a key stays as it is, so this is found out once."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Report:
    """What a backup holds."""

    objects: int
    bytes: int


def backup(settings: Settings, into: Path) -> Report:
    """Fill the folder `into`, which must be new or empty. Raises Refused."""
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise Refused(f"{into} is there already; name a folder that is new.")
    into.mkdir(parents=True, exist_ok=True)
    try:
        into.chmod(0o700)
    except OSError as error:
        raise Refused(f"{into} can't be closed to others ({error.strerror}); name a folder of your own.") from error
    storage, copies, missing = open_storage(settings.storage), _Copies(into / STORAGE), list[_MissingError]()
    while len(missing) < TRIES:
        try:
            with _snapshot(settings, into) as session:
                objects = copies.take(storage, _named(session))
                revision = session.scalars(text("SELECT version_num FROM alembic_version")).one()
        except _MissingError as error:
            missing.append(error)
            continue
        objects |= copies.take_logs(storage)
        _remove_others(into / STORAGE, objects)
        kept = next(name for name in (SQLITE, POSTGRESQL) if (into / name).exists())
        about = {
            "format": FORMAT,
            "revision": revision,
            "database": {"name": kept, "sha256": sha256_of(into / kept)},
            "objects": {key: asdict(each) for key, each in objects.items()},
        }
        # Last: a folder without it was cut short.
        (into / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
        return Report(len(objects), sum(each.bytes for each in objects.values()))
    if always := sorted(frozenset.intersection(*(each.what for each in missing))):
        more = f" ({len(always) - 1} more are not there either)" if always[1:] else ""
        raise Refused(
            f"{always[0]}{more}, and {TRIES - 1} newer looks at the database did not change that: rows name what was "
            "removed or changed in storage by other hands. Put it back, or remove what names it, such as its job."
        )
    raise Refused(
        f"In each of {TRIES} looks something else was removed before it was copied, at last: {missing[-1]}. "
        "Checkpoints go faster than they are copied: try again at a quieter time, or let jobs keep more "
        "(training.keep_checkpoints)."
    )


def restore(settings: Settings, source: Path) -> Report:
    """Make what a backup holds the data of a service that has none yet, of this version's form. Raises Refused."""
    try:
        about = json.loads((source / ABOUT).read_text())
        if about["format"] != FORMAT:
            raise Refused(f"The backup has the format {about['format']}, and this version reads {FORMAT}.")
        objects: Mapping[str, Any] = about["objects"]
    except (OSError, ValueError, KeyError) as error:
        raise Refused(f"{source} is no backup, or was cut short: {ABOUT} can't be read ({error}).") from error
    kept = SQLITE if settings.database.startswith("sqlite") else POSTGRESQL
    if not (source / kept).is_file():
        raise Refused(f"The backup has no {kept}: it is of the other kind of database than DATABASE_URL names.")
    # One that was made by an earlier version does not say it.
    if (said := about.get("database")) is not None and sha256_of(source / kept) != said["sha256"]:
        raise Refused(f"{source / kept} is damaged; take another backup.")
    if settings.database_url is None:
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_empty(settings)
    if kept == SQLITE:
        try:
            _file_of(settings).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(
                f"There can be no database at {_file_of(settings)} ({error}); is DATABASE_URL right?"
            ) from error
    storage = open_storage(settings.storage)
    for key, each in objects.items():
        path = source / STORAGE / key
        if not path.is_file() or sha256_of(path) != each["sha256"]:
            raise Refused(f"{path} is missing or damaged; take another backup.")
        storage.put_file(key, path)
    if kept == SQLITE:
        _put_sqlite(source / SQLITE, _file_of(settings))
    else:
        _run(settings, "pg_restore", "--no-owner", "--exit-on-error", "--single-transaction", str(source / POSTGRESQL))
    schema.upgrade(settings.database)
    return Report(len(objects), sum(each["bytes"] for each in objects.values()))


# The database


@contextmanager
def _snapshot(settings: Settings, into: Path) -> Iterator[Session]:
    """Copy the database, and read in what was copied, or will be once this is over without an error."""
    url = make_url(settings.database)
    if url.drivername.startswith("sqlite"):
        if not url.database or not Path(url.database).is_file():
            raise Refused(f"There is no database at {url.database}; is TRAINSHED_DATA_DIR right?")
        (into / SQLITE).unlink(missing_ok=True)
        with closing(sqlite3.connect(url.database)) as live, closing(sqlite3.connect(into / SQLITE)) as copy:
            live.backup(copy)
            # One file, without the log that goes with the live one.
            copy.execute("PRAGMA journal_mode=DELETE")
        with closing(sqlite3.connect(into / SQLITE)) as copy:
            if (said := copy.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
                raise Refused(f"The database is damaged: {said}")
        # Plain, as it is to be read and not to be changed.
        engine = create_engine(f"sqlite:///{into / SQLITE}")
        with _closing(engine), Session(engine) as session:
            yield session
        return
    _found("pg_dump")
    engine = open_engine(settings.database).execution_options(isolation_level="REPEATABLE READ")
    with _closing(engine), Session(engine) as session:
        snapshot = session.scalar(text("SELECT pg_export_snapshot()"))
        # It rests while files are copied. They come first: a dump takes long, and checkpoints may go meanwhile.
        session.execute(text("SET idle_in_transaction_session_timeout = 0"))
        yield session
        dump = ("--format=custom", f"--snapshot={snapshot}", f"--file={into / POSTGRESQL}")
        _run(settings, "pg_dump", *dump)


@contextmanager
def _closing(engine: Engine) -> Iterator[None]:
    try:
        yield
    finally:
        engine.dispose()


def _check_empty(settings: Settings) -> None:
    """A database that has tables is somebody's."""
    url = make_url(settings.database)
    if url.drivername.startswith("sqlite") and not Path(url.database or "").exists():
        return
    engine = open_engine(settings.database)
    with _closing(engine):
        try:
            tables = inspect(engine).get_table_names()
        except OperationalError as error:
            raise Refused(
                f"The database can't be used: is DATABASE_URL right, and the server up? {error.orig}"
            ) from error
    if tables:
        raise Refused(
            "There is a database already, which a restoration would overwrite: give another TRAINSHED_DATA_DIR, or a "
            "DATABASE_URL of a new, empty database."
        )


def _put_sqlite(copy: Path, target: Path) -> None:
    part = target.with_name(f".{target.name}.part")
    shutil.copyfile(copy, part)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(target)


def _run(settings: Settings, program: str, *arguments: str) -> None:
    """One of PostgreSQL's own programs on our database. Its password is not among what other users see of a process."""
    found = _found(program)
    url = make_url(settings.database).set(drivername="postgresql")
    with tempfile.NamedTemporaryFile("w", prefix="trainshed-pgpass-") as passwords:
        if url.password:
            passwords.write("*:*:*:*:" + str(url.password).replace("\\", "\\\\").replace(":", "\\:") + "\n")
            passwords.flush()
            url = url.update_query_dict({"passfile": passwords.name})
        where = url.set(password=None).render_as_string(hide_password=False)
        ran = subprocess.run(
            [found, f"--dbname={where}", *arguments],
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", check=False,
        )  # fmt: skip
    if ran.returncode:
        raise Refused(f"{program} failed: {' '.join(ran.stderr.split())[-500:]}")


def _found(program: str) -> str:
    if (found := shutil.which(program)) is None:
        raise Refused(
            f"{program} was not found; install PostgreSQL's client programs, of the server's version or newer."
        )
    return found


def _file_of(settings: Settings) -> Path:
    return Path(make_url(settings.database).database or "")


# The storage


def _named(session: Session) -> Iterator[Named]:
    """What the rows name. Checkpoints come first, as they go first; then what goes only where somebody says so."""
    oldest_first = select(Checkpoint.storage_prefix, Checkpoint.bytes).order_by(Checkpoint.created_at)
    for prefix, size in session.execute(oldest_first):
        yield Named(prefix, size, is_tree=True)
    arrived = select(HubDownload.model_key, HubDownload.total_bytes).where(HubDownload.status == "ready")
    for key, size in session.execute(arrived):
        yield Named(downloads.prefix_of(key), size, is_tree=True)
    for part in session.scalars(select(UploadPart)):
        yield Named(uploads.key_of(part.upload_id, part.id), part.bytes)
    for key, size, sha256 in session.execute(select(File.storage_key, File.bytes, File.sha256)):
        yield Named(key, size, sha256)
    for key, size, sha256 in session.execute(select(Artifact.storage_key, Artifact.bytes, Artifact.sha256)):
        yield Named(key, size, sha256)


class _Copies:
    """What was copied so far, over several looks at the database: nothing is copied, or read, a second time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._whole = dict[Named, dict[str, Copied]]()

    def take(self, storage: Storage, rows: Iterable[Named]) -> dict[str, Copied]:
        """By key all that these rows name. _MissingError names what is not there, once all that is was copied."""
        objects, missing = dict[str, Copied](), list[str]()
        for named in rows:
            try:
                if named not in self._whole:
                    self._whole[named] = self._taken(storage, named)
                objects |= self._whole[named]
            except _MissingError as error:
                missing += error.what
        if missing:
            raise _MissingError(missing)
        return objects

    def take_logs(self, storage: Storage) -> dict[str, Copied]:
        """Logs have no row. What of them is there is as good as what was there."""
        objects = dict[str, Copied]()
        for stored in storage.list("jobs"):
            if joblogs.whose(stored.key) is not None:
                with suppress(NotFound):
                    objects[stored.key] = self._copied(storage, stored.key)
        return objects

    def _taken(self, storage: Storage, named: Named) -> dict[str, Copied]:
        keys = tuple(stored.key for stored in storage.list(named.at)) if named.is_tree else (named.at,)
        try:
            taken = {key: self._copied(storage, key) for key in keys}
        except NotFound as error:
            raise _MissingError([f"{named.at} is missing in storage"]) from error
        hashes = [each.sha256 for each in taken.values()]
        if sum(each.bytes for each in taken.values()) != named.bytes or named.sha256 not in (None, *hashes):
            for key in keys:
                (self._folder / key).unlink()
            raise _MissingError([f"{named.at} is {'not what its row says' if taken else 'missing in storage'}"])
        return taken

    def _copied(self, storage: Storage, key: str) -> Copied:
        path = self._folder / key
        storage.get_to(key, path)
        return Copied(path.stat().st_size, sha256_of(path))


def _remove_others(folder: Path, objects: Mapping[str, Any]) -> None:
    """What was copied first and then was gone."""
    for path in folder.rglob("*") if folder.is_dir() else ():
        if path.is_file() and path.relative_to(folder).as_posix() not in objects:
            path.unlink()
