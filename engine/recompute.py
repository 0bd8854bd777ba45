"""Run a part of the net keeping only its inputs, and run it again when its gradient is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


def recomputed(part: Callable[..., T], *inputs: object) -> T:
    """`part(*inputs)`; what it saves for backward is computed again there, alike, so that gradients are bitwise equal.

    `part` must draw no random numbers from torch's generators. Its collectives are repeated on every rank alike.
    """
    if not torch.is_grad_enabled():
        return part(*inputs)
    # The other, re-entrant kind would lose gradients of adapters below frozen inputs.
    run = checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
    return cast(T, run)
