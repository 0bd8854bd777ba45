"""How fast a step was and where its time went, as its event says it: tokens a second, MFU, HFU, seconds by part."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypedDict

from engine.config import ModelShape, Operation, RunConfig
from engine.plan.flops import MULTIPLY_ADD, model_flops
from engine.plan.recompute import Setting, hardware_flops

BESIDE_TRAINING = frozenset({"evaluation", "checkpoint"})
"""Parts of a step's time in which nothing is trained."""


class Speeds(TypedDict):
    """Fields of the event `Step`, which says what they mean."""

    tokens_per_second: float
    mfu: float | None
    hfu: float | None
    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    bubble_seconds: float
    data_seconds: float
    evaluation_seconds: float
    checkpoint_seconds: float


def speeds(
    run: RunConfig,
    shape: ModelShape,
    *,
    tokens: int,
    pairs: int,
    replayed: Iterable[Collection[Operation]],
    parts: Mapping[str, float],
) -> Speeds:
    """Of a step of so many tokens and pairs of them that attend (see `model_flops`), whose time went to `parts`.

    `replayed` says of each layer of the model which operations are run again in backward.
    """
    seconds = sum(time for part, time in parts.items() if part not in BESIDE_TRAINING)
    model = model_flops(shape, tokens=tokens, pairs=pairs, lora=run.lora)
    micro_batch = Setting.of(run, shape)
    hardware = hardware_flops(shape, tokens=tokens, pairs=pairs, replayed=replayed, lora=run.lora, of=micro_batch)
    if run.objective == "dpo":
        # The output's product is done again, see `engine.preference`.
        hardware += MULTIPLY_ADD * tokens * shape.hidden_size * shape.vocab_size
    peak = run.peak_flops_per_rank
    most = None if peak is None else seconds * run.parallel.ranks * peak
    return Speeds(
        tokens_per_second=tokens / seconds,
        mfu=None if most is None else model / most,
        hfu=None if most is None else hardware / most,
        step_seconds=sum(parts.values()),
        compute_seconds=parts["compute"],
        communication_seconds=parts["communication"],
        bubble_seconds=parts["bubble"],
        data_seconds=parts["data"],
        evaluation_seconds=parts["evaluation"],
        checkpoint_seconds=parts["checkpoint"],
    )
