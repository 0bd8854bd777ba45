"""Ask a sampler for text: a request in one Redis list, and what becomes of it, line after line, in another.

Answering is the workers' business. Neither side waits for one that is gone: who asks says again and again that it still
wants the answer, and a sampler that it lives.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from time import monotonic
from typing import Any

import anyio
import redis
import redis.asyncio
from redis.exceptions import RedisError

from core.errors import (
    ContextTooLong,
    DomainError,
    Failed,
    InvalidModel,
    InvalidRequest,
    NotFound,
    TimedOut,
    Unavailable,
)

REQUESTS = "trainshed:samples"
"""List of requests, each a JSON object with an `id`, the `model` by its key, how long it may take (`expires_in`), and
what `python -m engine serve` is asked."""
ALIVE = "trainshed:sampler"
"""Key that samplers set anew, with an expiry, while they live."""
ALIVE_SECONDS = 5
WANTED_SECONDS = 15
"""How long an answer is worked at when who asked says nothing more."""
ANSWER_SECONDS = 60
"""How long lines that nobody fetches are kept."""
MOST_WAITING = 256
"""Requests in the list, after which no more are put there."""

_CONNECT_SECONDS = 1.0
_LOOK_SECONDS = 1.0
"""How often who asks looks whether its sampler still lives, while no line comes."""
_RENEW_SECONDS = WANTED_SECONDS / 3

Line = dict[str, Any]
"""What a sampler says of an answer, as `engine.serve` puts it."""
RAISED: dict[str, type[DomainError]] = {
    kind.code: kind for kind in (InvalidRequest, ContextTooLong, InvalidModel, NotFound, Unavailable, TimedOut)
}
"""What a line's error is here, by its code; any other is a failure of ours."""


def answers(request_id: str) -> str:
    """List that gets the request's lines: `taken`, by which sampler, then `choices`, at last `usage` or `error`."""
    return f"trainshed:sample:{request_id}"


def wanted(request_id: str) -> str:
    """Key that is there for as long as somebody waits for the request's answer."""
    return f"trainshed:sample:{request_id}:wanted"


def alive(name: str) -> str:
    """Key that this sampler sets anew, as `ALIVE`, while it lives."""
    return f"{ALIVE}:{name}"


@dataclass(frozen=True)
class Patience:
    """How long who asks waits, in seconds."""

    begin: float = 120.0
    """For a sampler that takes the request."""
    end: float = 600.0
    """For all of the answer. The model may have to be loaded first."""


class Sampler:
    """The asking side."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def ask(self, request: dict[str, Any], patience: Patience | None = None) -> AsyncGenerator[Line, None]:
        """Lines of the answer as they come, the last with `usage`. Leaving earlier gives the request up.

        Raises what the sampler says is wrong, Unavailable where none lives, begins in time or lives on, and TimedOut.
        """
        patience = patience or Patience()
        id_ = secrets.token_hex(8)
        message = json.dumps(request | {"id": id_, "expires_in": patience.end})
        client = redis.asyncio.Redis.from_url(
            self._url, socket_timeout=_LOOK_SECONDS + 5, socket_connect_timeout=_CONNECT_SECONDS
        )
        try:
            await self._put(client, id_, message)
            async for line in _lines(client, id_, patience):
                yield line
        except (RedisError, OSError) as error:
            raise Unavailable("The broker that requests to the sampler go through is away; try again.") from error
        finally:
            # Also where the client has left, and everything here is being cancelled.
            with anyio.move_on_after(_CONNECT_SECONDS, shield=True):
                await _give_up(client, id_, message)

    async def _put(self, client: redis.asyncio.Redis, id_: str, message: str) -> None:
        if not await client.exists(ALIVE):
            raise Unavailable("No sampler is online: start one with `trainshed serve` or `trainshed worker`.")
        if await client.llen(REQUESTS) >= MOST_WAITING:
            raise Unavailable(f"{MOST_WAITING} requests wait for a sampler already; try again later.")
        async with client.pipeline() as pipeline:
            pipeline.set(wanted(id_), b"1", ex=WANTED_SECONDS)
            pipeline.lpush(REQUESTS, message)
            await pipeline.execute()

    def is_alive(self) -> bool:
        """Whether a sampler has said lately that it lives."""
        try:
            with redis.Redis.from_url(self._url, socket_timeout=1, socket_connect_timeout=_CONNECT_SECONDS) as client:
                return bool(client.exists(ALIVE))
        except (RedisError, OSError):
            return False


async def _lines(client: redis.asyncio.Redis, id_: str, patience: Patience) -> AsyncIterator[Line]:
    """The lines of one request that is in the list."""
    started = renewed = monotonic()
    sampler: str | None = None
    while True:
        found = await client.blpop([answers(id_)], timeout=_LOOK_SECONDS)
        now = monotonic()
        if now - renewed > _RENEW_SECONDS:
            if not await client.set(wanted(id_), b"1", ex=WANTED_SECONDS, xx=True):
                raise TimedOut("Nobody took the answer for too long, so it was given up; ask again.")
            renewed = now
        if now - started > patience.end:
            raise TimedOut(f"The answer was not done within {patience.end:g} s; ask for fewer tokens.")
        if found is not None:
            line: Line = json.loads(found[1])
            if "error" in line:
                raise raised(line["error"])
            if "taken" in line:
                sampler = line["taken"]
                continue
            yield line
            if "usage" in line:
                return
        elif sampler is None and now - started > patience.begin:
            raise Unavailable(f"No sampler began within {patience.begin:g} s; they may be busy. Try again.")
        elif sampler is not None and not await client.exists(alive(sampler)):
            raise Unavailable("The sampler that worked at the answer has died; ask again.")


async def _give_up(client: redis.asyncio.Redis, id_: str, message: str) -> None:
    try:
        async with client.pipeline() as pipeline:
            pipeline.delete(wanted(id_), answers(id_))
            pipeline.lrem(REQUESTS, 1, message)
            await pipeline.execute()
    except (RedisError, OSError):
        # All of it has an expiry, and a request that nobody wants is not begun.
        pass
    finally:
        await client.aclose()


def raised(error: dict[str, Any]) -> DomainError:
    """What to raise for a line's error."""
    kind = RAISED.get(error["code"], Failed)
    return kind(str(error["message"]), param=error.get("param"))
