"""Whether the ranks of a run go on, and whom the others wait for where they don't. Asking them is `launch`'s part."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from engine.events import Failed
from engine.stacks import Frame, in_words
from engine.whereabouts import Place

LONG_CALLS = frozenset({"start", "tokenizer"})
"""Phases in which a library does much in one call: importing torch from a cold disk, merging a large vocabulary."""
LONG_CALL_SECONDS = 3600.0
"""The least that a run may be still in those."""
LOOKS = 20
"""At the ranks, in the time that they may be still."""
LONGEST_INTERVAL = 5.0
"""Seconds between two looks, at most."""
LATE_SECONDS = 1.0
"""A look that comes later than that shows that the launcher had no time either."""
USUAL_TIMES = 3
"""A run that was still for long and went on may be still for so many times as long."""
USUAL_STEPS = 50
"""A step that stands still for the time of so many usual ones has stalled, be it sooner than `stall_seconds`."""
LEAST_SECONDS = 60.0
"""But no sooner than that, however short steps are: hosts have their moments."""
STEPS_REMEMBERED, FEWEST_STEPS = 64, 4


class Stillness:
    """How long no rank has gone on, by what is seen of them at each look."""

    def __init__(self, stall_seconds: float) -> None:
        self.stall_seconds = stall_seconds
        self.interval = min(stall_seconds / LOOKS, LONGEST_INTERVAL)
        """Seconds between two looks."""
        self.seconds = 0.0
        """So long nobody has gone on."""
        self._usual = 0.0
        self._step = 0
        """That which the hindmost rank was last seen in."""
        self._step_seconds = 0.0
        """So long it has been in it."""
        self._steps: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        """Seconds of each of the last steps, as far as looks can tell them apart."""
        self._seen: Sequence[Place | None] | None = None
        self._looked: float | None = None

    def is_too_long(self, places: Sequence[Place | None], now: float) -> bool:
        """Look at where the ranks are `now`, in seconds on any clock; whether the run has stalled."""
        # Where the host slept, or the whole group was stopped, the ranks had no time either.
        passed = 0.0 if self._looked is None else min(now - self._looked, self.interval + LATE_SECONDS)
        self._time_steps(places, passed)
        if places != self._seen:
            if self._seen is not None and not in_long_call(self._seen):
                self._usual = max(self._usual, self.seconds)
            self._seen, self.seconds = places, 0.0
        else:
            self.seconds += passed
        self._looked = now
        return self.seconds >= self._limit(places)

    def _time_steps(self, places: Sequence[Place | None], passed: float) -> None:
        """Take note of how long steps take, by what a look finds after so many seconds."""
        step = min((0 if place is None else place.step for place in places), default=0)
        self._step_seconds += passed
        if step > self._step:
            done = step - self._step
            # Not the first: it begins before anybody looks, and waits for much that later ones find ready.
            if self._step:
                self._steps.extend([self._step_seconds / done] * min(done, STEPS_REMEMBERED))
            self._step_seconds = 0.0
        self._step = step

    def _limit(self, places: Sequence[Place | None]) -> float:
        if in_long_call(places):
            return max(self.stall_seconds, LONG_CALL_SECONDS, USUAL_TIMES * self._usual)
        least = self.stall_seconds
        if len(self._steps) >= FEWEST_STEPS and all(place is not None and place.phase == "step" for place in places):
            least = min(least, max(LEAST_SECONDS, USUAL_STEPS * median(self._steps)))
        return max(least, USUAL_TIMES * self._usual)


def in_long_call(places: Sequence[Place | None]) -> bool:
    """Whether some rank may be in a library for long."""
    return any(place is None or place.phase in LONG_CALLS for place in places)


@dataclass(frozen=True)
class Found:
    """What there is to know of one rank of a run that has stalled."""

    place: Place | None
    """None: it never said."""
    stack: list[Frame]
    """Of its main thread, innermost first; empty where it did not answer."""
    state: str = ""
    """The kernel's letter for what the process does; empty where that isn't known."""

    @property
    def is_frozen(self) -> bool:
        return not self.stack

    @property
    def waits(self) -> bool:
        return self.place is not None and self.place.waiting


STATES = {
    "T": "it was stopped by a signal",
    "t": "a debugger holds it",
    "D": "it waits within the kernel, for a disk, a network file system or a device",
    "Z": "it has ended",
}
"""What a process that does not answer does."""


def awaited(ranks: Sequence[Found]) -> int:
    """The rank that the others wait for: one that is frozen, else one that waits for nobody, else the furthest behind.

    Counts of waits differ between pipeline stages by their nature, so that steps come first.
    """

    def how_innocent(number: int) -> tuple[bool, bool, int, int, int]:
        rank = ranks[number]
        step, waits = (rank.place.step, rank.place.waits) if rank.place is not None else (0, 0)
        return not rank.is_frozen, rank.waits, step, waits, number

    return min(range(len(ranks)), key=how_innocent)


def verdict(ranks: Sequence[Found], *, seconds: float) -> Failed:
    """Why the run can't go on, after nobody has for `seconds`."""
    number = awaited(ranks)
    rank = ranks[number]
    who = f"rank {number} of {len(ranks)}"
    if rank.is_frozen:
        why = f" ({STATES[rank.state]})" if rank.state in STATES else ""
        found = f"{who} is frozen and does not answer{why}"
    elif len(ranks) == 1:
        found = f"it stands in {in_words(rank.stack)}"
    elif rank.waits:
        found = f"all ranks wait for one another, {who} the furthest behind, in {in_words(rank.stack)}"
    else:
        found = f"the others wait for {who}, which stands in {in_words(rank.stack)}"
    return Failed(
        code="stalled",
        message=f"the run has not gone on for {seconds:.3g} seconds{_when(rank.place)}: {found}",
        hint="The stacks of all ranks are in their logs. If it was only slow, lengthen training.stall_seconds.",
        rank=number,
    )


def _when(place: Place | None) -> str:
    if place is None:
        return ""
    return f", in step {place.step}" if place.phase == "step" else f", in phase {place.phase!r}"
