"""Pipelines: the same model and the same step, in whatever stages, and every micro-batch's activations let go of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.config import Lora, Parallel
from engine.mesh import Mesh
from engine.model import Decoder, whole_shapes
from engine.plan.holdings import holdings
from engine.plan.stages import chunks
from tests.engine.net import nets, pipelines
from tests.engine.net.pipelines import Case
from tests.worlds import World

TWO = {
    "two stages": Case({"pipeline": 2}),
    "fewer micro-batches than stages": Case({"pipeline": 2}, micro_batches=1),
    "stages that are not even": Case({"pipeline": 2, "stages": (3, 1)}),
    "an output that stands alone": Case({"pipeline": 2, "stages": (4, 0)}, {"num_layers": 4, "tie_embeddings": False}),
    "interleaved": Case({"pipeline": 2, "virtual": 2}),
    "interleaved, with micro-batches that ranks do not divide": Case({"pipeline": 2, "virtual": 2}, micro_batches=5),
    "interleaved, untied, replaying layers": Case(
        {"pipeline": 2, "virtual": 2, "stages": (1, 2, 1, 1)},
        {"num_layers": 5, "tie_embeddings": False},
        micro_batches=3,
        recompute="full",
    ),
    "replaying the core": Case({"pipeline": 2}, recompute="selective"),
    "learned positions and dropout": Case(
        {"pipeline": 2, "virtual": 2},
        {"architecture": "gpt2", "num_layers": 4, "num_kv_heads": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    ),
    "a normed embedding": Case(
        {"pipeline": 2}, {"architecture": "bloom", "num_layers": 3, "num_kv_heads": 4, "ffn_hidden_size": 128}
    ),
    "adapters with dropout": Case({"pipeline": 2, "virtual": 2}, lora=Lora(rank=4, alpha=6.0, dropout=0.3)),
}
FOUR = {
    "four stages": Case({"pipeline": 4}, micro_batches=6),
    "four stages of fewer micro-batches": Case({"pipeline": 4}, micro_batches=3),
    "four stages, interleaved": Case({"pipeline": 4, "virtual": 2}, {"num_layers": 9}, micro_batches=5),
    "with tensor": Case({"pipeline": 2, "tensor": 2}),
    "with tensor and sequence, interleaved, replaying": Case(
        {"pipeline": 2, "virtual": 2, "tensor": 2, "sequence": True}, recompute="selective"
    ),
    "with a key-value head for two": Case(
        {"pipeline": 2, "tensor": 2, "sequence": True}, {"num_layers": 3, "num_kv_heads": 1, "tie_embeddings": False}
    ),
    "with replicas": Case({"pipeline": 2, "data": 2}, micro_batches=3),
    "adapters, with tensor and sequence": Case({"pipeline": 2, "tensor": 2, "sequence": True}, lora=nets.LORA),
}


def check_gradients(world: World, case: Case) -> None:
    compared = set()
    for loss, gradient, names in world.run(pipelines.loss_and_gradients, case):
        assert loss <= 5e-7
        assert gradient <= 2e-6
        compared |= names
    if case.lora is None:
        assert compared == whole_shapes(nets.shape(**case.shape)).keys()


@pytest.mark.parametrize("case", TWO.values(), ids=TWO.keys())
def test_two_stages_have_the_loss_and_every_gradient_of_one_rank(world2: World, case: Case) -> None:
    check_gradients(world2, case)


@pytest.mark.parametrize("case", FOUR.values(), ids=FOUR.keys())
def test_four_ranks_have_the_loss_and_every_gradient_of_one(world4: World, case: Case) -> None:
    check_gradients(world4, case)


@pytest.mark.parametrize("case", [TWO["interleaved"], TWO["adapters with dropout"]])
def test_norms_and_weights_stay_those_of_one_rank_over_steps(world2: World, case: Case) -> None:
    for norm, weight in world2.run(pipelines.several_steps, case):
        assert norm <= 2e-6
        assert weight <= 2e-6


@pytest.mark.parametrize(
    "case",
    [
        FOUR["with replicas"],
        Case({"pipeline": 2, "data": 2, "shard_optimizer": False}, micro_batches=1),
        # The last stage has nothing that learns.
        Case({"pipeline": 2, "data": 2, "stages": (4, 0)}, lora=nets.LORA),
    ],
)
def test_norms_and_weights_stay_those_of_one_rank_on_four(world4: World, case: Case) -> None:
    for norm, weight in world4.run(pipelines.several_steps, case):
        assert norm <= 2e-6
        assert weight <= 2e-6


@pytest.mark.parametrize("name", ["interleaved, with micro-batches that ranks do not divide", "two stages"])
def test_an_evaluation_has_the_sums_of_one_rank(world2: World, name: str) -> None:
    for sums, expected in world2.run(pipelines.foreseen, TWO[name]):
        assert sums[1:] == expected[1:]
        assert sums[0] == pytest.approx(expected[0], rel=5e-7)


def test_a_tied_embedding_is_the_same_at_both_ends_and_counts_once(world4: World) -> None:
    first, second, third, fourth = world4.run(pipelines.tied_copies, {"pipeline": 2, "data": 2})
    for weight, norm, unique in (first, second, third, fourth):
        assert torch.equal(weight, first[0])
        assert norm == pytest.approx(unique**0.5, rel=1e-6)


def test_inner_stages_hold_no_embedding(world4: World) -> None:
    weights = [weight for weight, _, _ in world4.run(pipelines.tied_copies, {"pipeline": 4})]
    assert [weight is None for weight in weights] == [False, True, True, False]
    assert torch.equal(weights[0], weights[3])


def test_a_pipeline_gives_no_logits(world2: World) -> None:
    assert all("pipeline=1" in message for message in world2.run(pipelines.refused_logits))


def test_the_first_of_two_stages_keeps_two_micro_batches_however_many_there_are(world2: World) -> None:
    # 1F1B: min(p - s, m), p = 2 and s = 0.
    one, two, many = (world2.run(pipelines.kept_by_the_first_stage, count)[0] for count in (1, 2, 6))
    assert two == many == 2 * one


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False}, {"architecture": "gpt2", "num_kv_heads": 4}])
def test_each_rank_holds_as_many_weights_as_the_plan_says(changes: dict[str, Any]) -> None:
    shape, parallel = nets.shape(num_layers=5, **changes), Parallel(pipeline=2, virtual=2)
    for rank in range(2):
        grid = Mesh(parallel, rank, torch.device("meta"))
        held = sum(parameter.numel() for parameter in Decoder(shape, grid).parameters())
        assert held == holdings(shape, stages=chunks(shape, parallel, rank=rank)).elements()
