"""A job's events as they happen, over HTTP: one reader for each (process, job), however many listen.

What happened is the table's to say; the bell only says when to look. A frame is what a browser's EventSource, curl and
the openai client's decoder all read: `event`, `id` and one line of ASCII JSON, with heartbeats that are bare comments.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import anyio
import structlog
from fastapi.responses import StreamingResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import Message, Send

from api.keyring import Keyring
from api.schemas import EventOut
from api.shown import shown
from core import events
from core.errors import TooManyRequests
from core.models import Job, JobEvent
from core.services import Services
from core.states import TERMINAL

log = structlog.get_logger()

Result = TypeVar("Result")

HEARTBEAT_SECONDS = 15.0
POLL_SECONDS = 1.0
"""How long a lost hint can hide an event."""
COALESCE_SECONDS = 0.1
"""The reader looks no more often than this, so that a fast job costs no more than a slow one."""
PAGE = 500
"""Events read at once."""
RECENT = 2_000
"""Encoded frames that a reader keeps. Who is further behind reads the table."""
SLOW_SECONDS = 30.0
"""A client that takes nothing for this long is let go; it comes back with its last id and misses nothing."""

# The blank line is left out on purpose: after an `id:` line the openai client's decoder takes a blank line after a mere
# comment for an empty event, and fails to read it as JSON.
PING = b": ping\n"

NAMES = {"state": "state", "step": "metrics", "evaluated": "metrics", "choices": "metrics", "checkpoint": "checkpoint"}
"""Type of an event -> its name on the stream. The rest is `log`, or `warning` where its level says so."""


@dataclass(frozen=True)
class Frame:
    """One event, encoded once for everyone."""

    seq: int
    encoded: bytes


def frame(event: JobEvent) -> Frame:
    fallback = "log" if event.level == "info" else "warning"
    name = NAMES.get(event.type, fallback)
    return Frame(event.seq, encode(name, id=str(event.seq), data=EventOut.of(event).model_dump(mode="json")))


def encode(name: str, *, id: str, data: dict[str, object]) -> bytes:
    # ASCII, because some clients split lines at U+2028 as well.
    return f"event: {name}\nid: {id}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode("ascii")


DONE_MARK = "-done"
GONE = b": the job was deleted\n\n"
"""The farewell of a job that is no more. Who connects again is answered 404."""


def position(last_event_id: str | None, after: int) -> tuple[int, bool]:
    """Where to go on from, and whether the client heard a `done` there. The header is newer than `after`."""
    number = (last_event_id or "").removesuffix(DONE_MARK)
    if not (number.isascii() and number.isdigit() and len(number) < 19):
        return after, False
    return int(number), last_event_id != number


class EventStream(StreamingResponse):
    """A response whose client may be slow, but not for ever."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes]) -> None:
        super().__init__(frames, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            with anyio.fail_after(SLOW_SECONDS):
                await send(message)

        try:
            await super().stream_response(send_in_time)
        except TimeoutError:
            log.info("let a slow listener go")


class Reader:
    """Reads the new events of one job, once for all its listeners."""

    def __init__(self, streams: Streams, job_id: str) -> None:
        self.streams = streams
        self.job_id = job_id
        self.listeners = 0
        self.changed = asyncio.Event()
        """Set, and replaced by a fresh one, whenever there is something new."""
        self.recent: deque[Frame] = deque(maxlen=RECENT)
        self.last: int | None = None
        """`seq` of the newest event seen; None before the first look."""
        self.done: bytes | None = None
        """The farewell, once the job has ended."""
        self.task = streams.spawn(self._run())

    def frames(self, after: int) -> list[Frame] | None:
        """What is newer than `after`; None where only the table knows."""
        if self.last is None or (after < self.last and not (self.recent and self.recent[0].seq <= after + 1)):
            return None
        return [frame for frame in self.recent if frame.seq > after] if after < self.last else []

    def wake(self) -> None:
        self.changed, before = asyncio.Event(), self.changed
        before.set()

    async def _run(self) -> None:
        hint = asyncio.Event()
        listening = self.streams.spawn(self._listen(hint))
        try:
            while self.done is None:
                hint.clear()
                try:
                    more = await self._look()
                except SQLAlchemyError as error:
                    log.warning("events can't be read, trying again", job=self.job_id, error=str(error))
                    more = False
                if not more and self.done is None:
                    await asyncio.sleep(COALESCE_SECONDS)
                    await _within(POLL_SECONDS, hint)
        finally:
            listening.cancel()

    async def _listen(self, hint: asyncio.Event) -> None:
        while True:
            async for _ in self.streams.services.bell.listen(self.job_id):
                hint.set()
            # The broker is away. Until it is back, the reader polls.
            await asyncio.sleep(POLL_SECONDS)

    async def _look(self) -> bool:
        """Take in what is new; True where there is more to read at once."""
        found = await self.streams.in_thread(partial(self.streams.look, self.job_id, self.last))
        self.recent.extend(found.frames)
        self.last = found.frames[-1].seq if found.frames else found.last
        more = len(found.frames) == PAGE
        if not more:
            self.done = found.done
        if found.frames or self.done:
            self.wake()
        return more


@dataclass(frozen=True)
class Look:
    """What one look at the table found."""

    frames: Sequence[Frame]
    last: int
    done: bytes | None


STREAMS_OF_A_KEY = 1000
"""Of one process; others of its keys have room beside them."""


class Streams:
    """The readers of this process."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.readers: dict[str, Reader] = {}
        # Apart from the endpoints' threads: replaying to many must not keep a submit waiting.
        self.threads = anyio.CapacityLimiter(8)
        self.closed = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self.keyring = Keyring(services, self.spawn, self._wake_all)

    def require_room(self, key_id: str) -> None:
        """Raise TooManyRequests where this key has as many streams open as one may: each is a connection of ours."""
        if self.keyring.answers(key_id) >= STREAMS_OF_A_KEY:
            raise TooManyRequests(f"This key has {STREAMS_OF_A_KEY} streams open here; close some of them first.")

    async def listen(
        self, job_id: str, *, after: int, key_id: str, visit_id: str | None = None
    ) -> AsyncIterator[bytes]:
        """Frames of everything after `after`, in order, each once, until the job has ended or the caller's time has."""
        reader = self._join(job_id)
        try:
            with self.keyring.holding(key_id, visit_id) as is_over:
                yield PING
                while not (self.closed.is_set() or is_over.is_set()):
                    changed = reader.changed
                    frames = reader.frames(after)
                    if frames is None:
                        frames = await self.in_thread(partial(self.replay, job_id, after))
                    if frames:
                        after = frames[-1].seq
                        yield b"".join(frame.encoded for frame in frames)
                    elif reader.done and reader.last is not None and after >= reader.last:
                        yield reader.done
                        return
                    elif not await _within(HEARTBEAT_SECONDS, changed):
                        yield PING
        finally:
            self._leave(reader)

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """A task that is remembered until it has ended: the event loop itself remembers tasks but weakly."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def close(self) -> None:
        """Send every listener home; they come back to the next process. Call it in the event loop."""
        self.closed.set()
        self._wake_all()

    def _wake_all(self) -> None:
        for reader in self.readers.values():
            reader.wake()

    async def ended(self) -> None:
        """Close, and wait until nothing of it runs any more."""
        self.close()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def look(self, job_id: str, after: int | None) -> Look:
        """A reader's look at the table, in a session of its own."""
        with self.services.db.reading() as session:
            # The job first: when it has ended, every event of it is committed already and is read below.
            if (job := session.get(Job, job_id)) is None:
                return Look((), 0, GONE)
            last = job.last_event if after is None else after
            found = [frame(event) for event in events.since(session, job_id, last, limit=PAGE)]
            done = None
            if job.state in TERMINAL:
                # The job's `error` stays inside `job`: at the top, the openai client would raise it.
                ended = shown(session, job).model_dump(mode="json")
                farewell = {"type": "done", "seq": job.last_event, "state": job.state, "job": ended}
                done = encode("done", id=f"{job.last_event}{DONE_MARK}", data=farewell)
            return Look(found, last, done)

    def replay(self, job_id: str, after: int) -> list[Frame]:
        with self.services.db.reading() as session:
            return [frame(event) for event in events.since(session, job_id, after, limit=PAGE)]

    async def in_thread(self, call: Callable[[], Result]) -> Result:
        """For what waits for the database."""
        return await anyio.to_thread.run_sync(call, limiter=self.threads)

    def _join(self, job_id: str) -> Reader:
        reader = self.readers.get(job_id)
        # One that has said its farewell looks no more, and the job may have been retried.
        if reader is None or reader.done:
            reader = self.readers[job_id] = Reader(self, job_id)
        reader.listeners += 1
        return reader

    def _leave(self, reader: Reader) -> None:
        reader.listeners -= 1
        if not reader.listeners:
            reader.task.cancel()
            if self.readers.get(reader.job_id) is reader:
                del self.readers[reader.job_id]


async def _within(seconds: float, event: asyncio.Event) -> bool:
    """Whether `event` is set before the time is over."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
