"""The papers' attention core, score matrices and all, with dropout of probabilities; the usual one is `attention`'s.

A score costs 2 bytes for the softmax's output, 1 for the mask and 2 for what is left of the probabilities
(Korthikanti et al. 2022, section 4.1: 5 a s^2 b).

B rows, Q queries, K keys in sight, H heads and G key-value heads of this rank, N queries of a key-value head,
R width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor


def unfused_core(
    q_BQHR: Tensor,
    k_BKGR: Tensor,
    v_BKGR: Tensor,
    mask_BHQK: Tensor | None,
    *,
    dropped: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """dropped(softmax(Q K^T / sqrt(R))) V, heads side by side: B Q (H R).

    `mask_BHQK`, or what broadcasts to it, is added to the scores; None is causal, and Q equals K. `dropped` None drops
    nothing.
    """
    rows, queries, heads, width = q_BQHR.shape
    groups = k_BKGR.shape[2]
    if mask_BHQK is None:
        mask_BHQK = q_BQHR.new_full((queries, queries), float("-inf")).triu_(1)
    # A key-value head's queries are rows of one matrix, so that keys and values are never repeated.
    q_BGNR = (q_BQHR * width**-0.5).transpose(1, 2).reshape(rows, groups, -1, width)
    k_BGRK, v_BGKR = k_BKGR.permute(0, 2, 3, 1), v_BKGR.transpose(1, 2)
    scores_BHQK = (q_BGNR @ k_BGRK).view(rows, heads, queries, -1)
    chances_BHQK = cast(Tensor, _Softmax.apply(scores_BHQK, mask_BHQK))  # type: ignore[no-untyped-call]
    if dropped is not None:
        chances_BHQK = dropped(chances_BHQK)
    mixed_BGNR = chances_BHQK.view(rows, groups, -1, chances_BHQK.shape[-1]) @ v_BGKR
    return mixed_BGNR.view(rows, heads, queries, width).transpose(1, 2).flatten(2)


class _Softmax(torch.autograd.Function):
    """Over what a token sees. Saves its output alone, in the scores' type; computed in fp32."""

    @staticmethod
    def forward(ctx: Any, scores_BHQK: Tensor, mask_BHQK: Tensor) -> Tensor:
        chances_BHQK = (scores_BHQK + mask_BHQK).softmax(-1)
        ctx.save_for_backward(chances_BHQK)
        return chances_BHQK

    @staticmethod
    def backward(ctx: Any, grad_BHQK: Tensor) -> tuple[Tensor, None]:
        (chances_BHQK,) = ctx.saved_tensors
        grad_scores = torch.ops.aten._softmax_backward_data(grad_BHQK, chances_BHQK, -1, chances_BHQK.dtype)
        return grad_scores, None
