"""Direct preference optimisation: of two answers the better one gains on the worse one (Rafailov et al. 2023, eq. 7).

What a pair's answers gain together decides how much each of their tokens learns, and the answers lie anywhere in a row,
on whichever context rank. So the losses of all tokens are found first, without a gradient. From their sums follows what
a token of each answer weighs, and the gradient is that of the cross-entropy under these weights. It costs one more
product with the output matrix; nothing else is computed twice, and no second model is held.

B rows, T tokens, S tokens of this rank, D features, V vocab shard, P pairs of a row, A answers of a row and one more
place for what is none.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad, softplus

from engine.batch import IGNORE, Batch
from engine.comm import TensorAxis
from engine.config import Dpo
from engine.context import ContextAxis
from engine.loss import LossParts, token_losses, weighted_loss


def preference_loss(
    x_BSD: Tensor,
    weight_VD: Tensor,
    batch: Batch,
    axis: TensorAxis,
    *,
    scale: float | None,
    chunk_logits: int,
    context: ContextAxis,
    dpo: Dpo,
) -> LossParts:
    """Loss summed over the pairs of `batch`, which has `reference_BP2`. Every context rank calls this together.

    The first of them has the loss and the rewards. Of labels, those of the better answers are counted.
    """
    assert batch.reference_BP2 is not None, "answers are compared with those of a reference"
    loss_BT, first_BT = token_losses(x_BSD, weight_VD, batch, axis, chunk_logits=chunk_logits)
    answers_BT = answers(batch)
    has_label_BT = batch.labels_BT != IGNORE
    # For each answer: its loss, and its labels.
    sums_2BA = torch.stack([summed(each_BT, answers_BT, batch) for each_BT in (loss_BT, has_label_BT)])
    if context.group is not None:
        with context.stopwatch.span("communication"):
            dist.all_reduce(sums_2BA, group=context.group)
    losses_BP2, labels_BP2 = (sums_BA[:, :-1].unflatten(1, (-1, 2)) for sums_BA in sums_2BA)

    is_pair_BP = ~batch.reference_BP2.isnan().any(-1)
    rewards_BP2 = dpo.beta * (-losses_BP2 - batch.reference_BP2).where(is_pair_BP[..., None], 0.0)
    margin_BP = rewards_BP2[..., 0] - rewards_BP2[..., 1]
    nll_BP = losses_BP2[..., 0] / labels_BP2[..., 0].clamp_min(1)
    doubt = dpo.label_smoothing
    each_BP = (1 - doubt) * softplus(-margin_BP) + doubt * softplus(margin_BP) + dpo.sft_coefficient * nll_BP

    # The derivatives by the losses of the two answers.
    pull_BP = dpo.beta * ((1 - doubt) * torch.sigmoid(-margin_BP) - doubt * torch.sigmoid(margin_BP))
    weights_BP2 = torch.stack((pull_BP + dpo.sft_coefficient / labels_BP2[..., 0].clamp_min(1), -pull_BP), dim=-1)
    weights_BA = pad(weights_BP2.where(is_pair_BP[..., None], 0.0).flatten(1), (0, 1))
    weights_BT = weights_BA.gather(1, answers_BT).float()
    loss_sum = weighted_loss(
        x_BSD, weight_VD, batch.labels_BT, weights_BT, axis, scale=scale, chunk_logits=chunk_logits
    )

    counts = context.rank == 0
    value = each_BP.where(is_pair_BP, 0.0).sum() * counts
    won_BP = (margin_BP > 0) & is_pair_BP
    compared = torch.stack([is_pair_BP.sum(), *rewards_BP2.sum((0, 1)), won_BP.sum()]) * counts
    is_better_BT = (answers_BT % 2 == 0) & (answers_BT < weights_BA.shape[1] - 1)
    return LossParts(
        # The value is the pairs', the gradient the tokens'.
        value.float() + (loss_sum - loss_sum.detach()),
        label_count=(has_label_BT & is_better_BT).sum(),
        correct=(first_BT & is_better_BT).sum(),
        compared=compared,
        log_probs_BP2=-losses_BP2,
    )


def answers(batch: Batch) -> Tensor:
    """B T: for each token the number of its answer in its row; twice the batch's P where it is padding."""
    assert batch.reference_BP2 is not None
    none = 2 * batch.reference_BP2.shape[1]
    if batch.documents_BT is None:
        return torch.full_like(batch.tokens_BT, none)
    return batch.documents_BT.clamp(max=none)


def summed(each_BT: Tensor, answers_BT: Tensor, batch: Batch) -> Tensor:
    """B A: sums over the tokens of each answer, in fp64."""
    assert batch.reference_BP2 is not None
    rows, pairs, _ = batch.reference_BP2.shape
    sums_BA = torch.zeros(rows, 2 * pairs + 1, dtype=torch.float64, device=each_BT.device)
    return sums_BA.scatter_add_(1, answers_BT, each_BT.double())
