"""Turn the calls of long work into progress events, a few a second."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.events import Event, Progress
from engine.whereabouts import Whereabouts

LEAST_SECONDS = 0.5
"""Between two events of a phase, its last aside."""


class Reporter:
    """Called as work goes on."""

    def __init__(self, emit: Callable[[Event], None], whereabouts: Whereabouts) -> None:
        self._emit = emit
        self._whereabouts = whereabouts
        self._last: dict[str, float] = {}

    def __call__(self, phase: str, done: int, total: int, unit: str) -> None:
        self._whereabouts.go_on(phase)
        now = time.monotonic()
        if done < total and now - self._last.get(phase, -LEAST_SECONDS) < LEAST_SECONDS:
            return
        self._last[phase] = now
        self._emit(Progress(phase=phase, done=done, total=total, unit=unit))
