"""Dropout whose mask is a pure function of (seed, step, stream, row, token, feature): the same in every layout.

Nothing is saved for the backward pass and no random state has to be replayed: the mask is computed again.

B rows, T tokens that the matrices see, S tokens of this rank, N tokens of either, F features of this rank.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Draw:
    """What the masks of one pass are drawn from."""

    seed: int
    step: int
    rows_B: Tensor
    """int64 place of each row within the step's global batch."""
    tokens_T: Tensor
    """int64 place in its row of each token that the matrices see."""
    tokens_S: Tensor
    """int64 place in its row of each token that this rank holds between the matrices."""


def dropout(x_BNF: Tensor, rate: float, draw: Draw, *, stream: str, tokens_N: Tensor, first_feature: int) -> Tensor:
    """Zero each element with probability `rate` and scale the rest by 1 / (1 - rate).

    `stream` names the place in the model; `tokens_N`, one of the two of `draw`, and `first_feature` say where the local
    piece lies.
    """
    masked_BNF = _Dropout.apply(x_BNF, rate, draw, stream, tokens_N, first_feature)  # type: ignore[no-untyped-call]
    return cast(Tensor, masked_BNF)


class _Dropout(torch.autograd.Function):
    """Forward: multiply by the mask. Backward: multiply by the same mask, computed again."""

    @staticmethod
    def forward(
        ctx: Any, x_BNF: Tensor, rate: float, draw: Draw, stream: str, tokens_N: Tensor, first_feature: int
    ) -> Tensor:
        ctx.place = (rate, draw, stream, tokens_N, first_feature)
        return x_BNF * _mask(x_BNF, *ctx.place)

    @staticmethod
    def backward(ctx: Any, grad_BNF: Tensor) -> tuple[Tensor | None, ...]:
        return grad_BNF * _mask(grad_BNF, *ctx.place), None, None, None, None, None


def _mask(x_BNF: Tensor, rate: float, draw: Draw, stream: str, tokens_N: Tensor, first_feature: int) -> Tensor:
    features = x_BNF.shape[-1]
    key = hashlib.sha256(f"{draw.seed}/{draw.step}/{stream}".encode()).digest()
    token_key, feature_key = int.from_bytes(key[:4], "big"), int.from_bytes(key[4:8], "big")
    device = x_BNF.device
    feature_F = torch.arange(first_feature, first_feature + features, device=device)
    word_BN = _mix(_mix(draw.rows_B.to(device)[:, None] ^ token_key) ^ tokens_N.to(device))
    word_BNF = _mix(word_BN[..., None] ^ _mix(feature_F ^ feature_key))
    kept = word_BNF >= int(rate * 2**32)
    return kept.to(x_BNF.dtype).mul_(1 / (1 - rate))


def _mix(word: Tensor) -> Tensor:
    """A 32-bit finaliser (Mueller's): each input bit flips each output bit with probability near one half."""
    # int64 holds the words, for torch has no unsigned arithmetic; products are cut back to 32 bits.
    word = word & _WORD
    for _ in range(2):
        word = ((word >> 16) ^ word) * 0x45D9F3B & _WORD
    return (word >> 16) ^ word
