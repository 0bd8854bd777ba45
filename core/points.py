"""Points of a metric that follow one another, packed into bytes. Where they are kept is `metrics`' business."""

from __future__ import annotations

import struct
from collections.abc import Sequence

POINTS = 256
"""In a pack. A million points are then four thousand packs, whose extremes are read in a few milliseconds, and what
is not packed yet stays few."""


def pack(steps: Sequence[int], values: Sequence[float]) -> bytes:
    """Steps as 64-bit integers, then values as 64-bit floats, little-endian."""
    return struct.pack(f"<{len(steps)}q{len(values)}d", *steps, *values)


def unpack(packed: bytes) -> tuple[list[int], list[float]]:
    count = len(packed) // 16
    numbers = struct.unpack(f"<{count}q{count}d", packed)
    return list(numbers[:count]), list(numbers[count:])
