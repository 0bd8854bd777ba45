"""When a loss is a spike, by plain values."""

import random

import pytest

from engine.spikes import FEWEST, WINDOW, Spikes


def said(losses):
    """The index of each loss with which a spike begins, and what was usual then."""
    spikes = Spikes()
    told = {}
    for index, loss in enumerate(losses):
        if (usual := spikes.begins(loss)) is not None:
            told[index] = usual
    return told


def noisy(count, *, level=2.0, deviation=0.1, seed=1):
    numbers = random.Random(seed)
    return [numbers.gauss(level, deviation) for _ in range(count)]


def test_a_loss_far_above_those_before_is_told_with_what_was_usual():
    assert said([*noisy(40), 6.0]) == {40: pytest.approx(2.0, abs=0.05)}


def test_noise_and_a_curve_that_falls_are_no_spikes():
    assert not said(noisy(5000))
    falling = [10 / (1 + step / 20) + noise for step, noise in enumerate(noisy(500, level=0, deviation=0.05))]
    assert not said(falling)


def test_nothing_is_usual_before_there_are_enough_steps():
    assert not said([1.0] * (FEWEST - 1) + [100.0])
    assert said([1.0] * FEWEST + [100.0]) == {FEWEST: 1.0}


def test_a_spike_of_several_steps_is_told_once_and_the_next_one_again():
    assert list(said([*noisy(40), 6.0, 7.0, 5.0, *noisy(20, seed=2), 6.0])) == [40, 63]


def test_a_loss_that_stays_high_becomes_the_usual_one():
    assert list(said([*noisy(WINDOW), *noisy(3 * WINDOW, level=6.0, seed=3)])) == [WINDOW]


def test_losses_that_hardly_differ_make_no_spike_of_a_hair():
    assert not said([2.0] * 40 + [2.1])
    assert list(said([2.0] * 40 + [2.5])) == [40]
