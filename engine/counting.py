"""So many of a thing, as English has it: `1 rank`, `1,024 ranks`."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`noun` is the word for one of them."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
