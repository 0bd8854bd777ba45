"""Turns at what many projects want at once: each has so many, so that one's flood leaves room for the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from core.errors import Unavailable

PATIENCE_SECONDS = 120.0
Line = TypeVar("Line")


@dataclass
class _Places:
    free: asyncio.Semaphore
    users: int = 0
    """Who is in one of them, or waits."""


class Turns:
    """So many at once of each project; whoever is next waits in line with those of the same project alone."""

    def __init__(self, of_a_project: int, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._of_a_project = of_a_project
        self._patience_seconds = patience_seconds
        self._places: dict[str, _Places] = {}

    @asynccontextmanager
    async def taken(self, project_id: str) -> AsyncIterator[None]:
        """While it is this project's turn. Unavailable where that doesn't come for too long."""
        places = self._places.setdefault(project_id, _Places(asyncio.Semaphore(self._of_a_project)))
        places.users += 1
        try:
            await self._wait(places)
            try:
                yield
            finally:
                places.free.release()
        finally:
            places.users -= 1
            if not places.users:
                del self._places[project_id]

    async def lines(self, project_id: str, lines: AsyncGenerator[Line, None]) -> AsyncGenerator[Line, None]:
        """`lines`, begun and ended within a turn."""
        async with self.taken(project_id), aclosing(lines):
            async for line in lines:
                yield line

    async def _wait(self, places: _Places) -> None:
        try:
            async with asyncio.timeout(self._patience_seconds):
                await places.free.acquire()
        except TimeoutError:
            raise Unavailable(
                f"The project asks for more than {self._of_a_project} at once here, and none of them ended within "
                f"{self._patience_seconds:g} s; try again."
            ) from None
