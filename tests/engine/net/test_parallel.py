"""Tensor and sequence parallelism: the same model, however it is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from engine import gather, mesh, weights
from engine.config import Parallel
from engine.model import Decoder
from engine.placement import placement_of
from tests.engine.net import nets
from tests.worlds import World

LAYOUTS = [pytest.param(False, id="tensor"), pytest.param(True, id="tensor and sequence")]
MODELS = [
    pytest.param({}, id="tied"),
    pytest.param({"tie_embeddings": False}, id="untied"),
    pytest.param({"vocab_size": 97, "tie_embeddings": False}, id="vocabulary that tensor does not divide"),
    pytest.param({"num_kv_heads": 4, "head_dim": 16}, id="wide heads without groups"),
]


def compare_with_one_rank(changes: dict[str, object], sequence: bool, recompute: str) -> tuple[float, float]:
    """Relative distance of the loss and of the worst gradient."""
    shape = nets.shape(**changes)
    batch = nets.batch(shape.vocab_size, packed=True)
    loss, expected = nets.trained(nets.decoder(shape), batch)
    grid = nets.grid(sequence=sequence)
    # A chunk of 7 tokens does not divide the 32 of the batch.
    model = nets.decoder(shape, grid=grid, recompute=recompute, chunk_logits=7 * shape.vocab_size // 2)
    got_loss, got = nets.trained(model, batch)
    grid.close()
    assert got.keys() == expected.keys()
    return abs(got_loss / loss - 1), max(nets.distance(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("sequence", LAYOUTS)
@pytest.mark.parametrize("changes", MODELS)
def test_two_ranks_have_the_loss_and_every_gradient_of_one(
    world2: World, changes: dict[str, object], sequence: bool
) -> None:
    for loss, gradient in world2.run(compare_with_one_rank, changes, sequence, "none"):
        assert loss <= 5e-7
        assert gradient <= 2e-6


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_two_ranks_that_recompute_have_the_gradients_of_one(world2: World, recompute: str) -> None:
    for loss, gradient in world2.run(compare_with_one_rank, {}, True, recompute):
        assert loss <= 5e-7
        assert gradient <= 2e-6


def replicated_gradients(sequence: bool) -> dict[str, torch.Tensor]:
    grid = nets.grid(sequence=sequence)
    model = nets.decoder(nets.shape(), grid=grid)
    _, whole = nets.trained(model, nets.batch())
    grid.close()
    return {name: whole[name] for name, p in model.named_parameters() if placement_of(p).dim is None}


@pytest.mark.parametrize("sequence", LAYOUTS)
def test_gradients_of_replicated_parameters_are_bitwise_equal_on_all_ranks(world2: World, sequence: bool) -> None:
    first, second = world2.run(replicated_gradients, sequence)
    assert len(first) == 5
    assert all(torch.equal(first[name], second[name]) for name in first)


def weights_in_whole() -> dict[str, torch.Tensor]:
    grid = nets.grid(sequence=False)
    model = nets.decoder(nets.shape(vocab_size=97), grid=grid)
    whole = {name: gather.whole(p, p, model.axis) for name, p in model.named_parameters() if p.dim() == 2}
    grid.close()
    return whole


def test_a_seed_gives_the_same_weights_in_every_layout(world2: World) -> None:
    alone = dict(nets.decoder(nets.shape(vocab_size=97)).named_parameters())
    for whole in world2.run(weights_in_whole):
        assert all(torch.equal(whole[name], alone[name].detach()) for name in whole)


def padding_and_its_gradient() -> tuple[float, float, int]:
    grid = nets.grid(sequence=True)
    model = nets.decoder(nets.shape(vocab_size=97), grid=grid)
    nets.trained(model, nets.batch(97))
    table = model.model.embed_tokens.weight
    length = placement_of(table).length
    assert table.grad is not None
    past = table.detach()[length:], table.grad[length:]
    grid.close()
    return past[0].abs().sum().item(), past[1].abs().sum().item(), len(past[0])


def test_padded_rows_of_the_vocabulary_stay_zero_and_get_no_gradient(world2: World) -> None:
    assert world2.run(padding_and_its_gradient) == [(0.0, 0.0, 0), (0.0, 0.0, 1)]


def test_four_ranks_have_the_gradients_of_one_though_the_last_has_no_share_of_the_vocabulary(world4: World) -> None:
    # Five entries make two, two, one and none.
    for loss, gradient in world4.run(compare_with_one_rank, {"vocab_size": 5, "num_kv_heads": 4}, True, "selective"):
        assert loss <= 5e-7
        assert gradient <= 2e-6


@pytest.mark.parametrize("sequence", LAYOUTS)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_ranks_that_share_a_key_value_head_have_the_gradients_of_one(
    world4: World, kv_heads: int, sequence: bool
) -> None:
    changes: dict[str, object] = {"num_kv_heads": kv_heads, "architecture": "qwen3", "attention_bias": "all"}
    for loss, gradient in world4.run(compare_with_one_rank, changes, sequence, "selective"):
        assert loss <= 5e-7
        assert gradient <= 2e-6


def keys_in_whole(kv_heads: int) -> dict[str, torch.Tensor]:
    grid = nets.grid(sequence=False)
    model = nets.decoder(nets.shape(num_kv_heads=kv_heads), grid=grid)
    whole = {name: tensor for name, tensor in weights.whole_state(model) if "k_proj" in name or "v_proj" in name}
    grid.close()
    return whole


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_keys_and_values_are_exported_once_however_many_ranks_hold_them(world4: World, kv_heads: int) -> None:
    alone = dict(nets.decoder(nets.shape(num_kv_heads=kv_heads)).named_parameters())
    for whole in world4.run(keys_in_whole, kv_heads):
        assert len(whole) == 4
        assert all(torch.equal(whole[name], alone[name].detach()) for name in whole)


def logits_of_two() -> tuple[torch.Tensor, int]:
    grid = nets.grid(sequence=False)
    model = nets.decoder(nets.shape(vocab_size=97), grid=grid)
    cache = model.cache(rows=2, tokens=16)
    tokens = nets.batch(97).tokens_BT
    first = model.logits(tokens[:, :9], cache)
    rest = model.logits(tokens[:, 9:], cache)
    grid.close()
    return torch.cat((first, rest), 1), cache.length


def test_two_ranks_generate_from_the_logits_of_one(world2: World) -> None:
    expected = nets.decoder(nets.shape(vocab_size=97)).logits(nets.batch(97).tokens_BT)
    for logits, length in world2.run(logits_of_two):
        assert length == 16
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def in_bf16(sequence: bool) -> tuple[float, float]:
    shape = nets.shape()
    alone, _ = nets.trained(nets.decoder(shape), nets.batch())
    grid = nets.grid(sequence=sequence)
    loss, _ = nets.trained(nets.decoder(shape, grid=grid, dtype=torch.bfloat16, recompute="selective"), nets.batch())
    grid.close()
    return loss, alone


@pytest.mark.parametrize("sequence", LAYOUTS)
def test_bf16_stays_near_fp32(world2: World, sequence: bool) -> None:
    for loss, alone in world2.run(in_bf16, sequence):
        assert loss == pytest.approx(alone, rel=1e-2)


def test_heads_that_tensor_does_not_divide_are_refused() -> None:
    grid = replace(mesh.alone(nets.CPU), parallel=Parallel(tensor=4))
    with pytest.raises(ValueError, match=r"tensor=4 must divide num_heads=6; try 2"):
        Decoder(nets.shape(num_heads=6), grid)
    # Six ranks can't hold four heads evenly, neither by halves nor in copies.
    grid = replace(mesh.alone(nets.CPU), parallel=Parallel(tensor=6))
    with pytest.raises(ValueError, match=r"tensor=6 must divide num_kv_heads=4; try 2"):
        Decoder(nets.shape(num_heads=12, num_kv_heads=4), grid)


def odd_row() -> str:
    grid = nets.grid(sequence=True)
    try:
        nets.decoder(nets.shape(), grid=grid).loss(nets.batch(tokens=15))
    except ValueError as error:
        return str(error)
    finally:
        dist.barrier()
        grid.close()
    return ""


def test_a_row_that_ranks_cannot_share_is_refused_with_the_length_that_works(world2: World) -> None:
    assert all("pad rows to 16" in message for message in world2.run(odd_row))


def saved(sequence: bool, recompute: str) -> int:
    grid = nets.grid(sequence=sequence)
    size = nets.saved_by_a_layer(grid, recompute)
    grid.close()
    return size


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_sequence_parallelism_halves_all_that_a_layer_saves(world2: World, recompute: str) -> None:
    one = nets.saved_by_a_layer(mesh.alone(nets.CPU), recompute)
    assert world2.run(saved, True, recompute) == [one // 2, one // 2]


def test_tensor_parallelism_alone_keeps_the_norms_inputs_and_outputs_whole(world2: World) -> None:
    # Two norms of width 32, their inputs and outputs in bf16 and a statistic in fp32, for 32 tokens.
    whole = 32 * 2 * (2 * 2 * 32 + 4)
    one = nets.saved_by_a_layer(mesh.alone(nets.CPU), "none")
    assert world2.run(saved, False, "none") == [whole + (one - whole) // 2] * 2
