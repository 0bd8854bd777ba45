"""Answer requests for text with models that stay loaded: `python -m workers.sampler`. `core.sampling` asks."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock, Semaphore
from time import monotonic
from typing import Any

import redis
import structlog
from redis.exceptions import RedisError

from core import log as logging
from core.models import Model
from core.sampling import ALIVE, ALIVE_SECONDS, ANSWER_SECONDS, REQUESTS, answers
from core.services import Services
from core.settings import Settings, trainer_environment
from workers import staging
from workers.orders import Orders, obey_signals

log = structlog.get_logger(__name__)

SERVE = (sys.executable, "-m", "engine", "serve")
MODELS_LOADED = 2
REQUESTS_AT_ONCE = 4
LOAD_SECONDS = 120.0
"""How long a model may take to load, whatever the request's own deadline: the next request finds it loaded."""
LONGEST_SECONDS = 600.0
"""For a request that does not say when it expires."""
LISTEN_SECONDS = 1
REST_SECONDS = 1.0


class Failed(Exception):
    """No answer; the text says why, in words for whoever asked."""


class Resident:
    """One model, loaded in a process of its own. Answers one request at a time."""

    def __init__(self, folder: Path, command: Sequence[str] = SERVE) -> None:
        self.folder = folder
        self._buffer = b""
        self._process = subprocess.Popen(
            [*command, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=trainer_environment(()),
        )
        try:
            self._answer(monotonic() + LOAD_SECONDS)
        except Failed:
            self.close()
            raise

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], *, deadline: float) -> dict[str, Any]:
        """The process's answer. Past the deadline it is ended: what it says later would be out of turn."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            return self._answer(deadline)
        except BrokenPipeError as error:
            self.close()
            raise Failed("the model's process has died; ask again") from error
        except Failed:
            self.close()
            raise

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _answer(self, deadline: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - monotonic())):
                    raise Failed("the model took too long; ask for fewer tokens, or again later")
                chunk = os.read(self._process.stdout.fileno(), 65536)
                if not chunk:
                    raise Failed("the model's process has died; ask again")
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Place:
    """Room for one model: empty, or a resident and the lock that gives it to one request at a time."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.resident: Resident | None = None

    def clear(self) -> None:
        """Forget the model, and its files unless they are somebody else's."""
        if self.resident is not None:
            self.resident.close()
            remove(self.resident.folder)
            self.resident = None


class Residents:
    """The models used last, loaded. `bring` puts a model's files into a folder."""

    def __init__(
        self,
        folder: Path,
        bring: Callable[[str, Path], None],
        *,
        limit: int = MODELS_LOADED,
        command: Sequence[str] = SERVE,
    ) -> None:
        self._folder = folder
        self._bring = bring
        self._limit = limit
        self._command = command
        self._places: OrderedDict[str, Place] = OrderedDict()
        """By model, the one used last at the end."""
        self._lock = Lock()

    def ask(self, model: str, request: dict[str, Any], *, deadline: float) -> dict[str, Any]:
        """The model's answer; loads it where it isn't, or has died, and lets go of the one unused for longest."""
        while True:
            place = self._place(model)
            if not place.lock.acquire(timeout=max(0.0, deadline - monotonic())):
                raise Failed("the model is busy with other requests; ask again later")
            try:
                if self._places.get(model) is not place:
                    # It was given up while this request waited for it.
                    continue
                if place.resident is None or not place.resident.lives:
                    place.clear()
                    place.resident = self._load(model)
                return place.resident.ask(request, deadline=deadline)
            finally:
                place.lock.release()

    def _place(self, model: str) -> Place:
        with self._lock:
            place = self._places.setdefault(model, Place())
            self._places.move_to_end(model)
            excess = [self._places.popitem(last=False)[1] for _ in range(len(self._places) - self._limit)]
        for old in excess:
            with old.lock:
                old.clear()
        return place

    def close(self) -> None:
        with self._lock:
            for place in self._places.values():
                place.clear()
            self._places.clear()

    def _load(self, model: str) -> Resident:
        started_at = monotonic()
        folder = self._folder / f"model-{started_at:.6f}"
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._bring(model, folder)
            resident = Resident(folder, self._command)
        except BaseException:
            remove(folder)
            raise
        log.info("model loaded", model=model, seconds=round(monotonic() - started_at, 3))
        return resident


def remove(folder: Path) -> None:
    """Remove a staged model; of one that is only linked to, the link."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


class Counter:
    """Takes requests from the list and puts answers where they are waited for."""

    def __init__(self, client: redis.Redis, residents: Residents) -> None:
        self.client, self.residents = client, residents

    def run(self, orders: Orders) -> None:
        """Until a wish comes. Requests under way are left: whoever asked has a deadline."""
        pool = ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="answer")
        # A request that can't be begun stays in the list: for another sampler, or for who asked to take it back.
        free = Semaphore(REQUESTS_AT_ONCE)
        while orders.wait(0) is None:
            try:
                self.client.set(ALIVE, b"1", ex=ALIVE_SECONDS)
                if not free.acquire(timeout=LISTEN_SECONDS):
                    continue
                message = self.taken(free)
            except (RedisError, OSError) as error:
                log.warning("broker away", error=str(error))
                orders.wait(REST_SECONDS)
                continue
            if message is not None:
                pool.submit(self.serve, message).add_done_callback(lambda _: free.release())
        pool.shutdown(wait=False, cancel_futures=True)

    def taken(self, free: Semaphore) -> bytes | str | None:
        """A request, if one comes soon; else its place is `free` again."""
        message = None
        try:
            if (found := self.client.brpop([REQUESTS], timeout=LISTEN_SECONDS)) is not None:
                message = found[1]
        finally:
            if message is None:
                free.release()
        return message

    def serve(self, message: bytes | str) -> None:
        """Answer one request, with an error where there is nothing better to say."""
        try:
            request = json.loads(message)
            id_ = request["id"]
        except (ValueError, TypeError, KeyError):
            log.warning("request not understood", bytes=len(message))
            return
        try:
            answer = self.answer(request)
        except Failed as error:
            answer = {"id": id_, "error": str(error)}
        except Exception as error:  # the thread's edge: whoever asked hears of it
            log.exception("request failed")
            answer = {"id": id_, "error": f"{type(error).__name__}: {error}"}
        try:
            with self.client.pipeline() as pipeline:
                pipeline.lpush(answers(id_), json.dumps(answer))
                pipeline.expire(answers(id_), ANSWER_SECONDS)
                pipeline.execute()
        except (RedisError, OSError) as error:
            log.warning("answer not delivered", error=str(error))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        asked = {name: value for name, value in request.items() if name not in {"model", "expires_in"}}
        deadline = monotonic() + min(float(request.get("expires_in", LONGEST_SECONDS)), LONGEST_SECONDS)
        return self.residents.ask(request["model"], asked, deadline=deadline)


def bring(services: Services) -> Callable[[str, Path], None]:
    """How a model comes to this host, by its name. Who may use it was decided where it was asked for."""

    def bring(model: str, folder: Path) -> None:
        with services.db.reading() as session:
            row = session.get(Model, model)
        if row is None:
            raise Failed(f"there is no model {model!r}")
        try:
            staging.stage_model(services, row.source, folder)
        except staging.Unusable as error:
            raise Failed(error.message) from error

    return bring


def connect(settings: Settings) -> redis.Redis:
    """A client that waits as long as `run` listens."""
    return redis.Redis.from_url(settings.redis, socket_timeout=LISTEN_SECONDS + 5, socket_connect_timeout=5)


def main() -> None:
    settings = Settings()
    logging.setup(settings.log_level)
    orders = Orders()
    obey_signals(orders)
    folder = settings.data_dir.absolute() / "sampler"
    # What a sampler that was killed had staged.
    shutil.rmtree(folder, ignore_errors=True)
    with Services(settings) as services, connect(settings) as client:
        residents = Residents(folder, bring(services))
        log.info("sampler is up")
        try:
            Counter(client, residents).run(orders)
        finally:
            residents.close()
            with suppress(RedisError, OSError):
                client.delete(ALIVE)


if __name__ == "__main__":
    main()
