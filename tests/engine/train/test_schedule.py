"""The learning rate, worked out by hand."""

from math import ceil, cos, pi

import pytest
import torch

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
        pytest.param("wsd", [0.5] + [1] * 7 + [0.55, 0.1], id="warmup, stable, decay"),
    ],
)
def test_the_rate_rises_to_its_peak_and_falls_to_its_floor(schedule, expected):
    rates = [learning_rate(step, total_steps=10, training=training(schedule=schedule)) for step in range(1, 11)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("decay", [None, 0.1, 0.33, 0.9])
def test_after_the_warm_up_warmup_stable_decay_is_that_of_transformers(decay):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: `make dev`")
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=2.0)
    theirs = transformers.get_wsd_schedule(
        optimizer, num_warmup_steps=10, num_decay_steps=ceil((decay or 0.2) * 100), num_training_steps=100,
        decay_type="linear", min_lr_ratio=0.1,
    )  # fmt: skip
    expected = []
    for _ in range(100):
        optimizer.step()
        theirs.step()
        expected.append(theirs.get_last_lr()[0])
    asked = training(steps=100, lr=2.0, warmup=0.1, schedule="wsd", decay=decay)
    ours = [learning_rate(step, total_steps=100, training=asked) for step in range(1, 101)]
    # From the peak on: their warm-up rises from the floor, ours from zero.
    assert ours[9:] == pytest.approx(expected[9:])


def test_a_longer_run_begins_as_a_shorter_one_and_falls_later():
    short, long = (training(steps=n, warmup=10 / n, schedule="wsd", decay=20 / n) for n in (100, 1000))
    before_the_fall = [learning_rate(step, total_steps=100, training=short) for step in range(1, 81)]
    assert [learning_rate(step, total_steps=1000, training=long) for step in range(1, 81)] == before_the_fall


def test_a_short_run_falls_over_what_is_left_after_its_warm_up():
    # Two of three steps are its warm-up, rounded up, and so are the two over which it would fall.
    asked = training(steps=3, schedule="wsd", warmup=0.5, decay=0.5)
    assert [learning_rate(step, total_steps=3, training=asked) for step in (1, 2, 3)] == pytest.approx([0.5, 1, 0.1])


def test_without_a_warm_up_the_first_step_has_the_peak_and_the_last_the_floor():
    rates = [learning_rate(step, total_steps=3, training=training(warmup=0, lr=2.0)) for step in (1, 2, 3)]
    assert rates == pytest.approx([2.0, 1.1, 0.2])


def test_a_run_of_one_step_uses_the_peak():
    assert learning_rate(1, total_steps=1, training=training()) == 1.0
