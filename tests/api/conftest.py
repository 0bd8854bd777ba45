"""One API over a real socket for all tests here; each test has a project of its own, and sees nothing of the others."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import uvicorn
from sqlalchemy.orm import Session

from api.app import create_app
from api.client import Client
from api.protocol import Protocol
from api.server import Server
from core import broker, keys, schema
from core.models import Project
from core.projects import DEFAULT_PROJECT
from core.services import Services
from core.settings import Settings

MAX_FILE_BYTES = 256 * 1024
DEADLINE_SECONDS = 20.0


@dataclass(frozen=True)
class Live:
    """A running API and what it runs on."""

    url: str
    services: Services

    def http(self, key: str | None) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=DEADLINE_SECONDS, verify=False)

    def key(self, *scopes: str, project: str | None = None) -> str:
        """A key of a new project, or of one that there is."""
        with self.services.db.session() as session:
            owner = project or new_project(session)
            return keys.create(session, owner, name="test", scopes=scopes or ("read", "submit", "admin"))[1]


def new_project(session: Session) -> str:
    name = f"proj-{secrets.token_hex(6)}"
    session.add(Project(id=name, name=name))
    session.flush()
    return name


@contextmanager
def running(services: Services, port: int = 0) -> Iterator[str]:
    """The API of `services` in a thread; its URL."""
    app = create_app(services)
    config = uvicorn.Config(
        app, http=Protocol, ws="none", port=port, log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    server = Server(app, config)
    thread = threading.Thread(target=server.run, name="api", daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.send_listeners_home()
        server.should_exit = True
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()


def wait_for(condition, seconds=DEADLINE_SECONDS):
    """For what no event tells of; looks often, and not for ever."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)
    return found


@pytest.fixture(scope="package", autouse=True)
def quiet_logs() -> Iterator[None]:
    """Keep our records from the standard output, where structlog writes them when nobody set it up."""
    structlog.configure(
        processors=[structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()],
        logger_factory=structlog.ReturnLoggerFactory(),
    )
    yield
    # Tests elsewhere read what is said there.
    structlog.reset_defaults()


@contextmanager
def served(data_dir: Path, **wished: Any) -> Iterator[Live]:
    """An API with a database, a broker and a models directory of its own."""
    usual = {"data_dir": data_dir, "max_file_bytes": MAX_FILE_BYTES, "webhook_networks": "127.0.0.0/8"}
    settings = Settings(**usual | wished)
    schema.upgrade(settings.database)
    patience = timedelta(seconds=1)
    with (
        broker.running(settings),
        Services(settings, storage_patience=patience) as services,
        running(services) as url,
    ):
        with services.db.session() as session:
            keys.ensure_admin(session, None)
        yield Live(url, services)


@pytest.fixture(scope="session")
def live(tmp_path_factory) -> Iterator[Live]:
    with served(tmp_path_factory.mktemp("api")) as live:
        yield live


@pytest.fixture
def key(live: Live) -> str:
    """A key that may do everything in a project of this test's own."""
    return live.key()


@pytest.fixture
def organization(live: Live) -> Iterator[httpx.Client]:
    """An admin of the organisation."""
    with live.http(live.key(project=DEFAULT_PROJECT)) as client:
        yield client


@pytest.fixture
def http(live: Live, key: str) -> Iterator[httpx.Client]:
    with live.http(key) as client:
        yield client


@pytest.fixture
def client(live: Live, key: str) -> Iterator[Client]:
    with Client(live.url, key) as made:
        yield made
