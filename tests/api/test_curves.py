"""Curves in characters; the pictures were drawn by hand, dot for dot."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from api.cli.curves import Curve, draw


def lines(*curves: Curve, width: int, height: int, ascii_only: bool = False) -> list[str]:
    return draw(curves, width=width, height=height, ascii_only=ascii_only).plain.split("\n")


def test_a_diagonal_goes_from_corner_to_corner():
    # One line of eight characters is 16 by 4 dots: the line falls a dot in each four to five columns.
    assert lines(Curve("a", [(0, 3.0), (15, 0.0)]), width=10, height=3) == [
        "3┤⠉⠒⠒⠤⠤⣀⣀⡀".replace("⠉⠒⠒⠤⠤⣀⣀⡀", dots(0, 3, 16)),
        "  0     15",
        "━ a 0",
    ]


def dots(low: int, high: int, columns: int) -> str:
    """The line from the top left to the bottom right, each dot by the straight line's equation."""
    bits = {(0, 0): 1, (0, 1): 2, (0, 2): 4, (0, 3): 64, (1, 0): 8, (1, 1): 16, (1, 2): 32, (1, 3): 128}
    cells = [0] * (columns // 2)
    for x in range(columns):
        cells[x // 2] |= bits[x % 2, round((high - low) * x / (columns - 1))]
    return "".join(chr(0x2800 + cell) for cell in cells)


def test_plain_characters_do_where_there_is_nothing_else():
    rising = Curve("a", [(step, float(step)) for step in range(3)])
    flat = Curve("b", [(0, 0.0), (2, 0.0)])
    assert lines(rising, flat, width=11, height=5, ascii_only=True) == [
        "2|       **",
        " |   ****  ",
        "0|ooooooooo",
        "  0       2",
        "* a 2  o b 0",
    ]


@pytest.mark.parametrize("width", [1, 5, 12, 40, 200])
@pytest.mark.parametrize("height", [1, 3, 20])
def test_a_picture_keeps_to_its_columns(width, height):
    wave = Curve("loss", [(step, (step * 7919 % 101) / 3) for step in range(500)])
    drawn = lines(wave, width=width, height=height)
    assert len(drawn) <= height
    assert all(cell_len(line) <= width for line in drawn[:-1])


@pytest.mark.parametrize(
    "points",
    [
        pytest.param([], id="none"),
        pytest.param([(1, float("nan"))], id="not a number"),
        pytest.param([(1, float("inf"))], id="not finite"),
    ],
)
def test_nothing_is_drawn_of_nothing(points):
    assert lines(Curve("a", points), width=40, height=8) == [""]


def test_one_point_and_a_flat_curve_lie_at_the_bottom_with_one_number():
    assert lines(Curve("a", [(7, 2.5)]), width=14, height=4) == ["2.5┤          ", "   │⡀         ", "    7", "━ a 2.5"]
