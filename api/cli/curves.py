"""Draw curves over steps in characters: braille, with two by four dots in each, or ASCII where that is all there is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot of a braille character, from the top: left, right (Unicode, block 2800)."""
BRAILLE = 0x2800
STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red")
ASCII_MARKS = "*o+x#%"
LEAST_WIDTH = 8
"""Columns for the dots beneath which nothing can be seen."""

Point = Sequence[float]
"""A step and a value."""


@dataclass(frozen=True)
class Curve:
    name: str
    points: Sequence[Point]


def draw(curves: Sequence[Curve], *, width: int, height: int, ascii_only: bool = False) -> Text:
    """The curves in one picture of `width` columns and `height` lines, with the ends of both axes and a legend.

    Later ones lie on top of earlier ones. Few points are joined; where there are several in a column, all are drawn.
    """
    drawn = [Curve(each.name, [point for point in each.points if math.isfinite(point[1])]) for each in curves]
    drawn = [each for each in drawn if each.points]
    if not drawn:
        return Text()
    steps = [point[0] for each in drawn for point in each.points]
    values = [point[1] for each in drawn for point in each.points]
    top, bottom = f"{max(values):.4g}", f"{min(values):.4g}"
    margin = max(len(top), len(bottom))
    columns, lines = width - margin - 1, height - 2
    legend = _legend(drawn, ascii_only=ascii_only)
    if columns < LEAST_WIDTH or lines < 1:
        return legend
    across, down = (columns, lines) if ascii_only else (2 * columns, 4 * lines)
    x_of, y_of = _scale(steps, across), _scale(values, down)
    cells: dict[tuple[int, int], tuple[int, int]] = {}
    """Of each character that isn't blank: the last curve in it, and that curve's dots."""
    for number, each in enumerate(drawn):
        corners = [(x_of(step), down - 1 - y_of(value)) for step, value in each.points]
        for x, y in _joined(corners):
            cell, bit = ((x, y), 1) if ascii_only else ((x // 2, y // 4), DOTS[y % 4][x % 2])
            before = cells.get(cell, (number, 0))
            cells[cell] = (number, bit | (before[1] if before[0] == number else 0))
    text = Text(no_wrap=True, overflow="crop")
    for line in range(lines):
        label = top if line == 0 else bottom if line == lines - 1 and bottom != top else ""
        text.append(f"{label:>{margin}}{'|' if ascii_only else '┤' if label else '│'}", style="dim")
        for column in range(columns):
            number, dots = cells.get((column, line), (0, 0))
            mark = " " if not dots else ASCII_MARKS[number % 6] if ascii_only else chr(BRAILLE + dots)
            text.append(mark, style=STYLES[number % len(STYLES)] if dots else "")
        text.append("\n")
    first, last = f"{min(steps):g}", f"{max(steps):g}"
    ends = first if first == last else f"{first}{last:>{columns - len(first)}}"
    text.append(f"{'':{margin}} {ends}\n", style="dim")
    return text.append_text(legend)


def _legend(curves: Sequence[Curve], *, ascii_only: bool) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for number, each in enumerate(curves):
        mark = ASCII_MARKS[number % 6] if ascii_only else "━"
        text.append("  " if number else "").append(f"{mark} ", style=STYLES[number % len(STYLES)])
        text.append(f"{each.name} {each.points[-1][1]:.4g}")
    return text


def _scale(values: Sequence[float], cells: int) -> Callable[[float], int]:
    """From the least to the greatest value, over so many cells; all in the first where they are the same."""
    low, high = min(values), max(values)
    span = high - low
    return lambda value: round((value - low) / span * (cells - 1)) if span > 0 else 0


def _joined(corners: Sequence[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Every dot of the straight lines between neighbours."""
    yield corners[0]
    for (x0, y0), (x1, y1) in pairwise(corners):
        moves = max(abs(x1 - x0), abs(y1 - y0))
        for move in range(1, moves + 1):
            yield x0 + round((x1 - x0) * move / moves), y0 + round((y1 - y0) * move / moves)
