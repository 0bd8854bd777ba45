"""Whether the database's clock was set, which tells whoever reads leases by it that they are not over."""

from __future__ import annotations

STEP_SECONDS = 2.0
"""A clock that is slewed, or that is read late, differs by less between two looks."""


class Clock:
    """Compares the database's clock, in Unix seconds, with a monotonic one, at each look."""

    def __init__(self) -> None:
        self._ahead: float | None = None

    def was_set(self, at: float, monotonic: float) -> bool:
        """Whether it was, since the last look: forward, as a host that slept finds it too, or back."""
        before, self._ahead = self._ahead, at - monotonic
        return before is not None and abs(self._ahead - before) > STEP_SECONDS
