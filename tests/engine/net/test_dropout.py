"""Masks that depend on nothing but global places, and what a GPT layer with dropout keeps: the bytes of the papers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import mesh
from engine.config import Operation
from engine.dropout import Draw, dropout, kept
from tests.engine.net import nets
from tests.worlds import World

GPT: dict[str, Any] = {
    "architecture": "gpt2",
    "num_kv_heads": 4,
    "ffn_hidden_size": 4 * 32,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
SEQ, BATCH, HIDDEN, HEADS = 16, 2, 32, 4
SCORES = 5 * HEADS * SEQ / HIDDEN
DRAW = Draw(1, 2, torch.arange(4), torch.arange(64), torch.arange(64))


def mask(rate: float = 0.3, draw: Draw = DRAW, stream: str = "here", *lengths: int) -> Tensor:
    return kept(rate, draw, stream, tuple(torch.arange(n) for n in lengths or (64, 256)))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_the_rate_says(rate: float) -> None:
    # 65 536 elements: six standard deviations of a fair coin are 0.012.
    assert mask(rate).float().mean().item() == pytest.approx(1 - rate, abs=0.012)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(mask(draw=replace(DRAW, seed=2)), id="seed"),
        pytest.param(mask(draw=replace(DRAW, step=3)), id="step"),
        pytest.param(mask(stream="there"), id="stream"),
        pytest.param(mask(draw=replace(DRAW, rows_B=torch.arange(4, 8))), id="rows"),
        pytest.param(mask().roll(1, 1), id="tokens"),
        pytest.param(mask().roll(1, 2), id="features"),
    ],
)
def test_another_place_has_another_mask_that_knows_nothing_of_this_one(other: Tensor) -> None:
    # Both kept with probability 0.7 x 0.7 where they are independent; the deviation of so many is 0.002.
    assert (mask() & other).float().mean().item() == pytest.approx(0.49, abs=0.012)


def test_a_piece_has_its_piece_of_the_mask() -> None:
    whole = mask(0.3, DRAW, "here", 4, 8, 16)
    rows, heads, queries, keys = torch.tensor([2, 0]), torch.arange(1, 3), torch.tensor([7, 3, 0]), torch.arange(5, 9)
    piece = kept(0.3, replace(DRAW, rows_B=rows), "here", (heads, queries, keys))
    assert torch.equal(piece, whole[rows][:, heads][:, :, queries][..., keys])


@pytest.mark.parametrize("saves", [False, True])
def test_what_is_left_is_scaled_and_its_gradient_too(saves: bool) -> None:
    x = torch.ones(4, 64, 8, requires_grad=True)
    y = dropout(x, 0.25, DRAW, stream="here", tokens_N=DRAW.tokens_T, saves_mask=saves)
    assert y.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


def bytes_of(sequence_parallel: bool, recompute: str, parallel: int) -> float:
    """The papers' bytes for a layer, in units of s b h, and mean and deviation of both norms, four bytes each."""
    scores = 0.0 if recompute == "selective" else SCORES
    t = parallel
    # Korthikanti et al. 2022, equations 1, 2 and 4, table 2.
    units = (34 + scores) / t if sequence_parallel else 10 + 24 / t + scores / t
    tokens = SEQ * BATCH / (t if sequence_parallel else 1)
    return units * SEQ * BATCH * HIDDEN + 2 * 2 * 4 * tokens


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_gpt_layer_keeps_the_bytes_of_equation_1(recompute: str) -> None:
    assert nets.saved_by_a_layer(mesh.alone(nets.CPU), recompute, **GPT) == bytes_of(False, recompute, 1)


def saved(sequence: bool, recompute: str) -> int:
    grid = nets.grid(sequence=sequence)
    size = nets.saved_by_a_layer(grid, recompute, **GPT)
    grid.close()
    return size


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "tensor and sequence"])
def test_two_ranks_keep_the_bytes_of_equations_2_and_4(world2: World, sequence: bool, recompute: str) -> None:
    assert world2.run(saved, sequence, recompute) == [bytes_of(sequence, recompute, 2)] * 2


def test_a_mask_that_is_replayed_is_not_kept() -> None:
    grid = mesh.alone(nets.CPU)
    operations: set[Operation] = {"dropout"}
    # Both branches' masks, a mask and the dropped probabilities: a byte each, a byte and two.
    less = SEQ * BATCH * HIDDEN * (2 + 3 * HEADS * SEQ / HIDDEN)
    assert nets.saved_by_a_layer(grid, operations, **GPT) == bytes_of(False, "none", 1) - less
    _, expected = nets.trained(nets.decoder(nets.shape(**GPT)), nets.batch())
    _, got = nets.trained(nets.decoder(nets.shape(**GPT), recompute=operations), nets.batch())
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("changes", [{}, {"architecture": "mistral", "sliding_window": 4}], ids=["llama", "window"])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_the_papers_core_has_the_loss_and_gradients_of_the_usual_one(changes: dict[str, Any], packed: bool) -> None:
    batch = nets.batch(packed=packed)
    loss, expected = nets.trained(nets.decoder(nets.shape(**changes)), batch)
    got_loss, got = nets.trained(nets.decoder(nets.shape(**changes), unfused=True), batch)
    assert got_loss == pytest.approx(loss, rel=1e-6)
    assert nets.apart(got, expected) <= 2e-6


def test_nothing_is_dropped_in_evaluation() -> None:
    model = nets.decoder(nets.shape(**GPT)).eval()
    plain = nets.decoder(nets.shape(**GPT | {"hidden_dropout": 0.0, "attention_dropout": 0.0}))
    assert model.loss(nets.batch()).loss_sum.item() == plain.loss(nets.batch()).loss_sum.item()
