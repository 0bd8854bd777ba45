"""So many of a thing, as English has it: `1 rank`, `1,024 ranks`; and the first of many: `a, b, …`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice


def counted(number: int, noun: str) -> str:
    """`noun` is the word for one of them."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_of(words: Iterable[str], most: int) -> str:
    """Up to `most` of them, and a sign where there are more."""
    some = list(islice(words, most + 1))
    return ", ".join(some if len(some) <= most else [*some[:most], "…"])
