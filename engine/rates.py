"""How fast a step was: tokens a second, and the shares of the devices' peak that the model and the hardware used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.config import ModelShape, RunConfig
from engine.plan.flops import hardware_flops, model_flops

BESIDE_TRAINING = frozenset({"evaluation", "checkpoint"})
"""Parts of a step's time in which nothing is trained."""


@dataclass(frozen=True)
class Rates:
    """Named as in the event `Step`, which says what they mean."""

    tokens_per_second: float
    mfu: float | None
    hfu: float | None


def rates(run: RunConfig, shape: ModelShape, *, tokens: int, pairs: int, parts: Mapping[str, float]) -> Rates:
    """Of a step of so many tokens and pairs of them that attend (see `model_flops`), whose time went to `parts`."""
    seconds = sum(time for part, time in parts.items() if part not in BESIDE_TRAINING)
    model = model_flops(shape, tokens=tokens, pairs=pairs, lora=run.lora)
    hardware = hardware_flops(shape, tokens=tokens, pairs=pairs, replayed=run.recompute.replayed, lora=run.lora)
    if run.peak_flops_per_rank is None:
        return Rates(tokens / seconds, None, None)
    most = seconds * run.parallel.ranks * run.peak_flops_per_rank
    return Rates(tokens / seconds, model / most, hardware / most)
