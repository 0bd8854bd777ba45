"""What is added to a gradient's total on the spot is what autograd would have brought."""

from __future__ import annotations

import pytest
import torch

from engine.landing import Landing, land
from engine.model import Decoder
from engine.passes import Passes
from tests.engine.net import nets


def by_autograd(model: Decoder, micro_batches: int) -> dict[str, torch.Tensor]:
    labels = 7 * micro_batches
    for number in range(micro_batches):
        torch.autograd.backward(model.loss(nets.batch(seed=number)).loss_sum / labels)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def by_landing(model: Decoder, micro_batches: int) -> dict[str, torch.Tensor]:
    landings = {}
    for name, parameter in model.named_parameters():
        # What is left of the step before must not matter.
        landings[name] = Landing(torch.full_like(parameter, torch.nan, dtype=torch.float32))
        land(parameter, landings[name])
    Passes(model).train([nets.batch(seed=number) for number in range(micro_batches)], labels=7 * micro_batches)
    assert all(parameter.grad is None for parameter in model.parameters())
    return {name: landing.close() for name, landing in landings.items()}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_gradients_are_those_of_autograd(tied: bool, micro_batches: int) -> None:
    expected, got = (
        train(nets.decoder(nets.shape(tie_embeddings=tied)), micro_batches) for train in (by_autograd, by_landing)
    )
    assert nets.apart(got, expected) <= 2e-6


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_in_bf16_a_vocabulary_s_gradient_is_not_rounded_on_its_way(tied: bool) -> None:
    wide = by_autograd(nets.decoder(nets.shape(tie_embeddings=tied)), 3)
    name = "model.embed_tokens.weight"
    by_torch, ours = (
        train(nets.decoder(nets.shape(tie_embeddings=tied), dtype=torch.bfloat16), 3)[name].float()
        for train in (by_autograd, by_landing)
    )
    assert nets.distance(ours, wide[name]) <= nets.distance(by_torch, wide[name])


def test_an_unused_landing_is_zero() -> None:
    landing = Landing(torch.full((3,), torch.nan))
    assert landing.close().tolist() == [0, 0, 0]
    landing.add(torch.tensor([1.0, 2.0, 3.0]))
    landing.opened().add_(1)
    landing.add(torch.ones(3).bfloat16())
    assert landing.close().tolist() == [3, 4, 5]
    landing.add(torch.ones(3))
    assert landing.close().tolist() == [1, 1, 1]


def test_a_landing_that_keeps_does_not_touch_its_total_until_there_is_something_to_add() -> None:
    landing = Landing(torch.full((3,), torch.nan), keeps=True)
    alone = torch.tensor([1.0, 2.0, 3.0]).bfloat16()
    landing.add(alone)
    assert landing.taken() is alone
    assert landing.total.isnan().all()
    landing.add(alone)
    landing.add(torch.full((3,), 2.0**-9))
    assert landing.taken() is None
    assert landing.total.tolist() == [1 + 2.0**-9, 2 + 2.0**-9, 3 + 2.0**-9]
    assert landing.taken() is None
    assert landing.total.tolist() == [0, 0, 0]
