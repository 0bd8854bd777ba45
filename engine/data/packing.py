"""Which documents share a row. Pure arithmetic on lengths; the ids stay where they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

D = TypeVar("D")


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows as lists of places in `lengths`; each document whole, in one row, and no row above `capacity`.

    Best-fit decreasing: the longest first, each into the fullest row that still has room. Needs at most 11/9 of the
    fewest rows possible, and one (Johnson 1973). Rows come in the order of their first documents in `lengths`.
    """
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]
    """By room left, the rows that have just that much."""
    with_room = 0
    """Bit r is set while some row has room r, so that the fullest fitting one is a shift and a lowest bit away."""
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        length = lengths[place]
        fitting = with_room >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                with_room &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(place)
        left = room - length
        if left:
            open_rows[left].append(row)
            with_room |= 1 << left
    for members in rows:
        members.sort()
    return sorted(rows)


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
