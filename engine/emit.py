"""Write `events.jsonl`: numbered, timed, a whole line at a time. What the events mean is `engine.events`' business."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from engine.events import LAST, Event, adapter


class Emitter:
    """The one writer of a run's events. Appends after what is there, and drops a line that was cut short."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.seq = self._drop_half_a_line()

    def emit(self, event: Event) -> Event:
        """Append `event` with its number and time, and return it so."""
        self.seq += 1
        event = event.model_copy(update={"seq": self.seq, "time": self.clock()})
        line = memoryview(event.model_dump_json().encode() + b"\n")
        # One write is one line to whoever follows. Only a full disk makes it short, and then the next one raises.
        while line:
            line = line[os.write(self._file, line) :]
        return event

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _drop_half_a_line(self) -> int:
        """Cut the file after its last whole line; how many lines there are."""
        whole = lines = at = 0
        while block := os.pread(self._file, 1 << 20, at):
            if (end := block.rfind(b"\n")) >= 0:
                whole = at + end + 1
            lines += block.count(b"\n")
            at += len(block)
        if whole < at:
            os.ftruncate(self._file, whole)
        return lines


def last_event(path: Path) -> Event | None:
    """The event that ended the run in `path`, or None where nothing did."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        # A last event is short, but its message may be a long one.
        file.seek(max(0, path.stat().st_size - (1 << 20)))
        lines = file.read().split(b"\n")
    if len(lines) < 2:
        return None
    event = adapter.validate_json(lines[-2])
    return event if isinstance(event, LAST) else None
