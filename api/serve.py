"""`trainshed serve`: all of it on this machine, in the foreground. Its parts are children, restarted when they die."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic
from typing import IO

import httpx
from alembic.util import CommandError
from sqlalchemy import make_url
from sqlalchemy.exc import OperationalError

from core import broker, filelocks, keys, schema
from core.children import Child
from core.db import Database, open_engine
from core.settings import Settings

Say = Callable[[str], None]

POLL_SECONDS = 0.2
SLOW_START_SECONDS = 10.0
"""A start that takes longer than this says what it waits for."""
API_SECONDS = 5.0
"""How long the API and upkeep may take to end."""
HURRY_SECONDS = 15.0
"""How long a part may take to end at once: a node has to see its runs' processes gone, and its own children."""
DRAIN_MARGIN_SECONDS = 15.0
"""What a draining node gets beyond the grace of its runs."""


class Refused(Exception):
    """It can't start here and now; the text says what would help."""


def serve(settings: Settings, say: Say) -> None:
    """Run until SIGINT or SIGTERM. A second signal does not wait for runs to be saved. Raises Refused."""
    with ExitStack() as stack:
        stop, hurry = stack.enter_context(_signals())
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        stack.enter_context(_alone(settings.data_dir))
        listening = stack.enter_context(_listen(settings))
        url = _url(settings.host, listening.getsockname()[1])
        logs = settings.data_dir / "logs"
        logs.mkdir(exist_ok=True)
        if settings.redis_url is None:
            stack.enter_context(broker.running(settings))
        secret = prepare(settings)
        parts = _parts(settings, logs, listening)
        stack.callback(_end, parts, hurry, say)
        _tend(parts, say)
        _announce(url, settings, secret, say)
        ready, tell_at = False, monotonic() + SLOW_START_SECONDS
        while not stop.wait(POLL_SECONDS):
            _tend(parts, say)
            if ready:
                continue
            if (missing := _missing(url)) is None:
                ready = True
                say("Ready. Ctrl-C stops it; running jobs are saved and go on at the next start.")
            elif monotonic() > tell_at:
                tell_at = inf
                say(f"Not ready yet, and still trying: {missing}. The logs are in {logs}")


@dataclass(frozen=True)
class Part:
    """One process of the service, and how long it may take to end."""

    child: Child
    grace_seconds: float


def _parts(settings: Settings, logs: Path, listening: socket.socket) -> list[Part]:
    """In the order in which they start; they end in this order too, so that who drains can still be watched."""
    environment = {**os.environ, **settings.environment()}

    def part(name: str, module: str, *arguments: str, grace_seconds: float, pass_fds: tuple[int, ...] = ()) -> Part:
        argv = [sys.executable, "-m", module, *arguments]
        log_path = logs / f"{name}.log"
        return Part(Child(name, argv, environment=environment, log_path=log_path, pass_fds=pass_fds), grace_seconds)

    fd = listening.fileno()
    return [
        part("node", "workers.node", grace_seconds=settings.stop_grace_seconds + DRAIN_MARGIN_SECONDS),
        part("upkeep", "workers.upkeep", grace_seconds=API_SECONDS),
        part("api", "api.server", "--fd", str(fd), grace_seconds=API_SECONDS, pass_fds=(fd,)),
    ]


def _tend(parts: list[Part], say: Say) -> None:
    for part in parts:
        if death := part.child.tend():
            again = f"it starts again in {death.restart_seconds:g} s"
            say(f"{death.child} ended with {death.exit_code}; {again}. Its log: {part.child.log_path}")


def _end(parts: list[Part], hurry: threading.Event, say: Say) -> None:
    """The node first: its runs are saved and queued again while the rest still stands."""
    say("Stopping: running jobs are saved and queued again. Ctrl-C once more ends them at once.")
    for part in parts:
        # A node that is killed leaves its runs behind. Asked a second time, it ends them and itself.
        part.child.stop(part.grace_seconds, hurry=hurry, hurry_seconds=HURRY_SECONDS)
    say("Stopped.")


def prepare(settings: Settings) -> str | None:
    """Bring the schema up to this version, and make the first key. Its secret is returned when it was just made up.

    Raises Refused where the database can't be used as it is.
    """
    if settings.database_url is None:
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        schema.upgrade(settings.database)
    except OperationalError as error:
        raise Refused(
            f"The database can't be used: is DATABASE_URL right, and the server up? It says: {error.orig}"
        ) from error
    except CommandError as error:
        raise Refused(f"The database is not of this version, nor of an earlier one: {error}") from error
    database = Database(settings.database)
    try:
        with database.session() as session:
            return keys.ensure_admin(session, settings.admin_key)
    finally:
        database.close()


def require_schema(settings: Settings) -> None:
    """Raise Refused where a part that runs on its own would find no tables, or those of an earlier version.

    A database that is away is no reason not to start: every part waits for it.
    """
    url = make_url(settings.database)
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").exists():
        raise Refused(
            f"There is no service here, as {url.database} is not there: set DATABASE_URL, REDIS_URL and STORAGE_URL to "
            "those of one elsewhere, or run `trainshed serve`, which is all of it."
        )
    engine = open_engine(settings.database)
    try:
        if schema.is_behind(engine):
            raise Refused(
                "The database has no tables yet, or those of an earlier version: run `trainshed migrate` first."
            )
    except OperationalError:
        return
    finally:
        engine.dispose()


def _announce(url: str, settings: Settings, secret: str | None, say: Say) -> None:
    say(f"Trainshed is at {url} and documents itself at {url}/docs.")
    say(f"Data and logs are in {settings.data_dir.absolute()}, base models in {settings.models}.")
    if secret:
        say(f"The first admin key, shown this once and kept nowhere:\n\n    {secret}\n")
        say(f"    export TRAINSHED_URL={url} TRAINSHED_API_KEY={secret}\n")


def _url(host: str, port: int) -> str:
    """Where somebody on this machine finds it."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _missing(url: str) -> str | None:
    """What keeps jobs from being taken and run, in words; None when all is there."""
    try:
        checks = httpx.get(f"{url}/readyz", timeout=2.0).json()["checks"]
    except httpx.TransportError:
        return "the API does not answer"
    return "; ".join(f"{part}: {says}" for part, says in checks.items() if says != "ok") or None


@contextmanager
def _signals() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Two events: the first signal to end sets one, the second the other."""
    stop, hurry = threading.Event(), threading.Event()

    def on_signal(number: int, frame: object) -> None:
        (hurry if stop.is_set() else stop).set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop, hurry
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _alone(data_dir: Path) -> Iterator[None]:
    """Hold the data directory; the kernel lets it go with the process, however that ends."""
    with (data_dir / "serve.lock").open("a+") as file:
        if not filelocks.take(file):
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise Refused(
                f"Another `trainshed serve` (process {holder}) works in {data_dir.absolute()}; "
                "stop it first, or give this one another --data-dir."
            )
        _write_pid(file)
        yield


def _write_pid(file: IO[str]) -> None:
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    file.flush()


@contextmanager
def _listen(settings: Settings) -> Iterator[socket.socket]:
    """The API's socket. It is ours, so a taken port is said at once and a restart of the API refuses nobody."""
    family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
        except OSError as error:
            raise Refused(
                f"Can't listen on {settings.host}:{settings.port}: {error.strerror}. "
                "Stop what listens there, or choose another --port (0 takes a free one)."
            ) from error
        listening.listen(2048)
        yield listening
