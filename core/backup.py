"""A copy of all that can't be made again, taken while the service runs, and a service made of such a copy.

That is the database, at one moment, and each object in storage that its rows name. The database comes first: what a row
names was stored before it. What is removed before it is copied, as old checkpoints are, shows as missing, and then both
are looked at once more; so a backup that has its `backup.json` is whole. In a restoration the database comes last.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, inspect, make_url, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from core import joblogs, schema, uploads
from core.db import open_engine
from core.errors import NotFound
from core.models import Artifact, Checkpoint, File, UploadPart
from core.settings import Settings
from core.storage import Storage, open_storage

ABOUT, STORAGE = "backup.json", "storage"
SQLITE, POSTGRESQL = "database.db", "database.dump"
FORMAT = 1
TRIES = 5
"""How often it is begun again because something went while it was copied."""


class Refused(Exception):
    """It can't be done here and now; the text says what would help."""


class _MissingError(Exception):
    """An object that a row names is gone, or is another: what was read of the database is out of date."""


@dataclass(frozen=True)
class Named:
    """Objects that belong to one row."""

    keys: tuple[str, ...]
    bytes: int | None
    """Of all of them together; None where they may grow meanwhile."""
    sha256: str | None = None
    """Where there is one object, and the row knows it."""


@dataclass(frozen=True)
class Report:
    """What a backup holds."""

    objects: int
    bytes: int


def backup(settings: Settings, into: Path) -> Report:
    """Fill the folder `into`, which must be new or empty. Raises Refused."""
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise Refused(f"{into} is there already; name a folder that is new.")
    into.mkdir(parents=True, exist_ok=True, mode=0o700)
    storage = open_storage(settings.storage)
    for _ in range(TRIES):
        try:
            with _snapshot(settings, into) as session:
                objects = _copied(storage, into / STORAGE, session)
                revision = session.scalars(text("SELECT version_num FROM alembic_version")).one()
        except _MissingError as error:
            missing = str(error)
            continue
        _remove_others(into / STORAGE, objects)
        about = {"format": FORMAT, "revision": revision, "objects": objects}
        # Last: a folder without it was cut short.
        (into / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
        return Report(len(objects), sum(each["bytes"] for each in objects.values()))
    raise Refused(
        f"{missing}, and a newer look at the database did not change that. It may have been removed by hand, or the "
        "disk be at fault; nothing else is missing so far."
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
    if settings.database_url is None:
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_empty(settings)
    storage = open_storage(settings.storage)
    for key, each in objects.items():
        path = source / STORAGE / key
        if not path.is_file() or _sha256(path) != each["sha256"]:
            raise Refused(f"{path} is missing or damaged; take another backup.")
        storage.put_file(key, path)
    if kept == SQLITE:
        _put_sqlite(source / SQLITE, Path(make_url(settings.database).database or ""))
    else:
        _run(settings, "pg_restore", "--no-owner", "--exit-on-error", "--single-transaction", str(source / POSTGRESQL))
    schema.upgrade(settings.database)
    return Report(len(objects), sum(each["bytes"] for each in objects.values()))


# The database


@contextmanager
def _snapshot(settings: Settings, into: Path) -> Iterator[Session]:
    """Copy the database, and read in what was copied."""
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
    engine = open_engine(settings.database).execution_options(isolation_level="REPEATABLE READ")
    with _closing(engine), Session(engine) as session:
        snapshot = session.scalar(text("SELECT pg_export_snapshot()"))
        # A connection that rests while files are copied is no longer needed after this.
        dump = ("--format=custom", f"--snapshot={snapshot}", f"--file={into / POSTGRESQL}")
        session.execute(text("SET idle_in_transaction_session_timeout = 0"))
        _run(settings, "pg_dump", *dump)
        yield session


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
    if (found := shutil.which(program)) is None:
        raise Refused(
            f"{program} was not found; install PostgreSQL's client programs, of the server's version or newer."
        )
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


# The storage


def _named(session: Session, storage: Storage) -> Iterator[Named]:
    """What the rows name."""
    for key, size, sha256 in session.execute(select(File.storage_key, File.bytes, File.sha256)):
        yield Named((key,), size, sha256)
    for key, size, sha256 in session.execute(select(Artifact.storage_key, Artifact.bytes, Artifact.sha256)):
        yield Named((key,), size, sha256)
    for part in session.scalars(select(UploadPart)):
        yield Named((uploads.key_of(part.upload_id, part.id),), part.bytes)
    for prefix, size in session.execute(select(Checkpoint.storage_prefix, Checkpoint.bytes)):
        yield Named(tuple(stored.key for stored in storage.list(prefix)), size)
    # Logs have no row. What of them is there is as good as what was there.
    for stored in storage.list("jobs"):
        if joblogs.whose(stored.key) is not None:
            yield Named((stored.key,), None)


def _copied(storage: Storage, into: Path, session: Session) -> dict[str, dict[str, Any]]:
    """By key, size and hash of each object that the rows name, which then is there. Those that are there stay."""
    objects: dict[str, dict[str, Any]] = {}
    for named in _named(session, storage):
        for key in named.keys:
            try:
                if not (into / key).is_file():
                    storage.get_to(key, into / key)
            except NotFound as error:
                raise _MissingError(f"{key} is missing in storage") from error
            objects[key] = {"bytes": (into / key).stat().st_size, "sha256": _sha256(into / key)}
        size = sum(objects[key]["bytes"] for key in named.keys)
        hashes = [objects[key]["sha256"] for key in named.keys]
        if named.bytes not in (None, size) or named.sha256 not in (None, *hashes):
            for key in named.keys:
                (into / key).unlink()
            raise _MissingError(f"{named.keys[0] if named.keys else 'a checkpoint'} is not what its row says")
    return objects


def _remove_others(folder: Path, objects: Mapping[str, Any]) -> None:
    """What was copied first and then was gone."""
    for path in folder.rglob("*") if folder.is_dir() else ():
        if path.is_file() and path.relative_to(folder).as_posix() not in objects:
            path.unlink()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
