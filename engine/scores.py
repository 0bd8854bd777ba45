"""The attention core on a CPU: its backward pass is plain matrix products over the scores of some queries at a time.

Torch's fused kernel is quick on the way forward; on the way back its small tiles cost up to twice the time of these.
Both keep the same, which is linear in the length of a row: the inputs, the output, and the logarithm of each row's sum.
The algebra is that of Dao et al. 2022 (appendix B.2), and what it takes off each row of scores is a column more of the
product that makes them: taken off in fp32, and without a pass of its own.

B rows, Q queries and K keys of one view, H heads and G key-value heads of this rank, P rows and key-value heads in one,
N queries of a block and of the heads that share a key-value head, R width of a head, C columns more than that.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

SCORES = 2**23
"""Of a block, in elements: 16 MiB in bf16."""
QUERIES = (64, 256)
"""Least and most of a block: fewer make slow products, more compute much of what nobody sees."""


def plain_core(q_BQHR: Tensor, k_BKGR: Tensor, v_BKGR: Tensor, mask_BHQK: Tensor | None) -> Tensor:
    """softmax(Q K^T / sqrt(R) + mask) V, heads side by side: B Q (H R).

    A query sees nothing behind itself, and the last query is the last key. `mask_BHQK`, or what broadcasts to it, is
    added to the scores; None: a query sees itself and all before it.
    """
    mixed = _PlainCore.apply(q_BQHR, k_BKGR, v_BKGR, mask_BHQK)  # type: ignore[no-untyped-call]
    return cast(Tensor, mixed)


class _PlainCore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BQHR: Tensor, k_BKGR: Tensor, v_BKGR: Tensor, mask_BHQK: Tensor | None) -> Tensor:
        mixed_BHQR, sums_BHQ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(1, 2) for x in (q_BQHR, k_BKGR, v_BKGR)), 0.0, mask_BHQK is None, attn_mask=mask_BHQK
        )
        mixed_BQE = cast(Tensor, mixed_BHQR).transpose(1, 2).flatten(2)
        ctx.save_for_backward(q_BQHR, k_BKGR, v_BKGR, mask_BHQK, sums_BHQ, mixed_BQE)
        return mixed_BQE

    @staticmethod
    def backward(ctx: Any, grad_BQE: Tensor) -> tuple[Tensor | None, ...]:
        q_BQHR, k_BKGR, v_BKGR, mask_BHQK, sums_BHQ, mixed_BQE = ctx.saved_tensors
        rows, queries, heads, width = q_BQHR.shape
        keys, groups = k_BKGR.shape[1:3]
        past, sharing, scale = keys - queries, heads // groups, width**-0.5
        # Ones behind keys and values, for what is taken off a row.
        k_PKC, v_PKC = (
            torch.nn.functional.pad(x.transpose(1, 2), (0, 2), value=1.0).view(rows * groups, keys, -1)
            for x in (k_BKGR, v_BKGR)
        )
        grad_BQHR, mixed_BQHR = grad_BQE.view(q_BQHR.shape), mixed_BQE.view(q_BQHR.shape)
        grad_q_BQHR = torch.empty_like(q_BQHR)
        grad_k, grad_v = _Sum(), _Sum()

        def by_group(x_BSHR: Tensor) -> Tensor:
            of_a_group = x_BSHR.view(rows, -1, groups, sharing, x_BSHR.shape[-1])
            return of_a_group.permute(0, 2, 3, 1, 4).reshape(rows * groups, -1, x_BSHR.shape[-1])

        block = max(QUERIES[0], min(QUERIES[1], SCORES // (rows * heads * keys)))
        # The last queries see all keys, so that the others' shares of the keys' gradients are added to theirs.
        for start in reversed(range(0, queries, block)):
            here = slice(start, start + block)
            seen = past + min(start + block, queries)
            q_PNR, grad_PNR, mixed_PNR = (by_group(x[:, here]) for x in (q_BQHR, grad_BQHR, mixed_BQHR))
            sums_PN1 = by_group(sums_BHQ.transpose(1, 2)[:, here, :, None])
            # Scaled within the product: queries scaled before would be rounded once more, and with them all scores.
            nothing_PKN = q_PNR.new_zeros(1, 1, 1).expand(len(q_PNR), seen, q_PNR.shape[1])
            scores_PKN = torch.baddbmm(
                nothing_PKN, k_PKC[:, :seen], _less(q_PNR, sums_PN1 / scale).mT, beta=0, alpha=scale
            )
            _hide(scores_PKN.view(rows, groups, seen, sharing, -1), mask_BHQK, start)
            chances_PKN = scores_PKN.exp_()
            grad_v.add(chances_PKN @ grad_PNR)
            shared_PN1 = (grad_PNR.float() * mixed_PNR).sum(-1, keepdim=True)
            grad_scores_PKN = (v_PKC[:, :seen] @ _less(grad_PNR, shared_PN1).mT).mul_(chances_PKN)
            grad_k.add((grad_scores_PKN @ q_PNR).mul_(scale))
            grad_q_PNR = (grad_scores_PKN.mT @ k_PKC[:, :seen, :width]).mul_(scale)
            grad_q_BGHSR = grad_q_PNR.view(rows, groups, sharing, -1, width)
            grad_q_BQHR[:, here].view(rows, -1, groups, sharing, width).copy_(grad_q_BGHSR.permute(0, 3, 1, 2, 4))
        grad_k_BKGR, grad_v_BKGR = (
            total.rounded(k_BKGR.dtype).view(rows, groups, keys, width).transpose(1, 2) for total in (grad_k, grad_v)
        )
        return grad_q_BQHR, grad_k_BKGR, grad_v_BKGR, None


class _Sum:
    """Of blocks' parts of the gradient of keys or values: the first of all keys, P K R, further ones of the first K."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def add(self, part_PKR: Tensor) -> None:
        if self.total is None:
            self.total = part_PKR
            return
        # In fp32 from the second on.
        self.total = self.total.float()
        self.total[:, : part_PKR.shape[1]] += part_PKR.float()

    def rounded(self, dtype: torch.dtype) -> Tensor:
        assert self.total is not None
        return self.total.to(dtype)


def _less(x_PNR: Tensor, off_PN1: Tensor) -> Tensor:
    """`x_PNR` with two columns that, met by ones, take `off_PN1` off the product: what bf16 has of it, and the rest."""
    first_PN1 = off_PN1.to(x_PNR.dtype)
    rest_PN1 = (off_PN1 - first_PN1).to(x_PNR.dtype)
    return torch.cat((x_PNR, -first_PN1, -rest_PN1), dim=-1)


def _hide(scores_BGKHS: Tensor, mask_BHQK: Tensor | None, start: int) -> None:
    """Make minus infinity of what queries from `start` on do not see, and add what the mask has for the rest."""
    seen, _, queries = scores_BGKHS.shape[2:]
    if mask_BHQK is None:
        earlier_KS = torch.full((queries, queries), float("-inf"), dtype=scores_BGKHS.dtype).tril_(-1)
        scores_BGKHS[:, :, seen - queries :].add_(earlier_KS[:, None])
        return
    mask_BHKS = mask_BHQK[..., start : start + queries, :seen].mT.contiguous()
    heads = mask_BHKS.shape[1]
    groups, sharing = (1, 1) if heads == 1 else (scores_BGKHS.shape[1], scores_BGKHS.shape[3])
    mask_BGHKS = mask_BHKS.view(-1, groups, sharing, seen, queries)
    scores_BGKHS.add_(mask_BGHKS.transpose(2, 3))
