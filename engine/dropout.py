"""Dropout whose mask is a pure function of (seed, step, stream, row, token, feature): the same in every layout.

Nothing is saved for the backward pass and no random state has to be replayed: the mask is computed again.

B rows, S tokens of this rank, F features of this rank.
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
    first_token: int
    """Place in its row of the first token that this rank holds between the matrices."""


def dropout(x_BSF: Tensor, rate: float, draw: Draw, *, stream: str, first_token: int, first_feature: int) -> Tensor:
    """Zero each element with probability `rate` and scale the rest by 1 / (1 - rate).

    `stream` names the place in the model; `first_token` and `first_feature` say where the local piece lies.
    """
    masked_BSF = _Dropout.apply(x_BSF, rate, draw, stream, first_token, first_feature)  # type: ignore[no-untyped-call]
    return cast(Tensor, masked_BSF)


class _Dropout(torch.autograd.Function):
    """Forward: multiply by the mask. Backward: multiply by the same mask, computed again."""

    @staticmethod
    def forward(
        ctx: Any, x_BSF: Tensor, rate: float, draw: Draw, stream: str, first_token: int, first_feature: int
    ) -> Tensor:
        ctx.place = (rate, draw, stream, first_token, first_feature)
        return x_BSF * _mask(x_BSF, *ctx.place)

    @staticmethod
    def backward(ctx: Any, grad_BSF: Tensor) -> tuple[Tensor | None, ...]:
        return grad_BSF * _mask(grad_BSF, *ctx.place), None, None, None, None, None


def _mask(x_BSF: Tensor, rate: float, draw: Draw, stream: str, first_token: int, first_feature: int) -> Tensor:
    _, tokens, features = x_BSF.shape
    key = hashlib.sha256(f"{draw.seed}/{draw.step}/{stream}".encode()).digest()
    token_key, feature_key = int.from_bytes(key[:4], "big"), int.from_bytes(key[4:8], "big")
    device = x_BSF.device
    token_S = torch.arange(first_token, first_token + tokens, device=device)
    feature_F = torch.arange(first_feature, first_feature + features, device=device)
    word_BS = _mix(_mix(draw.rows_B.to(device)[:, None] ^ token_key) ^ token_S)
    word_BSF = _mix(word_BS[..., None] ^ _mix(feature_F ^ feature_key))
    kept = word_BSF >= int(rate * 2**32)
    return kept.to(x_BSF.dtype).mul_(1 / (1 - rate))


def _mix(word: Tensor) -> Tensor:
    """A 32-bit finaliser (Mueller's): each input bit flips each output bit with probability near one half."""
    # int64 holds the words, for torch has no unsigned arithmetic; products are cut back to 32 bits.
    word = word & _WORD
    for _ in range(2):
        word = ((word >> 16) ^ word) * 0x45D9F3B & _WORD
    return (word >> 16) ^ word
