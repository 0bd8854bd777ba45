"""Sessions on SQLite or PostgreSQL that behave the same. The edge opens one, services flush, and its end commits."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar, cast

import structlog
from sqlalchemy import (
    Connection,
    CursorResult,
    Engine,
    Executable,
    Insert,
    String,
    bindparam,
    create_engine,
    event,
    func,
    insert,
    select,
)
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import DeclarativeBase, Session, make_transient_to_detached, sessionmaker
from sqlalchemy.orm.attributes import manager_of_class
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

if TYPE_CHECKING:
    from core.hints import Hints

log = structlog.get_logger(__name__)

BUSY_SECONDS = 15
"""How long a writer waits for another one before it gives up."""

WAL_SECONDS = 0.05
"""Between two tries to have a new file's log, of whom others may be in the way."""

CACHE_KIB = 512
"""What a connection keeps of a SQLite file. Each of a pool does, until another writes; the kernel keeps it for all."""

AWAY = (OperationalError, InterfaceError, InternalError, PoolTimeout)
"""The database is not there, is busy or takes no writes: the same can work later. Any other error would come back."""

SCHEDULING = "scheduler"
"""Name of the `lock` of whoever locks jobs of all projects, in whatever order."""
_AFTER_COMMIT = "after_commit"
_BEFORE = "before"
_CONNECTION = "connection"
Row = TypeVar("Row", bound=DeclarativeBase)


class Database:
    """One pool of connections, made once per process. `hints` hear what sessions ask to be said after their commit."""

    def __init__(self, url: str, *, hints: Hints | None = None) -> None:
        self.engine = open_engine(url)
        self._hints = hints
        self._writing = sessionmaker(self.engine, expire_on_commit=False)
        self._for_readers = _only_reading(self.engine)
        self._reading = sessionmaker(self._for_readers, expire_on_commit=False)
        event.listen(self._writing, "after_begin", _end_the_one_before)
        for sessions in (self._writing, self._reading):
            event.listen(sessions, "after_begin", _note_connection)
            event.listen(sessions, "after_transaction_create", _forget_connection)
            event.listen(sessions, "after_transaction_end", _forget_connection)

    @property
    def has_one_writer(self) -> bool:
        """Whether transactions that may write wait for one another, whatever they write."""
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def session(self) -> Iterator[Session]:
        """A transaction: committed at the end, rolled back on an exception; then what was asked for is done.

        On SQLite it holds the one write lock from its first statement, so that a decision based on a read still stands
        at the write. Keep it short and let no bytes stream inside it.
        """
        with self._writing() as session:
            session.info.update({"hints": self._hints, _AFTER_COMMIT: {}})
            yield session
            session.commit()
        for follow in session.info[_AFTER_COMMIT].values():
            try:
                follow()
            except Exception:
                # What was committed stays so: whoever opened the session must not take it for failed.
                log.exception("not done after the commit")

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A transaction that only reads, and so waits for no writer."""
        with self._reading() as session:
            yield session

    def close(self) -> None:
        # Each then has a pool of its own, should anybody still ask.
        for engine in (self.engine, self._for_readers):
            engine.dispose()


def after_commit(session: Session, follow: Callable[[], object], *, key: object = None) -> None:
    """Do `follow` once this session has committed, and not at all if it doesn't; once for all with the same `key`."""
    session.info.setdefault(_AFTER_COMMIT, {})[object() if key is None else key] = follow


def follow(session: Session, before: Session) -> None:
    """Let `before` end as `session` begins, so that neither keeps a connection that only the other works with."""
    session.info[_BEFORE] = before


def _end_the_one_before(session: Session, *_: object) -> None:
    if (before := session.info.pop(_BEFORE, None)) is not None:
        before.rollback()


def inserted(session: Session, kind: type[Row], values: Mapping[str, Any]) -> Row:
    """A new row, written at once; what `values` leave to the database comes back from there, and nothing else does."""
    rest = directly(session, _insertion(kind, frozenset(values)), values).one()
    # As if it had been read: to set thirty attributes, each watched for changes, takes as long as to write the row.
    row = manager_of_class(kind).new_instance()
    vars(row).update(values, **rest._mapping)
    make_transient_to_detached(row)
    session.add(row)
    return row


@lru_cache(maxsize=64)
def _insertion(kind: type[Any], given: frozenset[str]) -> Insert:
    return insert(kind).returning(*(column for column in kind.__table__.c if column.name not in given))


def directly(
    session: Session, statement: Executable, values: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
) -> CursorResult[Any]:
    """Run a statement that neither takes nor gives objects, after what the session still has to write.

    With several `values`, once for each.

    By the session's connection: where there are no objects, finding out what becomes of them takes as long again as the
    statement, and to write one by the unit of work four times as long.
    """
    session.flush()
    connection: Connection = session.info.get(_CONNECTION) or session.connection()
    return connection.execute(statement, values)


# To ask the session for its connection takes as long as to run a simple statement. It stays the same while a
# transaction lasts, so only the first statement asks; and that of a savepoint, which is only made then.


def _note_connection(session: Session, _: object, connection: Connection) -> None:
    session.info[_CONNECTION] = connection


def _forget_connection(session: Session, _: object) -> None:
    session.info.pop(_CONNECTION, None)


def lock(session: Session, name: str) -> None:
    """Let one transaction at a time go past this `name`. On SQLite a writer is alone anyway."""
    if session.get_bind().dialect.name == "postgresql":
        session.connection().execute(_LOCK, {"name": name})


_LOCK = select(func.pg_advisory_xact_lock(func.hashtextextended(bindparam("name", type_=String), 0)))


def open_engine(url: str) -> Engine:
    """An engine for `url` with the settings that make the two databases alike."""
    if url.startswith("sqlite"):
        engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS}, **_POOL)
        event.listen(engine, "connect", _prepare_sqlite)
        turns = _Turns()
        _begin_by(engine, turns.begin)
        event.listen(engine, "checkin", turns.end)
        return engine
    # A pre-ping costs one round trip and spares every request after the database was restarted.
    engine = create_engine(url, pool_pre_ping=True, connect_args={"connect_timeout": 5}, **_POOL)
    event.listen(engine, "connect", _prepare_postgresql)
    return engine


def _only_reading(engine: Engine) -> Engine:
    """An engine over the same connections, whose transactions only read."""
    if engine.dialect.name != "sqlite":
        return engine
    reading = create_engine(engine.url, pool=engine.pool, hide_parameters=engine.hide_parameters)
    _begin_by(reading, lambda connection: connection.execute("BEGIN"))
    return reading


def _begin_by(engine: Engine, begin: Callable[[Any], Any]) -> None:
    """Let its transactions begin so; what `begin` raises becomes SQLAlchemy's.

    There is an event for this, but an engine that has any looks for listeners four times in each statement, which is a
    quarter of what a simple one takes.
    """
    engine.dialect.do_begin = begin  # type: ignore[assignment]


_POOL: dict[str, Any] = {
    "pool_size": 16,
    "max_overflow": 48,
    "pool_timeout": 15,
    # A connection to SQLite forgets what it has read as soon as another one writes: the last one knows most.
    "pool_use_lifo": True,
    # Errors go to logs and to jobs: what was written, such as a digest or a line of training data, must not go along.
    "hide_parameters": True,
}


def _prepare_postgresql(connection: Any, record: object) -> None:
    # A host that loses its power inside a transaction would keep the locks until TCP gives up on it, hours later. The
    # server's own clock ends that, and whoever waits for a lock gives up as on SQLite.
    for setting in ("lock_timeout", "idle_in_transaction_session_timeout"):
        connection.execute(f"SET {setting} = {int(BUSY_SECONDS * 1000)}")
    connection.commit()


def _prepare_sqlite(connection: Any, record: object) -> None:
    # The driver would begin transactions by itself, and late; `_Turns` does it instead.
    connection.isolation_level = None
    busy, cache = f"busy_timeout={BUSY_SECONDS * 1000}", f"cache_size={-CACHE_KIB}"
    for pragma in (busy, "foreign_keys=ON", cache):
        connection.execute(f"PRAGMA {pragma}")
    until = monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            # Of two who change a new file's mode at once SQLite refuses one at once, as each waits for the other.
            if monotonic() > until:
                raise
            sleep(WAL_SECONDS)


class _Turns:
    """Writers of one process take turns on SQLite.

    The write lock is the file's, and who waits for that sleeps for longer and longer, and may be overtaken by anyone.
    So only one at a time waits there; the others wait for that one, and go on at once.
    """

    def __init__(self) -> None:
        self._turn = Lock()

    def begin(self, connection: PoolProxiedConnection) -> None:
        # A transaction that reads first and writes later can't upgrade its lock while another writes; take it at once.
        held = connection.record_info
        assert held is not None, "the pool keeps it"
        if not held.get(_TURN):
            # Whoever has it for so long has lost it: the file's own lock still keeps two apart.
            held[_TURN] = self._turn.acquire(timeout=BUSY_SECONDS)
        cast("sqlite3.Connection", connection).execute("BEGIN IMMEDIATE")

    def end(self, connection: Any, record: ConnectionPoolEntry) -> None:
        """As a connection goes back to the pool, which follows every transaction, however it ended."""
        if record.record_info is not None and record.record_info.pop(_TURN, False):
            self._turn.release()


_TURN = "turn"
"""Of what a connection of the pool is known to have: whether this turn is its own."""
