"""Where a rank's time goes: waiting for others, for data, for a checkpoint; what is left is compute.

Time is that of the stream which computes. On a CPU that is the clock; on CUDA it is pairs of events on the current
stream, so that only what the compute had to wait for counts, however early the host had asked for it.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, get_args

import torch

from engine.whereabouts import Whereabouts

Span = Literal["communication", "bubble", "data", "evaluation", "checkpoint"]
"""What a rank does besides computing for a step. `communication`: waits for a collective that no compute hides;
`bubble`: waits for a neighbour in the pipeline; `data`: waits for its batch; the others take all of their time."""

PARTS: tuple[str, ...] = ("compute", *get_args(Span))
"""What a step's time is made of."""

WAITS: frozenset[Span] = frozenset({"communication", "bubble"})
"""Spans in which a rank waits for others."""


class Clock(Protocol):
    """Marks on a timeline."""

    def mark(self) -> Any:
        """Now, on the timeline."""

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks that lie in the past."""

    def reach(self, mark: Any) -> None:
        """Return once `mark` lies in the past."""


class HostClock:
    """The timeline of the process."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def reach(self, mark: float) -> None:
        pass


class StreamClock:
    """The timeline of the current CUDA stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1000

    def reach(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()


class Stopwatch:
    """Adds up the spans of one rank. They follow one another or nest, from whichever thread: never two at once."""

    def __init__(
        self, device: torch.device | None = None, whereabouts: Whereabouts | None = None, clock: Clock | None = None
    ) -> None:
        """Of the host where no `device` is given. Waits are told to `whereabouts`, too."""
        self.whereabouts = whereabouts or Whereabouts()
        on_cuda = device is not None and device.type == "cuda"
        self.clock: Clock = clock or (StreamClock() if on_cuda else HostClock())
        self.spans: list[tuple[Span, Any, Any]] = []
        self.inside = False
        self._begun = time.perf_counter()

    def span(self, name: Span) -> AbstractContextManager[None]:
        """What passes in this block is `name`'s time, unless it stands within another span: that has all of it."""
        return _Block(self, name)

    def lap(self) -> dict[str, float]:
        """Seconds since the last lap, or since the beginning, by part; together they are what has passed.

        Called where the host has just waited for the device, it waits no further.
        """
        parts = dict.fromkeys(PARTS, 0.0)
        if self.spans:
            self.clock.reach(self.spans[-1][2])
        for name, start, end in self.spans:
            parts[name] += self.clock.seconds(start, end)
        now = time.perf_counter()
        # On CUDA two clocks are compared, whose readings may differ by microseconds.
        parts["compute"] = max(0.0, now - self._begun - sum(parts.values()))
        self.spans, self._begun = [], now
        return parts


class _Block(AbstractContextManager[None]):
    """A span under way. There are many in a step, so this is no generator."""

    def __init__(self, stopwatch: Stopwatch, name: Span) -> None:
        self.stopwatch, self.name = stopwatch, name

    def __enter__(self) -> None:
        if self.name in WAITS:
            self.stopwatch.whereabouts.wait()
        self.is_outermost, self.stopwatch.inside = not self.stopwatch.inside, True
        if self.is_outermost:
            self.start = self.stopwatch.clock.mark()

    def __exit__(self, *_: object) -> None:
        if self.is_outermost:
            self.stopwatch.spans.append((self.name, self.start, self.stopwatch.clock.mark()))
            self.stopwatch.inside = False
        if self.name in WAITS:
            self.stopwatch.whereabouts.waited()
