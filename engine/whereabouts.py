"""Where a rank is, in a small file that its launcher reads: whether it waits for others, and how often it went on."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

FOLDER = "whereabouts"
_RECORD = struct.Struct("<QQQ?16s")


@dataclass(frozen=True)
class Place:
    """Where a rank was when somebody looked."""

    moves: int
    """How often it went on; any other number than before is progress."""
    waits: int
    """For other ranks, begun so far."""
    step: int
    """At work on, from 1; 0 before the first."""
    waiting: bool
    """For other ranks: it is inside an exchange with them."""
    phase: str
    """The part of the run, such as `data`, `model`, `step` or `export`."""


class Whereabouts:
    """A rank's record of where it is. Written often, by a few memory stores; read by whoever maps the same file."""

    def __init__(self, path: Path | None = None) -> None:
        """With a `path` others can read it; its folder is made."""
        self._phase = b"start"
        self._moves = self._waits = self._step = self._depth = 0
        if path is None:
            self._memory = mmap.mmap(-1, _RECORD.size)
            return
        path.parent.mkdir(exist_ok=True)
        with path.open("w+b") as file:
            # Written, not only made long: a full disk raises here, and not as a SIGBUS later; and whoever reads it
            # before this rank first goes on reads that it starts.
            file.write(self._record())
            file.flush()
            self._memory = mmap.mmap(file.fileno(), _RECORD.size)

    def go_on(self, phase: str | None = None, *, step: int | None = None) -> None:
        """Something is done, and the next thing begins: of `phase` or of `step`, where those are new."""
        self._phase = self._phase if phase is None else phase.encode()
        self._step = self._step if step is None else step
        self._write()

    def through(self, items: Iterable[T]) -> Iterator[T]:
        """The same items; each that is asked for is a sign that the ones before are done."""
        for item in items:
            self.go_on()
            yield item

    def wait(self) -> None:
        """Other ranks are waited for, until `waited`; this may be said again meanwhile."""
        self._waits += 1
        self._depth += 1
        self._write()

    def waited(self) -> None:
        """The others are there."""
        self._depth -= 1
        self._write()

    def _write(self) -> None:
        self._moves += 1
        self._memory[:] = self._record()

    def _record(self) -> bytes:
        return _RECORD.pack(self._moves, self._waits, self._step, self._depth > 0, self._phase)


def path_of(run_dir: Path, rank: int) -> Path:
    """The file in which `rank` of the run in `run_dir` says where it is."""
    return run_dir / FOLDER / f"rank-{rank}"


def read(path: Path) -> Place | None:
    """Where a rank is; None where it has not said so yet."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(content) < _RECORD.size:
        return None
    moves, waits, step, waiting, phase = _RECORD.unpack_from(content)
    return Place(moves, waits, step, waiting, phase.rstrip(b"\0").decode(errors="replace"))


def forget(run_dir: Path) -> None:
    """Remove what the ranks of an earlier run in this folder said."""
    for path in (run_dir / FOLDER).glob("rank-*"):
        path.unlink()
