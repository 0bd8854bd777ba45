"""The learning rate, worked out by hand."""

from math import cos, pi

import pytest

from engine.config import Training
from engine.schedule import learning_rate


def training(**changes):
    return Training(**{"steps": 10, "global_batch": 1, "micro_batch": 1, "lr": 1.0, "warmup": 0.2} | changes)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        pytest.param("linear", [0.5, 1, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125, 0.1], id="linear"),
        pytest.param("constant", [0.5] + [1] * 9, id="constant"),
        pytest.param("cosine", [0.5] + [0.1 + 0.45 * (1 + cos(pi * i / 8)) for i in range(9)], id="cosine"),
    ],
)
def test_the_rate_rises_to_its_peak_and_falls_to_its_floor(schedule, expected):
    rates = [learning_rate(step, total_steps=10, training=training(schedule=schedule)) for step in range(1, 11)]
    assert rates == pytest.approx(expected)


def test_without_a_warm_up_the_first_step_has_the_peak_and_the_last_the_floor():
    rates = [learning_rate(step, total_steps=3, training=training(warmup=0, lr=2.0)) for step in (1, 2, 3)]
    assert rates == pytest.approx([2.0, 1.1, 0.2])


def test_a_run_of_one_step_uses_the_peak():
    assert learning_rate(1, total_steps=1, training=training()) == 1.0
