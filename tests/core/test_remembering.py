"""What a pure function said is remembered by what its arguments say."""

from __future__ import annotations

import pytest

from core.remembering import remembered
from engine.config import ModelShape
from tests import make


def test_a_function_is_asked_once_for_arguments_that_say_the_same() -> None:
    asked = []

    @remembered
    def width(shape: ModelShape, *, times: int) -> int:
        asked.append(times)
        return times * shape.hidden_size

    shape, scaled = make.shape(), make.shape(rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert [width(shape, times=2), width(make.shape(), times=2)] == [32, 32]
    assert asked == [2]
    # Mappings, which have no hash, count by what is in them.
    assert [width(scaled, times=2), width(scaled.model_copy(), times=2)] == [32, 32]
    assert [width(shape, times=3)] == [48]
    assert asked == [2, 2, 3]


def test_what_is_raised_is_not_remembered() -> None:
    asked = []

    @remembered
    def fails(number: int) -> None:
        asked.append(number)
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            fails(1)
    assert asked == [1, 1]
