"""Whether the database's clock was set, which tells whoever reads leases by it that they are not over."""

from __future__ import annotations

STEP_SECONDS = 2.0
"""A clock that is slewed differs by less between two looks."""


class Clock:
    """Compares the database's clock, in Unix seconds, with a monotonic one, at each look."""

    def __init__(self) -> None:
        self._least: float | None = None
        self._most = 0.0
        """By how much the one is ahead of the other, at least and at most."""

    def was_set(self, at: float, *, asked: float, answered: float) -> bool:
        """Whether it was, since the last look: forward, as a host that slept finds it too, or back.

        It said `at`, which was asked and answered so by the monotonic one: the truth lies between.
        """
        least, most = self._least, self._most
        self._least, self._most = at - answered, at - asked
        if least is None:
            return False
        return self._least > most + STEP_SECONDS or self._most < least - STEP_SECONDS
