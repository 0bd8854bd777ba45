"""Which documents share a row. Pure arithmetic on lengths; the ids stay where they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

D = TypeVar("D")


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows as lists of places in `lengths`; each document whole, in one row, and no row above `capacity`.

    Each row begins with the longest document that is left and is filled as full as the others allow, with the longest
    of them first: the minimum bin slack of Gupta and Ho (1999), over the histogram of lengths (Krell et al. 2021), so
    that its cost grows with how many lengths there are. Rows come in the order of their first documents in `lengths`.
    """
    waiting: dict[int, list[int]] = {}
    for place in range(len(lengths) - 1, -1, -1):
        waiting.setdefault(lengths[place], []).append(place)
    left = sorted(waiting, reverse=True)
    rows: list[list[int]] = []
    while left:
        pattern = Counter(_fullest(left, waiting, capacity))
        # As often as there are documents for it.
        for _ in range(min(len(waiting[length]) // count for length, count in pattern.items())):
            row = [waiting[length].pop() for length, count in pattern.items() for _ in range(count)]
            rows.append(sorted(row))
        left = [length for length in left if waiting[length]]
    return sorted(rows)


def _fullest(left: Sequence[int], waiting: Mapping[int, Sequence[int]], capacity: int) -> list[int]:
    """Lengths that fill a row best, the longest of `left` among them. `left` falls."""
    longest = left[0]
    room = capacity - longest
    every = (1 << (room + 1)) - 1
    reached = 1
    """Bit n is set where some of the lengths looked at so far add up to n."""
    steps: list[tuple[int, int]] = []
    """Each length looked at, and what was reached without it."""
    for length in left:
        there = len(waiting[length]) - (length == longest)
        for _ in range(min(there, room // length)):
            if reached >> room:
                break
            steps.append((length, reached))
            reached |= (reached << length) & every
    rest = reached.bit_length() - 1
    chosen = [longest]
    for length, without in reversed(steps):
        if not without >> rest & 1:
            chosen.append(length)
            rest -= length
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
