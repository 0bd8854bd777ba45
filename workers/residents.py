"""Models that stay loaded, each a `python -m engine serve` of its own that answers many requests at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Condition, Lock, Thread
from time import monotonic
from typing import Any

import structlog

from core.settings import trainer_environment

log = structlog.get_logger(__name__)

SERVE = (sys.executable, "-m", "engine", "serve")
MODELS_LOADED = 2
LOAD_SECONDS = 120.0
"""How long a model may take to load, whatever the request's own deadline: the next request finds it loaded."""
HANGS_SECONDS = 120.0
"""A model that has not let go of a request for so long hangs: its tokenizer may take for ever over a text."""
LOOK_SECONDS = 0.5
"""How often it is looked whether an answer is still wanted, while the model says nothing."""

Line = dict[str, Any]


class Failed(Exception):
    """No answer, or no more of it; the text says why, in words for whoever asked."""

    def __init__(self, message: str, *, code: str = "unavailable", param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.code, self.param = message, code, param


class Resident:
    """One model, loaded. Raises Failed where it can't be."""

    def __init__(self, folder: Path, command: Sequence[str] = SERVE) -> None:
        self.folder = folder
        self._lock = Lock()
        self._inboxes: dict[str, SimpleQueue[Line | None]] = {}
        """By request; None says that the process has ended."""
        self._given_up: dict[str, float] = {}
        """When each request was given up of which the model has not said that it heard of that."""
        self._first: SimpleQueue[Line | None] = SimpleQueue()
        self._ended = False
        self._process = subprocess.Popen(
            [*command, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=trainer_environment(())
        )
        self._listener = Thread(target=self._listen, name="resident", daemon=True)
        self._listener.start()
        try:
            self._await_ready()
        except Failed:
            self.close()
            raise

    @property
    def lives(self) -> bool:
        return not self._ended and self._process.poll() is None

    @property
    def hangs(self) -> bool:
        with self._lock:
            return min(self._given_up.values(), default=inf) + HANGS_SECONDS < monotonic()

    def lines(self, request: Line, *, deadline: float, is_wanted: Callable[[], bool] = lambda: True) -> Generator[Line]:
        """What the model says of the request, until that is all. A request that is left earlier is given up there too.

        Raises Failed past the deadline, when the process dies, and when nobody wants the answer any more.
        """
        id_ = request["id"]
        inbox: SimpleQueue[Line | None] = SimpleQueue()
        done = False
        with self._lock:
            if self._ended:
                raise Failed("the model's process has died; ask again")
            self._inboxes[id_] = inbox
        try:
            self._write(request)
            while not done:
                line = _next(inbox, deadline, is_wanted)
                if line is None:
                    raise Failed("the model's process has died; ask again")
                done = "usage" in line or "error" in line
                yield line
        finally:
            with self._lock:
                del self._inboxes[id_]
                if not done:
                    self._given_up[id_] = monotonic()
            if not done:
                with suppress(Failed):
                    self._write({"cancel": id_})

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _await_ready(self) -> None:
        try:
            first = self._first.get(timeout=LOAD_SECONDS)
        except Empty:
            raise Failed(f"the model did not load within {LOAD_SECONDS:g} s; ask again") from None
        if first is None:
            raise Failed("the model's process has died while it loaded; ask again")
        if "error" in first:
            raise Failed(first["error"]["message"], code=first["error"]["code"], param="model")

    def _write(self, line: Line) -> None:
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(json.dumps(line).encode() + b"\n")
                self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise Failed("the model's process has died; ask again") from error

    def _listen(self) -> None:
        """Hand each line to whoever waits for it."""
        assert self._process.stdout is not None
        ready = False
        with suppress(OSError, ValueError):
            for raw in self._process.stdout:
                line: Line = json.loads(raw)
                if not ready:
                    self._first.put(line)
                    ready = True
                    continue
                with self._lock:
                    if "cancelled" in line:
                        self._given_up.pop(line["id"], None)
                    inbox = self._inboxes.get(line["id"])
                if inbox is not None:
                    inbox.put(line)
        with self._lock:
            self._ended = True
            waiting = list(self._inboxes.values())
        for inbox in (self._first, *waiting):
            inbox.put(None)


def _next(inbox: SimpleQueue[Line | None], deadline: float, is_wanted: Callable[[], bool]) -> Line | None:
    while True:
        left = deadline - monotonic()
        with suppress(Empty):
            return inbox.get(timeout=max(0.0, min(LOOK_SECONDS, left)))
        if left <= 0:
            raise Failed("the model took too long; ask for fewer tokens, or again later", code="timeout")
        if not is_wanted():
            raise Failed("nobody waits for the answer any more")


class Place:
    """Room for one model: empty, or a resident."""

    def __init__(self) -> None:
        self.loading = Lock()
        self.resident: Resident | None = None
        self.users = 0
        """Requests that are under way, or wait for it to be loaded."""
        self.leaves = False
        """It takes no more requests, as another model waits for its place."""

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
        self._changed = Condition()

    def lines(
        self, model: str, request: Line, *, deadline: float, is_wanted: Callable[[], bool] = lambda: True
    ) -> Generator[Line]:
        """The model's answer; loads it where it isn't, or has died, and lets go of the one unused for longest.

        Raises Failed as `Resident.lines` does, and where the model can't be had.
        """
        with self._place(model, deadline, is_wanted) as place:
            resident = self._loaded(model, place, deadline)
            yield from resident.lines(request, deadline=deadline, is_wanted=is_wanted)

    def let_go(self, is_gone: Callable[[str], bool]) -> None:
        """Forget those that are gone for good, with their files, unless a request is under way: that is the last.

        One that hangs goes too: it would keep its cores busy, and let everybody who asks it wait.
        """
        with self._changed:
            idle = [model for model, place in self._places.items() if not place.users]
            hanging = [model for model in idle if (there := self._places[model].resident) and there.hangs]
            for model in hanging:
                self._places.pop(model).clear()
                log.warning("model ended, as it hung", model=model)
        # Whoever is asked may take long.
        for model in filter(is_gone, set(idle) - set(hanging)):
            with self._changed:
                if (place := self._places.get(model)) is not None and not place.users:
                    self._places.pop(model).clear()
                    log.info("model let go, as it was deleted", model=model)

    def close(self) -> None:
        with self._changed:
            for place in self._places.values():
                place.clear()
            self._places.clear()

    @contextmanager
    def _place(self, model: str, deadline: float, is_wanted: Callable[[], bool]) -> Iterator[Place]:
        with self._changed:
            while (place := self._free(model)) is None:
                if monotonic() > deadline or not is_wanted():
                    raise Failed("the sampler is busy with other models; ask again later")
                self._changed.wait(LOOK_SECONDS)
            place.users += 1
            self._places.move_to_end(model)
        try:
            yield place
        finally:
            with self._changed:
                place.users -= 1
                self._changed.notify_all()

    def _free(self, model: str) -> Place | None:
        """The model's place, or one for it; None while there is none. Called with the condition held."""
        place = self._places.get(model)
        if place is not None and not place.leaves:
            return place
        if place is None and len(self._places) < self._limit:
            return self._places.setdefault(model, Place())
        idle = next((name for name, other in self._places.items() if not other.users), None)
        if idle is not None:
            self._places.pop(idle).clear()
            return self._free(model)
        if not any(other.leaves for other in self._places.values()):
            # Else requests for it that keep coming would keep everybody else waiting.
            next(iter(self._places.values())).leaves = True
        return None

    def _loaded(self, model: str, place: Place, deadline: float) -> Resident:
        if not place.loading.acquire(timeout=max(0.0, deadline - monotonic())):
            raise Failed("the model took too long to load; ask again later", code="timeout")
        try:
            if place.resident is None or not place.resident.lives or place.resident.hangs:
                place.clear()
                place.resident = self._load(model)
            return place.resident
        finally:
            place.loading.release()

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
