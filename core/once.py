"""Do once what several ask for within a moment, where doing it once more would change nothing."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, Timer
from time import monotonic


class Once:
    """Acts at once for who asks after a quiet moment; then, as that moment ends, once for all who asked within it.

    Whoever asks is answered by an act that begins after they asked. One that is still to come is lost with the process.
    """

    def __init__(self, act: Callable[[], None], *, moment_seconds: float) -> None:
        self._act = act
        self._moment_seconds = moment_seconds
        self._lock = Lock()
        self._quiet_until = 0.0
        self._coming: Timer | None = None

    def ask(self) -> None:
        """Let it be done, now or a moment later. Raises what it raises if that is now."""
        with self._lock:
            if self._coming is not None:
                return
            wait = self._quiet_until - monotonic()
            if wait > 0:
                self._coming = Timer(wait, self.finish)
                self._coming.daemon = True
                self._coming.start()
                return
            self._begin()
        self._act()

    def finish(self) -> None:
        """Do now what was still to come."""
        with self._lock:
            if self._coming is None:
                return
            self._coming.cancel()
            self._begin()
        self._act()

    def _begin(self) -> None:
        # Who asks from here on may have come too late for this one.
        self._coming = None
        self._quiet_until = monotonic() + self._moment_seconds
