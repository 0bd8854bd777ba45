"""Which documents share a row. Pure arithmetic on lengths; the ids stay where they are."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

D = TypeVar("D")


ENOUGH = 32
"""Pieces looked at for a row that has no place left; from here on a hundredth may stay empty."""
MOST = 1024
"""Pieces looked at for a row at all."""


def pack(
    lengths: Sequence[int],
    capacity: int,
    *,
    told: Callable[[int, int], None] | None = None,
    in_time: Callable[[], bool] | None = None,
) -> list[list[int]]:
    """Rows as lists of places in `lengths`; each document whole, in one row, and no row above `capacity`.

    Each row begins with the longest document that is left and is filled as full as the others allow, with the longest
    of them first: the minimum bin slack of Gupta and Ho (1999), over the histogram of lengths (Krell et al. 2021), so
    that its cost grows with how many lengths there are; it is bounded for each row. Rows come in the order of their
    first documents in `lengths`. `told(placed, total)` hears of each kind of row. Once `in_time` says no, rows take the
    longest that fits, which is quick.
    """
    waiting: dict[int, list[int]] = {}
    for place in range(len(lengths) - 1, -1, -1):
        waiting.setdefault(lengths[place], []).append(place)
    # Rising, for what a row has room for is found by bisection.
    left = sorted(waiting)
    rows: list[list[int]] = []
    placed = 0
    while left:
        thorough = in_time is None or in_time()
        pattern = Counter((_fullest if thorough else _longest_first)(left, waiting, capacity))
        # As often as there are documents for it.
        for _ in range(min(len(waiting[length]) // count for length, count in pattern.items())):
            row = [waiting[length].pop() for length, count in pattern.items() for _ in range(count)]
            rows.append(sorted(row))
            placed += len(row)
        for length in pattern:
            if not waiting[length]:
                del left[bisect_left(left, length)]
        if told is not None:
            told(placed, len(lengths))
    return sorted(rows)


def _fullest(left: Sequence[int], waiting: Mapping[int, Sequence[int]], capacity: int) -> list[int]:
    """Lengths that fill a row best, the longest of `left` among them. `left` rises."""
    longest = left[-1]
    room = capacity - longest
    every = (1 << (room + 1)) - 1
    reached = 1
    """Bit n is set where some of the lengths looked at so far add up to n."""
    steps: list[tuple[int, int, int]] = []
    """Each length looked at, how often it stands there, and what was reached without it."""
    for length, count in _pieces(left, waiting, room):
        empty = room + 1 - reached.bit_length()
        if empty == 0 or len(steps) >= MOST or (len(steps) >= ENOUGH and empty * 100 <= capacity):
            break
        steps.append((length, count, reached))
        reached |= (reached << length * count) & every
    rest = reached.bit_length() - 1
    chosen = [longest]
    for length, count, without in reversed(steps):
        if not without >> rest & 1:
            chosen += [length] * count
            rest -= length * count
    return chosen


def _pieces(left: Sequence[int], waiting: Mapping[int, Sequence[int]], room: int) -> Iterator[tuple[int, int]]:
    """The lengths besides the longest that `room` may take, the longest first; their numbers add up to any of them."""
    for at in range(bisect_right(left, room) - 1, -1, -1):
        length = left[at]
        there = min(len(waiting[length]) - (length == left[-1]), room // length)
        count = 1
        while there > 0:
            # 1, 2, 4 and so on, and what is then left.
            yield length, min(count, there)
            there -= count
            count *= 2


def _longest_first(left: Sequence[int], waiting: Mapping[int, Sequence[int]], capacity: int) -> list[int]:
    """Lengths that fill a row in one go, the longest of `left` among them. `left` rises."""
    chosen = [left[-1]]
    room = capacity - left[-1]
    at = len(left)
    while (at := min(at, bisect_right(left, room)) - 1) >= 0:
        length = left[at]
        count = min(len(waiting[length]) - (length == left[-1]), room // length)
        chosen += [length] * count
        room -= length * count
    return chosen


def cut(
    documents: Iterable[tuple[D, int]], capacity: int, *, packing: bool = True
) -> Iterator[list[tuple[D, int, int]]]:
    """Cut a stream of documents, each with its length, into rows of `(document, start, length)`.

    Every row is full but the last, where `packing` lets it be.

    Where a document goes on in the next row, its last id is repeated there as the first: it was predicted here, and is
    what the next id is predicted from. So each id but a document's first is predicted exactly once. Without `packing`
    a document begins a row.
    """
    row: list[tuple[D, int, int]] = []
    room = capacity
    for document, length in documents:
        if row and not packing:
            yield row
            row, room = [], capacity
        start = 0
        # Of a single id nothing can be predicted, so neither a document nor a row ends with one alone.
        while length - start >= 2:
            if room < 2:
                yield row
                row, room = [], capacity
            taken = min(room, length - start)
            row.append((document, start, taken))
            room -= taken
            start += taken - 1
    if row:
        yield row
