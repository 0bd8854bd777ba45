"""Context parallelism: the same model, whoever has which tokens of a row."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine import mesh
from engine.attention import views
from engine.batch import IGNORE
from engine.config import Lora, Operation, Parallel
from engine.context import ContextAxis
from tests.engine.net import nets
from tests.worlds import World

DROPPING = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
GPT2 = {"architecture": "gpt2", "num_kv_heads": 4, **DROPPING}
BLOOM = {"architecture": "bloom", "num_kv_heads": 4, "ffn_hidden_size": 128, **DROPPING}
WINDOWED = {"architecture": "mistral", "sliding_window": 5}


def pairs_by_hand(places: list[int]) -> int:
    """Of a causal row, those that the queries at `places` make: a token sees itself and all before it."""
    return sum(place + 1 for place in places)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_rank_has_as_many_tokens_and_as_many_pairs_of_a_causal_row(size: int) -> None:
    shares = [[place for run in ContextAxis(size, rank, None).runs(24) for place in run] for rank in range(size)]
    assert sorted(place for share in shares for place in share) == list(range(24))
    # 24 tokens make 24 x 25 / 2 pairs.
    assert [pairs_by_hand(share) for share in shares] == [300 // size] * size


def test_two_ranks_have_the_outer_and_the_inner_quarters() -> None:
    outer, inner = (ContextAxis(2, rank, None).places(8, nets.CPU).tolist() for rank in range(2))
    assert outer == [0, 1, 6, 7]
    assert inner == [2, 3, 4, 5]


def test_a_row_that_cannot_be_cut_is_refused_with_the_length_that_can() -> None:
    with pytest.raises(ValueError, match=r"rows of 18 tokens into 4 chunks.*pad rows to 20"):
        ContextAxis(2, 0, None).runs(18)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("packed", [False, True])
def test_views_show_each_query_what_it_sees_in_the_whole_row(window: int | None, packed: bool) -> None:
    batch = nets.batch(packed=packed)
    seen = torch.zeros(2, 16, 16, dtype=torch.bool)
    for rank in range(2):
        runs = ContextAxis(2, rank, None).runs(16)
        for view in views(runs, torch.float32, nets.CPU, window=window, documents_BW=batch.documents_BT):
            mask = view.mask_BHQK
            if mask is None:
                mask = torch.full((1, 1, len(view.queries), len(view.keys)), float("-inf")).triu(1)
            seen[:, view.queries.start : view.queries.stop, view.keys.start : view.keys.stop] = (mask == 0)[:, 0]
    documents = torch.zeros(2, 16) if batch.documents_BT is None else batch.documents_BT
    for row in range(2):
        for query in range(16):
            first = 0 if window is None else query - window + 1
            for key in range(16):
                expected = first <= key <= query and bool(documents[row, key] == documents[row, query])
                assert bool(seen[row, query, key]) == expected


def compare_with_one_rank(
    parallel: Parallel,
    changes: dict[str, Any],
    *,
    packed: bool = False,
    recompute: str | Collection[Operation] = "none",
    by: Lora | None = None,
    labels_until: int = 16,
) -> tuple[float, float]:
    """Relative distance of the loss and of the worst gradient."""
    shape = nets.shape(**changes)
    batch = nets.batch(packed=packed)
    batch.labels_BT[:, labels_until:] = IGNORE

    def made(grid: mesh.Mesh, recompute: str | Collection[Operation]) -> Any:
        model = nets.uneven(nets.decoder(shape, grid=grid, recompute=recompute))
        return model if by is None else nets.adapted(model, by)

    loss, expected = nets.trained(made(mesh.alone(nets.CPU), "none"), batch)
    grid = mesh.build(parallel)
    model = made(grid, recompute)
    parts = model.loss(batch)
    (parts.loss_sum / (batch.labels_BT != IGNORE).sum()).backward()
    got = nets.gradients(model)
    for gradient in got.values():
        dist.all_reduce(gradient, group=grid.group("context"))
    sums = torch.stack((parts.loss_sum.detach().double(), parts.label_count.double()))
    dist.all_reduce(sums, group=grid.group("context"))
    grid.close()
    assert got.keys() == expected.keys()
    assert int(sums[1]) == int((batch.labels_BT != IGNORE).sum())
    return abs((sums[0] / sums[1]).item() / loss - 1), nets.apart(got, expected)


def holds(answers: list[tuple[float, float]]) -> None:
    for loss, gradient in answers:
        assert loss <= 5e-7
        assert gradient <= 2e-6


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="tied, grouped heads"),
        pytest.param({"num_kv_heads": 4, "tie_embeddings": False}, id="untied, no groups"),
        pytest.param(WINDOWED, id="window"),
        pytest.param({"architecture": "qwen3"}, id="normed heads"),
        pytest.param(
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_seq_len": 8}, id="dynamic positions"
        ),
        pytest.param({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_seq_len": 8}, id="yarn"),
        pytest.param(GPT2, id="learned positions and dropout"),
        pytest.param(BLOOM, id="positions by distance and dropout"),
    ],
)
def test_two_ranks_have_the_loss_and_every_gradient_of_one(
    world2: World, changes: dict[str, Any], packed: bool
) -> None:
    holds(world2.run(compare_with_one_rank, Parallel(context=2), changes, packed=packed))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(Parallel(context=4), id="context"),
        pytest.param(Parallel(context=2, tensor=2), id="context and tensor"),
        pytest.param(Parallel(context=2, tensor=2, sequence=True), id="context, tensor and sequence"),
    ],
)
def test_four_ranks_have_the_loss_and_every_gradient_of_one(world4: World, parallel: Parallel, recompute: str) -> None:
    holds(world4.run(compare_with_one_rank, parallel, WINDOWED, packed=True, recompute=recompute))


@pytest.mark.parametrize("recompute", ["none", ("dropout", "norm"), "full"], ids=["none", "dropout and norm", "full"])
@pytest.mark.parametrize("changes", [GPT2, BLOOM], ids=["gpt2", "bloom"])
def test_four_ranks_draw_the_masks_of_one(
    world4: World, changes: dict[str, Any], recompute: str | Collection[Operation]
) -> None:
    parallel = Parallel(context=2, tensor=2, sequence=True)
    holds(world4.run(compare_with_one_rank, parallel, changes, packed=True, recompute=recompute))


def test_key_heads_held_in_copies_are_shared_along_the_row_too(world4: World) -> None:
    parallel = Parallel(context=2, tensor=2, sequence=True)
    holds(world4.run(compare_with_one_rank, parallel, {"num_kv_heads": 1}, packed=True))


def in_bf16() -> tuple[float, float]:
    """Loss of a sequence of which each rank has a part, and that of one rank in fp32."""
    alone, _ = nets.trained(nets.decoder(nets.shape()), nets.batch())
    grid = mesh.build(Parallel(context=2))
    parts = nets.decoder(nets.shape(), grid=grid, dtype=torch.bfloat16).loss(nets.batch())
    parts.loss_sum.backward()
    sums = torch.stack((parts.loss_sum.detach(), parts.label_count))
    dist.all_reduce(sums)
    grid.close()
    return (sums[0] / sums[1]).item(), alone


def test_bf16_stays_near_fp32(world2: World) -> None:
    for loss, alone in world2.run(in_bf16):
        assert loss == pytest.approx(alone, rel=1e-2)


@pytest.mark.parametrize(
    "recompute",
    ["none", "selective", "full", ("qkv", "norm"), ("qkv", "attention_core")],
    ids=["none", "selective", "full", "what the core reads", "and the core"],
)
def test_a_rank_whose_share_has_no_label_takes_part(world2: World, recompute: str | Collection[Operation]) -> None:
    # The second rank has tokens 4 to 11.
    holds(world2.run(compare_with_one_rank, Parallel(context=2), {}, labels_until=4, recompute=recompute))


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(Parallel(context=4), id="context"),
        pytest.param(Parallel(context=2, tensor=2), id="context and tensor"),
        pytest.param(Parallel(context=2, tensor=2, sequence=True), id="context, tensor and sequence"),
    ],
)
def test_adapters_with_dropout_have_the_masks_and_gradients_of_one_rank(world4: World, parallel: Parallel) -> None:
    by = Lora(rank=4, alpha=6.0, dropout=0.3)
    holds(world4.run(compare_with_one_rank, parallel, {}, packed=True, recompute="selective", by=by))


def saved(recompute: str | Collection[Operation]) -> int:
    grid = mesh.build(Parallel(context=dist.get_world_size()))
    size = nets.saved_by_a_layer(grid, recompute)
    grid.close()
    return size


@pytest.mark.parametrize(
    "recompute", ["none", "selective", "full", ("qkv",)], ids=["none", "selective", "full", "what the core reads"]
)
def test_a_rank_saves_its_share_of_what_a_layer_saves(world4: World, recompute: str | Collection[Operation]) -> None:
    one = nets.saved_by_a_layer(mesh.alone(nets.CPU), recompute)
    assert world4.run(saved, recompute) == [one // 4] * 4
