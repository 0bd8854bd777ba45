"""Leave to others what they need as well: whoever kept it busy for long rests for some times as long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic


class Rest:
    """How long to leave it alone after each piece of work."""

    def __init__(self, *, times: float, unless_seconds: float = 0.0, most_seconds: float) -> None:
        """`times` as long as the work took, and no longer than `most_seconds`; not at all where it took less than
        `unless_seconds`.
        """
        self._times, self._unless_seconds, self._most_seconds = times, unless_seconds, most_seconds
        self._until = 0.0

    @contextmanager
    def after(self) -> Iterator[None]:
        """The work, however it ends."""
        began = monotonic()
        try:
            yield
        finally:
            ended = monotonic()
            took = ended - began
            self._until = ended + (min(self._times * took, self._most_seconds) if took >= self._unless_seconds else 0.0)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._until - monotonic())
