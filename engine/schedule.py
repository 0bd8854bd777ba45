"""The learning rate of each step, as a pure function: a linear warm-up, then cosine, linear, constant or wsd."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, cos, pi

from engine.config import Training

SHAPES: dict[str, Callable[[float, float], float]] = {
    "cosine": lambda progress, decay: 0.5 * (1 + cos(pi * progress)),
    "linear": lambda progress, decay: 1 - progress,
    "constant": lambda progress, decay: 1.0,
    "wsd": lambda progress, decay: min(1.0, (1 - progress) / decay),
}
"""How much of the way from the floor to the peak is left, at `progress` in 0..1 after the warm-up.

`decay` is the share of that stretch at whose end a warmup-stable-decay run (Hu et al. 2024, section 4.2) cools down.
"""


def learning_rate(step: int, *, total_steps: int, training: Training) -> float:
    """Rate of `step`, which counts from 1. The peak is at the last step of the warm-up, the floor at `total_steps`."""
    # Without a warm-up the first step is the peak, as with a warm-up of one step.
    warmup_steps = max(1, ceil(training.warmup * total_steps))
    if step <= warmup_steps:
        return training.lr * step / warmup_steps
    after = total_steps - warmup_steps
    progress = min(1.0, (step - warmup_steps) / after)
    decay = min(1.0, ceil(training.cooling * total_steps) / after)
    floor = training.min_lr_ratio
    return training.lr * (floor + (1 - floor) * SHAPES[training.schedule](progress, decay))
