"""DPO: loss, rewards and gradients are those of the paper's formula on `transformers`' model with torch's autograd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.batch import IGNORE, Batch
from engine.config import Dpo
from engine.loss import SUMS
from engine.passes import Passes
from engine.preference import preference_loss
from tests.engine.net import nets
from tests.engine.net.test_weights import llama

TOKENS = 24
Answer = tuple[list[int], int]
"""Ids of a prompt and an answer, and how many of them are the prompt."""
Pair = tuple[Answer, Answer]


def pairs(count: int, *, seed: int) -> list[Pair]:
    """Each with its own prompt, and answers of different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> list[int]:
        return torch.randint(0, 97, (length,), generator=generator).tolist()

    made = []
    for number in range(count):
        prompt = ids(2 + number % 2)
        made.append(((prompt + ids(3 + number), len(prompt)), (prompt + ids(2), len(prompt))))
    return made


def row(of: Sequence[Pair]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, labels, positions and documents of a row with these pairs, the better answer first."""
    tokens, labels, positions, documents = [], [], [], []
    for number, (ids, prompt) in enumerate(answer for pair in of for answer in pair):
        tokens += ids
        labels += [id_ if place + 1 >= prompt else IGNORE for place, id_ in enumerate(ids[1:])] + [IGNORE]
        positions += range(len(ids))
        documents += [number] * len(ids)
    padding = TOKENS - len(tokens)
    made = (
        tokens + [0] * padding,
        labels + [IGNORE] * padding,
        positions + list(range(padding)),
        documents + [2 * len(of)] * padding,
    )
    return tuple(torch.tensor(each) for each in made)  # type: ignore[return-value]


def batch(rows: Sequence[Sequence[Pair]], reference: PreTrainedModel) -> Batch:
    most = max(map(len, rows))
    reference_BP2 = torch.full((len(rows), most, 2), torch.nan, dtype=torch.float64)
    for number, of in enumerate(rows):
        for place, pair in enumerate(of):
            for side, answer in enumerate(pair):
                with torch.no_grad():
                    reference_BP2[number, place, side] = log_prob(reference, answer)
    return Batch(*map(torch.stack, zip(*map(row, rows), strict=True)), reference_BP2=reference_BP2)


def log_prob(model: PreTrainedModel, answer: Answer) -> Tensor:
    """Of the answer, given its prompt."""
    ids, prompt = torch.tensor(answer[0]), answer[1]
    log_probs = model(ids[None]).logits[0].log_softmax(-1)
    return log_probs[prompt - 1 : -1].gather(1, ids[prompt:, None]).sum()


def by_the_paper(
    policy: PreTrainedModel, reference: PreTrainedModel, of: Sequence[Pair], dpo: Dpo
) -> tuple[float, list[float], dict[str, Tensor]]:
    """Mean loss, the sums of the rewards and of the pairs won, and the gradients."""
    losses, better, worse, won = [], 0.0, 0.0, 0
    for chosen, rejected in of:
        gains = []
        for answer in (chosen, rejected):
            with torch.no_grad():
                before = log_prob(reference, answer)
            gains.append(dpo.beta * (log_prob(policy, answer) - before))
        h = gains[0] - gains[1]
        loss = -(1 - dpo.label_smoothing) * logsigmoid(h) - dpo.label_smoothing * logsigmoid(-h)
        length = len(chosen[0]) - chosen[1]
        losses.append(loss - dpo.sft_coefficient * log_prob(policy, chosen) / length)
        better, worse, won = better + gains[0].item(), worse + gains[1].item(), won + int(h > 0)
    mean = torch.stack(losses).mean()
    policy.zero_grad()
    mean.backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return mean.item(), [len(losses), better, worse, won], gradients


@pytest.mark.parametrize(
    "dpo",
    [
        Dpo(beta=0.3),
        Dpo(beta=0.3, label_smoothing=0.2),
        Dpo(beta=0.1, sft_coefficient=0.5),
    ],
    ids=["plain", "smoothed", "with the loss of the better answer"],
)
@pytest.mark.parametrize("chunk_logits", [2**22, 97 * 5], ids=["whole", "chunked"])
def test_loss_rewards_and_gradients_are_those_of_the_papers_formula(
    tmp_path: Path, dpo: Dpo, chunk_logits: int
) -> None:
    policy, reference = llama(tmp_path / "policy"), llama(tmp_path / "reference", initializer_range=0.1)
    of = pairs(4, seed=1)
    loss, compared, gradients = by_the_paper(policy, reference, of, dpo)
    model = nets.loaded(tmp_path / "policy")
    model.criterion, model.chunk_logits = partial(preference_loss, dpo=dpo, context=model.context), chunk_logits
    batches = [batch([of[:2], of[2:3]], reference), batch([of[3:]], reference)]
    assert [each.num_terms for each in batches] == [3, 1]
    sums = dict(zip(SUMS, Passes(model).train(batches, labels=4).tolist(), strict=True))
    assert sums["loss"] / 4 == pytest.approx(loss, rel=1e-5)
    assert [sums[name] for name in SUMS[3:]] == pytest.approx(compared, rel=1e-5)
    assert sums["labels"] == sum(len(ids) - prompt for (ids, prompt), _ in of)
    found = nets.gradients(model)
    assert found.keys() == gradients.keys()
    for name, expected in gradients.items():
        assert nets.distance(found[name], expected) <= 1e-5, name


def test_a_model_that_is_its_own_reference_prefers_nothing_and_loses_ln_2(tmp_path: Path) -> None:
    llama(tmp_path / "base")
    same = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = nets.loaded(tmp_path / "base")
    model.criterion = partial(preference_loss, dpo=Dpo(), context=model.context)
    parts = Passes(model).losses([batch([pairs(2, seed=3)], same)])
    ((_, found),) = parts
    assert found.loss_sum.item() / 2 == pytest.approx(0.693147, abs=1e-5)
    assert found.log_probs_BP2 is not None
    for got, pair in zip(found.log_probs_BP2[0].tolist(), pairs(2, seed=3), strict=True):
        assert got == pytest.approx([log_prob(same, answer).item() for answer in pair], rel=1e-5)


def test_a_batch_without_pairs_gives_no_loss_and_no_gradient(tmp_path: Path) -> None:
    llama(tmp_path / "base")
    model = nets.loaded(tmp_path / "base")
    model.criterion = partial(preference_loss, dpo=Dpo(), context=model.context)
    blank = torch.zeros(1, 8, dtype=torch.int64)
    none = Batch(blank, torch.full_like(blank, IGNORE), blank, reference_BP2=torch.zeros(1, 0, 2, dtype=torch.float64))
    assert none.num_terms == 0
    assert Passes(model).train([none], labels=0).tolist() == [0] * len(SUMS)
    assert all(not gradient.any() for gradient in nets.gradients(model).values())
