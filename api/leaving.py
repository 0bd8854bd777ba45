"""An answer that comes line by line, for as long as somebody waits for it.

The client may leave first, and this process may be told to end. Then the answer is given up, in a task of its own: a
response whose client has left is cancelled again and again, and could not even say so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar

import structlog
from fastapi import Request

from api.sse import Streams
from core.errors import DomainError, Failed, Unavailable
from core.sampling import Line

log = structlog.get_logger()

Result = TypeVar("Result")


class ClientLeft(Exception):
    """Nobody reads the answer any more."""


class Coming:
    """The lines of an answer to `request`, whose body was read."""

    def __init__(self, lines: AsyncGenerator[Line, None], request: Request, *, key_id: str) -> None:
        self._request = request
        self._key_id = key_id
        self._streams: Streams = request.app.state.streams
        self._arrived: asyncio.Queue[Line | DomainError] = asyncio.Queue()
        self._is_whole = False
        self._task = self._streams.spawn(self._receive(lines))

    async def next(self) -> Line:
        """The next line. Raises what is wrong with the answer, and ClientLeft.

        Also Unavailable where the process ends, and InvalidKey where the key that asked for it is closed.
        """
        ends = (process_ends(self._streams), self._streams.keyring.closes(self._key_id))
        line = await unless(self._arrived.get(), client_leaves(self._request), *ends)
        if isinstance(line, DomainError):
            raise line
        return line

    def leave(self) -> None:
        """Give up what has not come yet."""
        if not self._is_whole:
            self._task.cancel()

    async def _receive(self, lines: AsyncGenerator[Line, None]) -> None:
        try:
            async with aclosing(lines):
                async for line in lines:
                    self._is_whole = "usage" in line
                    self._arrived.put_nowait(line)
        except DomainError as error:
            self._arrived.put_nowait(error)
        except Exception:  # the task's edge: who waits hears of it
            log.exception("an answer failed")
            self._arrived.put_nowait(Failed("Something went wrong on our side; ask again."))


async def unless(work: Awaitable[Result], *ends: Coroutine[Any, Any, NoReturn]) -> Result:
    """What `work` comes to; where one of `ends` raises earlier, that, and the work is cancelled."""
    main = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(end) for end in ends]
    try:
        await asyncio.wait([main, *others], return_when=asyncio.FIRST_COMPLETED)
        if not main.done():
            for other in others:
                if other.done():
                    other.result()
        return main.result()
    finally:
        for task in (main, *others):
            task.cancel()
        await asyncio.gather(main, *others, return_exceptions=True)


async def client_leaves(request: Request) -> NoReturn:
    """Raise ClientLeft when the client closes its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise ClientLeft


async def process_ends(streams: Streams) -> NoReturn:
    """Raise Unavailable when this process is told to stop."""
    await streams.closed.wait()
    raise Unavailable("This server is going down; ask again in a moment.")
