"""Cross-entropy over a shared vocabulary, a chunk of tokens at a time: logits of a whole sequence never exist.

Each rank has the logits of its part of the vocabulary; three numbers a token are exchanged (largest logit, sum of
exponentials, the label's logit), as in Shoeybi et al. 2019, section 3. The gradients are computed while the logits are
there, in the forward pass, so that nothing is computed twice.

B rows, T tokens, S tokens of this rank, N tokens of a chunk, D features, V vocab shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.batch import IGNORE, Batch
from engine.comm import TensorAxis, max_over, start_gather_tokens, start_sum_parts, sum_over
from engine.placement import placement_of

CHUNK_LOGITS = 2**24
"""Logits that exist at once, in elements: 64 MiB in fp32."""


@dataclass(frozen=True)
class LossParts:
    """Sums over the labels of one batch, the same on every tensor rank. Divide by the global batch's count, once."""

    loss_sum: Tensor
    """fp32 scalar, in nats: weight times -log p(label), summed over labels. Carries the gradient."""
    label_count: Tensor
    """int64 scalar: labels that are not IGNORE, whatever their weight."""
    correct: Tensor
    """int64 scalar: labels whose logit is the largest."""


def vocab_loss(
    x_BSD: Tensor, weight_VD: Tensor, batch: Batch, axis: TensorAxis, *, chunk_logits: int = CHUNK_LOGITS
) -> LossParts:
    """Loss of predicting `batch.labels_BT` by the logits x W^T.

    `x_BSD` are this rank's tokens, `weight_VD` its part of a placed vocabulary matrix; padding gets no probability and
    no gradient. The weight's gradient is summed over chunks in fp32.
    """
    loss_sum, correct = _VocabLoss.apply(  # type: ignore[no-untyped-call]
        x_BSD, weight_VD, batch.labels_BT, batch.weights_BT, axis, chunk_logits, torch.is_grad_enabled()
    )
    return LossParts(loss_sum, (batch.labels_BT != IGNORE).sum(), correct)


class _VocabLoss(torch.autograd.Function):
    """Forward: gather tokens, loss and gradients chunk by chunk, sum the parts. Backward: scale what forward found."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BSD: Tensor,
        weight_VD: Tensor,
        labels_BT: Tensor,
        weights_BT: Tensor | None,
        axis: TensorAxis,
        chunk_logits: int,
        learns: bool,
    ) -> tuple[Tensor, Tensor]:
        x_needed, weight_needed = (learns and needed for needed in ctx.needs_input_grad[:2])
        x_BTD = start_gather_tokens(x_BSD, axis).wait()
        x_MD, labels_M = x_BTD.flatten(0, 1), labels_BT.flatten()
        weights_M = torch.ones_like(labels_M, dtype=torch.float32) if weights_BT is None else weights_BT.flatten()
        weights_M = weights_M * (labels_M != IGNORE)
        grad_MD = torch.empty_like(x_MD) if x_needed else None
        grad_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if weight_needed else None
        placement = placement_of(weight_VD)

        loss_sum = torch.zeros((), dtype=torch.float64, device=x_MD.device)
        correct = torch.zeros((), dtype=torch.int64, device=x_MD.device)
        step = max(1, chunk_logits // weight_VD.shape[0])
        for start in range(0, len(x_MD), step):
            here = slice(start, start + step)
            x_ND, label_N, weight_N = x_MD[here], labels_M[here], weights_M[here]
            logits_NV = (x_ND @ weight_VD.t()).float()
            logits_NV[:, placement.length :] = float("-inf")
            loss_N, first_N = _to_gradient(logits_NV, label_N, weight_N, placement.start, placement.length, axis)
            loss_sum += loss_N.sum(dtype=torch.float64)
            correct += (first_N & (label_N != IGNORE)).sum()
            if not (x_needed or weight_needed):
                continue
            grad_NV = logits_NV.to(x_ND.dtype)
            if grad_MD is not None:
                torch.mm(grad_NV, weight_VD, out=grad_MD[here])
            if grad_VD is not None:
                grad_VD += grad_NV.t() @ x_ND
        summed = None if grad_MD is None else start_sum_parts(grad_MD.view_as(x_BTD), axis).wait()
        ctx.save_for_backward(summed, grad_VD)
        ctx.weight_dtype = weight_VD.dtype
        ctx.mark_non_differentiable(correct)
        return loss_sum.float(), correct

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_BSD, grad_VD = ctx.saved_tensors
        grad_x = None if grad_BSD is None else (grad_BSD * grad).to(grad_BSD.dtype)
        grad_weight = None if grad_VD is None else (grad_VD * grad).to(ctx.weight_dtype)
        return grad_x, grad_weight, None, None, None, None, None


def _to_gradient(
    logits_NV: Tensor, label_N: Tensor, weight_N: Tensor, start: int, length: int, axis: TensorAxis
) -> tuple[Tensor, Tensor]:
    """Turn logits, in place, into the loss's gradient: weight * (softmax - one-hot).

    Returns the weighted loss of each token, and whether its label has the largest logit; a token without a label has
    weight 0 and so loss and gradient 0.
    """
    largest_N = max_over(logits_NV.amax(-1), axis)
    logits_NV.sub_(largest_N[:, None])
    local_N = label_N - start
    here_N = (local_N >= 0) & (local_N < length)
    index_N1 = local_N.masked_fill(~here_N, 0)[:, None]
    label_logit_N = logits_NV.gather(1, index_N1).squeeze(1).masked_fill_(~here_N, 0)
    logits_NV.exp_()
    total_N, label_logit_N = sum_over(torch.stack((logits_NV.sum(-1), label_logit_N)), axis)
    loss_N = (total_N.log() - label_logit_N) * weight_N
    logits_NV.mul_((weight_N / total_N)[:, None])
    logits_NV.scatter_add_(1, index_N1, -(weight_N * here_N)[:, None])
    return loss_N, label_logit_N == 0
