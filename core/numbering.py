"""Numbers that rise along the line, of which as few as possible change when the line does.

A place is a count of lower numbers. So a job that leaves changes no other's row, nor does one that comes between two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise


def renumbered(line: Sequence[str], numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers that are new: those of jobs that have none, and of as few others as the order allows."""
    had = [numbers.get(job_id) for job_id in line]
    kept = _rising(had)
    if len(kept) == len(line):
        return {}
    new: dict[str, float] = {}
    for start, end in zip([-1, *kept], [*kept, len(line)], strict=True):
        between = line[start + 1 : end]
        below = had[start] if start >= 0 else None
        above = had[end] if end < len(line) else None
        spread = _spread(below, above, len(between))
        if any(a >= b for a, b in pairwise(spread)):
            # The gap is used up to the last bit: all get whole numbers again.
            return {job_id: float(place) for place, job_id in enumerate(line) if numbers.get(job_id) != place}
        new.update(zip(between, spread[1:-1], strict=True))
    return new


def _rising(had: Sequence[float | None]) -> list[int]:
    """Positions of the longest rising subsequence: what can stay (patience sorting)."""
    tops: list[float] = []
    at: list[int] = []
    before: list[int] = []
    for index, number in enumerate(had):
        before.append(-1)
        if number is None:
            continue
        pile = len(tops) if not tops or number > tops[-1] else bisect_left(tops, number)
        before[index] = at[pile - 1] if pile else -1
        tops[pile : pile + 1] = [number]
        at[pile : pile + 1] = [index]
    rising = []
    index = at[-1] if at else -1
    while index >= 0:
        rising.append(index)
        index = before[index]
    return rising[::-1]


def _spread(below: float | None, above: float | None, count: int) -> list[float]:
    """Both ends and `count` numbers between them, at equal distances; whole ones where an end is open."""
    low = below if below is not None else (above if above is not None else 0.0) - count - 1
    high = above if above is not None else low + count + 1
    return [low, *(low + (high - low) * (index + 1) / (count + 1) for index in range(count)), high]
