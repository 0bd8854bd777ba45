"""Cross-entropy over a shared vocabulary, a chunk of tokens at a time: logits of a whole sequence never exist.

Each rank has the logits of its part of the vocabulary; three numbers a token are exchanged (largest logit, sum of
exponentials, the label's logit), as in Shoeybi et al. 2019, section 3. The gradients are computed while the logits are
there, in the forward pass, so that nothing is computed twice.

B rows, T tokens, S tokens of this rank, N tokens of a chunk, K of a block, D features, V vocab shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, cast

import torch
from torch import Tensor

from engine.batch import IGNORE, Batch
from engine.cached import add_wide, rows_in_cache, scaled
from engine.comm import TensorAxis, max_over, start_gather_tokens, start_sum_parts, sum_over
from engine.landing import landing_of
from engine.placement import Placement, placement_of
from engine.plan.passing import CHUNK_LOGITS, chunk_of

PRODUCT = 2**21
"""Elements of a product that are added up while a CPU's cores have them: 4 MiB in bf16."""
SUMS = ("loss", "labels", "correct", "pairs", "rewards_chosen", "rewards_rejected", "preferred")
"""What is summed over the batches of a step or an evaluation, in the order of `LossParts.sums`."""


@dataclass(frozen=True)
class LossParts:
    """Sums over the labels of one batch, the same on every tensor rank. Divide by the global batch's count, once."""

    loss_sum: Tensor
    """fp32 scalar, in nats: weight times -log p(label), summed over labels. Carries the gradient."""
    label_count: Tensor
    """int64 scalar: labels that are not IGNORE, whatever their weight."""
    correct: Tensor
    """int64 scalar: labels whose logit is the largest."""
    compared: Tensor | None = None
    """fp64: the last four of `SUMS`, where answers are compared in pairs; None: there are none."""
    losses_BS: Tensor | None = None
    """fp32: of what `loss_sum` is summed, each label's on whatever token of this context rank; None: it is no such sum.
    Carries no gradient."""
    log_probs_BP2: Tensor | None = None
    """fp64 log-probability of each answer of each pair, of all its labels on whatever rank; None: there are none."""

    def sums(self) -> Tensor:
        """fp64: the numbers that `SUMS` names."""
        own = torch.stack([part.detach().double() for part in (self.loss_sum, self.label_count, self.correct)])
        return torch.cat([own, torch.zeros_like(own[:1]).expand(4) if self.compared is None else self.compared])


class Means(TypedDict):
    """Fields of the events `Step` and `Evaluated`, which say what they mean."""

    loss: float
    token_accuracy: float
    rewards_chosen: float | None
    rewards_rejected: float | None
    reward_margin: float | None
    reward_accuracy: float | None


def means(sums: Sequence[float]) -> Means:
    """Of the numbers that `SUMS` names, summed over all ranks."""
    of = dict(zip(SUMS, sums, strict=True))
    labels, pairs = max(1, of["labels"]), of["pairs"]
    chosen, rejected, preferred = (
        of[name] / pairs if pairs else None for name in ("rewards_chosen", "rewards_rejected", "preferred")
    )
    return Means(
        loss=of["loss"] / (pairs or labels),
        token_accuracy=of["correct"] / labels,
        rewards_chosen=chosen,
        rewards_rejected=rejected,
        reward_margin=None if chosen is None or rejected is None else chosen - rejected,
        reward_accuracy=preferred,
    )


class Criterion(Protocol):
    """What a model's last stage does with its output: `vocab_loss`, or what is made of it."""

    def __call__(
        self,
        x_BSD: Tensor,
        weight_VD: Tensor,
        batch: Batch,
        axis: TensorAxis,
        *,
        scale: float | None,
        chunk_logits: int,
    ) -> LossParts: ...


def vocab_loss(
    x_BSD: Tensor,
    weight_VD: Tensor,
    batch: Batch,
    axis: TensorAxis,
    *,
    scale: float | None = None,
    chunk_logits: int = CHUNK_LOGITS,
) -> LossParts:
    """Loss of predicting `batch.labels_BT` by the logits x W^T.

    `x_BSD` are this rank's tokens, `weight_VD` its part of a placed vocabulary matrix; padding gets no probability and
    no gradient. The weight's gradient is summed over chunks in fp32. With a `scale`, by which the caller will multiply
    the loss, it goes straight to its landing, if it has one, and the backward pass has none of it.
    """
    loss_sum, correct, losses_BS = _VocabLoss.apply(  # type: ignore[no-untyped-call]
        x_BSD, weight_VD, batch.labels_BT, batch.weights_BT, axis, scale, chunk_logits, torch.is_grad_enabled()
    )
    return LossParts(loss_sum, (batch.labels_BT != IGNORE).sum(), correct, losses_BS=losses_BS)


def weighted_loss(
    x_BSD: Tensor,
    weight_VD: Tensor,
    labels_BT: Tensor,
    weights_BT: Tensor,
    axis: TensorAxis,
    *,
    scale: float | None,
    chunk_logits: int,
) -> Tensor:
    """Sum of weights times -log p(label), with its gradient; weights may be negative. 0 where no gradient is wanted.

    `scale` is as in `vocab_loss`.
    """
    if not torch.is_grad_enabled():
        return x_BSD.new_zeros((), dtype=torch.float32)
    loss_sum, _, _ = _VocabLoss.apply(  # type: ignore[no-untyped-call]
        x_BSD, weight_VD, labels_BT, weights_BT, axis, scale, chunk_logits, True
    )
    return cast(Tensor, loss_sum)


@torch.no_grad()
def token_losses(
    x_BSD: Tensor, weight_VD: Tensor, batch: Batch, axis: TensorAxis, *, chunk_logits: int = CHUNK_LOGITS
) -> tuple[Tensor, Tensor]:
    """-log p(label) of each token, fp32, and whether the label's logit is the largest; 0 and False without a label."""
    x_BTD = start_gather_tokens(x_BSD, axis).wait()
    has_label_BT = batch.labels_BT != IGNORE
    weights_M = has_label_BT.flatten().float()
    loss_M, first_M = _by_chunks(
        x_BTD.flatten(0, 1), weight_VD, batch.labels_BT.flatten(), weights_M, axis, chunk_logits
    )
    return loss_M.view_as(has_label_BT), first_M.view_as(has_label_BT) & has_label_BT


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
        scale: float | None,
        chunk_logits: int,
        learns: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x_needed, weight_needed = (learns and needed for needed in ctx.needs_input_grad[:2])
        x_BTD = start_gather_tokens(x_BSD, axis).wait()
        x_MD, labels_M = x_BTD.flatten(0, 1), labels_BT.flatten()
        weights_M = torch.ones_like(labels_M, dtype=torch.float32) if weights_BT is None else weights_BT.flatten()
        weights_M = weights_M * (labels_M != IGNORE)
        grad_MD = torch.empty_like(x_MD) if x_needed else None
        grad_VD, factor, landing = None, 1.0, None
        if weight_needed and scale is not None and (landing := landing_of(weight_VD)) is not None:
            grad_VD, factor = landing.opened(), scale
        elif weight_needed:
            grad_VD = torch.zeros_like(weight_VD, dtype=torch.float32)

        loss_M, first_M = _by_chunks(
            x_MD, weight_VD, labels_M, weights_M, axis, chunk_logits, grad_MD=grad_MD, grad_VD=grad_VD, factor=factor
        )
        summed = None if grad_MD is None else start_sum_parts(grad_MD.view_as(x_BTD), axis).wait()
        ctx.save_for_backward(summed, grad_VD if landing is None else None)
        ctx.weight_dtype = weight_VD.dtype
        correct = (first_M & (labels_M != IGNORE)).sum()
        losses_BT = loss_M.view_as(labels_BT)
        ctx.mark_non_differentiable(correct, losses_BT)
        return loss_M.sum(dtype=torch.float64).float(), correct, losses_BT

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_BSD, grad_VD = ctx.saved_tensors
        grad_x = None if grad_BSD is None else scaled(grad_BSD, grad, grad_BSD.dtype)
        grad_weight = None if grad_VD is None else scaled(grad_VD, grad, ctx.weight_dtype)
        return grad_x, grad_weight, None, None, None, None, None, None


def _add_product(total_VD: Tensor, grad_NV: Tensor, x_ND: Tensor, factor: float) -> None:
    """Add `grad_NV`^T `x_ND` times `factor` to an fp32 tensor, some rows at a time: on a CPU they stay in the cache.

    Each product is rounded once to the dtype; their sum is not.
    """
    rows = len(total_VD) if x_ND.is_cuda else max(1, PRODUCT // x_ND.shape[1])
    part_KD = x_ND.new_empty(min(rows, len(total_VD)), x_ND.shape[1])
    for some_KD, grad_NK in zip(torch.split(total_VD, rows), torch.split(grad_NV, rows, dim=1), strict=True):
        add_wide(some_KD, torch.mm(grad_NK.t(), x_ND, out=part_KD[: len(some_KD)]), factor)


def _by_chunks(
    x_MD: Tensor,
    weight_VD: Tensor,
    labels_M: Tensor,
    weights_M: Tensor,
    axis: TensorAxis,
    chunk_logits: int,
    *,
    grad_MD: Tensor | None = None,
    grad_VD: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Each token's weighted loss, and whether its label has the largest logit.

    Fills `grad_MD` where it is given, and adds to `grad_VD`, times `factor`.
    """
    loss_M = torch.empty_like(weights_M)
    first_M = torch.empty_like(labels_M, dtype=torch.bool)
    step = chunk_of(len(x_MD), weight_VD.shape[0], chunk_logits)
    logits_NV = x_MD.new_empty(step, weight_VD.shape[0])
    for start in range(0, len(x_MD), step):
        here = slice(start, start + step)
        x_ND = x_MD[here]
        grad_NV = torch.mm(x_ND, weight_VD.t(), out=logits_NV[: len(x_ND)])
        loss_M[here], first_M[here] = _to_gradient(
            grad_NV, labels_M[here], weights_M[here], placement_of(weight_VD), axis
        )
        if grad_MD is not None:
            torch.mm(grad_NV, weight_VD, out=grad_MD[here])
        if grad_VD is not None:
            _add_product(grad_VD, grad_NV, x_ND, factor)
    return loss_M, first_M


def _to_gradient(
    logits_NV: Tensor, label_N: Tensor, weight_N: Tensor, placement: Placement, axis: TensorAxis
) -> tuple[Tensor, Tensor]:
    """Turn logits, in place, into the loss's gradient: weight * (softmax - one-hot), computed in fp32.

    Returns the weighted loss of each token, and whether its label has the largest logit; a token without a label has
    weight 0 and so loss and gradient 0.
    """
    # Alone on a CPU, a few tokens at a time stay in the cache; otherwise the fewest exchanges and launches win.
    block = len(logits_NV) if axis.group is not None else rows_in_cache(logits_NV)
    wide_NV = torch.empty(block, logits_NV.shape[1], dtype=torch.float32, device=logits_NV.device)
    local_N = label_N - placement.start
    here_N = (local_N >= 0) & (local_N < placement.length)
    index_N1 = local_N.masked_fill(~here_N, 0)[:, None]
    label_logit_N = logits_NV.gather(1, index_N1).squeeze(1).float()
    taken_N1 = -(weight_N * here_N)[:, None]
    largest_N, total_N = torch.empty_like(weight_N), torch.empty_like(weight_N)
    pieces = (logits_NV, weight_N, index_N1, taken_N1, largest_N, total_N)
    # What is done here is done for a few tokens each time, with all cores: what one number a token takes is done apart.
    for logits_KV, weight_K, index_K1, taken_K1, largest_K, total_K in zip(
        *(torch.split(piece, block) for piece in pieces), strict=True
    ):
        wide_KV = wide_NV[: len(logits_KV)].copy_(logits_KV)
        if placement.length < wide_KV.shape[1]:
            wide_KV[:, placement.length :] = float("-inf")
        max_over(torch.amax(wide_KV, -1, out=largest_K), axis)
        wide_KV.sub_(largest_K[:, None]).exp_()
        sum_over(torch.sum(wide_KV, -1, out=total_K), axis)
        wide_KV.mul_((weight_K / total_K)[:, None]).scatter_add_(1, index_K1, taken_K1)
        logits_KV.copy_(wide_KV)
    label_logit_N = sum_over(label_logit_N.sub_(largest_N).masked_fill_(~here_N, 0), axis)
    return (total_N.log() - label_logit_N) * weight_N, label_logit_N == 0
