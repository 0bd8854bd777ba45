"""Which rectangles of a global tensor a run of a flat buffer holds, so that flat shards can be saved and cut anew.

Indices only; no tensor is touched.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.placement import Placement


@dataclass(frozen=True)
class Rectangle:
    """A box of a tensor: its first index and its size along each dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return 0 in self.size

    def overlap(self, other: Rectangle) -> Rectangle | None:
        """What both cover, or None."""
        offset = tuple(map(max, self.offset, other.offset))
        stop = tuple(map(min, self.stop, other.stop))
        size = tuple(last - first for first, last in zip(offset, stop, strict=True))
        return Rectangle(offset, size) if min(size) > 0 else None

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(first + length for first, length in zip(self.offset, self.size, strict=True))

    def within(self, outer: Rectangle) -> tuple[slice, ...]:
        """The indices of this box in a tensor that holds `outer`."""
        first = [mine - its for mine, its in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + length) for start, length in zip(first, self.size, strict=True))


def cover(shape: tuple[int, ...], start: int, stop: int) -> list[Rectangle]:
    """The elements `start` to `stop` of a tensor in row-major order: a part of a row, whole rows, a part of a row."""
    if len(shape) == 1:
        return [Rectangle((start,), (stop - start,))]
    assert len(shape) == 2, f"parameters are vectors and matrices, not {shape}"
    width = shape[1]
    first_whole, last_whole = -(-start // width), stop // width
    if first_whole > last_whole:
        return [Rectangle((last_whole, start % width), (1, stop - start))]
    parts = [
        Rectangle((start // width, start % width), (1, first_whole * width - start)),
        Rectangle((first_whole, 0), (last_whole - first_whole, width)),
        Rectangle((last_whole, 0), (1, stop - last_whole * width)),
    ]
    return [part for part in parts if not part.is_empty]


def without_padding(local: Rectangle, placement: Placement) -> Rectangle | None:
    """The part of a box of a local tensor that the global tensor has; None where it is all padding."""
    true_size = tuple(placement.length if dim == placement.dim else size for dim, size in enumerate(placement.shape))
    return local.overlap(Rectangle((0,) * len(true_size), true_size))


def globally(local: Rectangle, placement: Placement) -> Rectangle:
    """Where a box of a local tensor lies in the global one."""
    offset = tuple(first + (placement.start if dim == placement.dim else 0) for dim, first in enumerate(local.offset))
    return Rectangle(offset, local.size)
