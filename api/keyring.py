"""Keys, and visits of browsers, that hold long answers open: whether they still do is looked at, for all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import anyio
import structlog
from sqlalchemy.exc import SQLAlchemyError

from core import keys, visits
from core.errors import InvalidKey
from core.services import Services

log = structlog.get_logger()

LOOK_SECONDS = 2.0
"""How long an answer outlives its key or visit, at most."""


Opened = tuple[str, str | None]
"""What opened an answer: the id of a key and, where a browser asked that had signed in with it, of its visit."""


@dataclass
class _Held:
    answers: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class Keyring:
    """The keys of this process's long answers. `on_closed` is called when some of them were closed."""

    def __init__(
        self,
        services: Services,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_closed: Callable[[], None],
    ) -> None:
        self._services = services
        self._spawn = spawn
        self._on_closed = on_closed
        self._held: dict[Opened, _Held] = {}
        self._is_looking = False

    @contextmanager
    def holding(self, key_id: str, visit_id: str | None = None) -> Iterator[asyncio.Event]:
        """While an answer to this key is on its way; the event is set soon after the key was closed, or the visit."""
        by = key_id, visit_id
        held = self._held.setdefault(by, _Held())
        held.answers += 1
        if not self._is_looking:
            self._is_looking = True
            self._spawn(self._look())
        try:
            yield held.closed
        finally:
            held.answers -= 1
            if not held.answers and self._held.get(by) is held:
                del self._held[by]

    def answers(self, key_id: str) -> int:
        """How many long answers to this key are on their way."""
        return sum(held.answers for (by, _), held in self._held.items() if by == key_id)

    async def closes(self, key_id: str) -> NoReturn:
        """Raise InvalidKey soon after the key was closed."""
        with self.holding(key_id) as closed:
            await closed.wait()
        raise InvalidKey("This key was revoked or has expired.")

    async def _look(self) -> None:
        try:
            # Slept first: whoever holds a key now was let in a moment ago.
            await asyncio.sleep(LOOK_SECONDS)
            while self._held:
                await self._look_once()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._is_looking = False

    async def _look_once(self) -> None:
        try:
            closed = await anyio.to_thread.run_sync(partial(self._closed, list(self._held)))
        except SQLAlchemyError as error:
            log.warning("keys can't be looked at, trying again", error=str(error))
            return
        for by in closed:
            if held := self._held.pop(by, None):
                held.closed.set()
        if closed:
            self._on_closed()

    def _closed(self, held: list[Opened]) -> set[Opened]:
        with self._services.db.reading() as session:
            closed = keys.closed(session, {key_id for key_id, _ in held})
            over = visits.closed(session, {visit_id for _, visit_id in held if visit_id is not None})
        return {(key_id, visit_id) for key_id, visit_id in held if key_id in closed or visit_id in over}
