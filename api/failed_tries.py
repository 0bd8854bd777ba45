"""First tries of creates that this process answered with a 5xx: they have been here, and are owed no retry's job."""

from __future__ import annotations

from time import monotonic

from core.tries import RETRY_WINDOW

MOST = 10_000
"""As many are remembered, the last ones."""


class FailedTries:
    """Noted by one thread, asked by any, for as long as a retry is known as one."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def note(self, digest: str) -> None:
        """This one failed."""
        self._at.pop(digest, None)
        self._at[digest] = monotonic()
        if len(self._at) > MOST:
            del self._at[next(iter(self._at))]

    def __contains__(self, digest: str) -> bool:
        return monotonic() - self._at.get(digest, float("-inf")) < RETRY_WINDOW.total_seconds()
