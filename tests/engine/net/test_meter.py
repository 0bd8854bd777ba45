"""Bytes that layers keep for their backward pass: what the meter finds is what the plan says, to the byte."""

from __future__ import annotations

from itertools import combinations
from typing import Any, get_args

import pytest
import torch

from engine import mesh
from engine.config import Lora, Operation, Parallel
from engine.meter import SHARED, Meter
from engine.plan.recompute import Setting, cost
from tests.engine.net import nets
from tests.worlds import World

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
SUBSETS = [set(some) for size in range(len(OPERATIONS)) for some in combinations(OPERATIONS[:-1], size)] + [{"layer"}]
PAIRS = [set(some) for some in combinations(OPERATIONS, 2)] + [set(OPERATIONS) - {"layer"}, set()]
GPT = {"architecture": "gpt2", "num_kv_heads": 4, "hidden_dropout": 0.2, "attention_dropout": 0.3}
GPT_DROPPING = Lora(rank=4, dropout=0.3, targets=("q", "k", "v", "o", "up"))
BLOOM = {"num_kv_heads": 4, "ffn_hidden_size": 128, "hidden_dropout": 0.1}
DROPPING = Lora(rank=4, dropout=0.3, targets=("q", "o", "gate", "down"))


def unlike_the_plan(
    subsets: list[set[Operation]], grid: mesh.Mesh, by: Lora | None, **changes: Any
) -> list[tuple[set[Operation], int, int]]:
    """Operations, layer and difference in bytes, wherever there is one."""
    found = []
    for operations in subsets:
        for layer, measured in enumerate(nets.saved_by_layers(grid, operations, by, **changes)):
            reached = by is None or layer > 0
            setting = Setting(nets.shape(**changes), 16, 2, 2, grid.parallel, by, reached)
            if difference := measured - cost(setting, operations).saved:
                found.append((operations, layer, difference))
    return found


@pytest.mark.parametrize(
    ("changes", "by", "subsets"),
    [
        pytest.param({}, None, SUBSETS, id="llama"),
        pytest.param({"attention_bias": "all", "mlp_bias": True}, None, PAIRS, id="biases"),
        pytest.param({"architecture": "qwen3"}, DROPPING, PAIRS, id="qwen3 with adapters and dropout"),
        pytest.param({}, Lora(rank=4, targets=("k", "up")), PAIRS, id="few adapters"),
        pytest.param(GPT, None, PAIRS, id="gpt2 with dropout"),
        pytest.param(GPT, GPT_DROPPING, PAIRS, id="gpt2 with adapters and dropout"),
        pytest.param({"architecture": "bloom", **BLOOM}, None, PAIRS, id="bloom"),
        pytest.param(
            {"architecture": "mistral", "sliding_window": 4, "attention_dropout": 0.3}, None, PAIRS, id="mistral"
        ),
        pytest.param({}, Lora(rank=4, targets=("down",)), PAIRS, id="an adapter at the end"),
    ],
)
def test_a_layer_keeps_what_the_plan_says(changes: dict[str, Any], by: Lora | None, subsets: list[Any]) -> None:
    assert unlike_the_plan(subsets, mesh.alone(nets.CPU), by, **changes) == []


def unlike_the_plan_on_two(
    parallel: Parallel, by: Lora | None, **changes: Any
) -> list[tuple[set[Operation], int, int]]:
    grid = mesh.build(parallel)
    found = unlike_the_plan(PAIRS, grid, by, **changes)
    grid.close()
    return found


@pytest.mark.parametrize(
    ("parallel", "by", "changes"),
    [
        pytest.param(Parallel(tensor=2), None, {"architecture": "qwen3", "num_kv_heads": 1}, id="tensor, one key head"),
        pytest.param(Parallel(tensor=2, sequence=True), DROPPING, {}, id="tensor and sequence, adapters"),
        pytest.param(Parallel(context=2), None, {}, id="context"),
    ],
)
def test_a_layer_of_two_ranks_keeps_what_the_plan_says(
    world2: World, parallel: Parallel, by: Lora | None, changes: dict[str, Any]
) -> None:
    assert world2.run(unlike_the_plan_on_two, parallel, by, **changes) == [[], []]


def llama(operations: set[Operation], parallel: Parallel | None = None) -> int:
    """Bytes a token of a layer of width 32 with four heads of 8, two key heads and 48 inner features, in bf16."""
    setting = Setting(nets.shape(), 16, 2, 2, parallel or Parallel())
    saved, tokens = cost(setting, operations).saved, 2 * 16
    assert saved % tokens == 0
    return saved // tokens


# Both norms' inputs and outputs, q, k and v, the core's output, gate, up and their product, in two bytes; in four, two
# statistics, and for each head what the core sums up.
ALL = 2 * (4 * 32 + 32 + 2 * 16 + 32 + 3 * 48) + 4 * 2 + 4 * 4


@pytest.mark.parametrize(
    ("operations", "freed"),
    [
        pytest.param({"attention_core"}, 4 * 4, id="sums of the core"),
        pytest.param({"norm"}, 2 * 2 * 32, id="outputs of both norms"),
        pytest.param({"activation"}, 2 * 48, id="what the activation gives"),
        pytest.param({"dropout"}, 0, id="there is none"),
        pytest.param({"up_projection"}, 2 * 2 * 48, id="gate and up"),
        pytest.param({"qkv"}, 2 * (32 + 2 * 16), id="queries, keys and values"),
        pytest.param(
            {"norm", "activation", "up_projection", "qkv"}, 2 * (2 * 32 + 3 * 48 + 32 + 2 * 16), id="all outputs"
        ),
        pytest.param({"layer"}, ALL - 2 * 32, id="all but the input"),
    ],
)
def test_a_llama_layer_frees_what_is_counted_by_hand(operations: set[Operation], freed: int) -> None:
    assert llama(set()) == ALL
    assert llama(operations) == ALL - freed


def test_tensor_ranks_share_what_is_inside_the_matrices_and_sequence_parallelism_the_rest() -> None:
    # Korthikanti et al. 2022, equation 4: everything is divided by t; without it (their equation 2) norms are not.
    assert 2 * llama(set(), Parallel(tensor=2, sequence=True)) == ALL
    norms = 2 * 4 * 32 + 4 * 2
    assert llama(set(), Parallel(tensor=2)) == norms + (ALL - norms) // 2


S, B, H, A = 128, 2, 64, 4
"""Tokens of a row, rows, features and heads of a GPT layer, as the papers call them."""


def gpt_layer(parallel: Parallel, operations: set[Operation]) -> int:
    grid = mesh.build(parallel)
    shape = nets.shape(
        architecture="gpt2", hidden_size=H, num_heads=A, num_kv_heads=A, head_dim=H // A, ffn_hidden_size=4 * H,
        max_seq_len=S, hidden_dropout=0.1, attention_dropout=0.1,
    )  # fmt: skip
    model = nets.decoder(shape, grid=grid, recompute=operations, dtype=torch.bfloat16)
    with Meter(model.parameters(), dict(model.model.layers.items())) as meter:
        model.loss(nets.batch(rows=B, tokens=S))
    grid.close()
    return meter.bytes["1"]


# Korthikanti et al. 2022, equations 1, 2 and 4 and section 5, in units of sbh; of each of so many norms, mean and
# deviation besides. The last row is ours: what is left where all that repeats no product is replayed with the core.
BYTES: list[Any] = [
    pytest.param(set(), lambda t, scores: (34 + scores) / t, lambda t, scores: 10 + (24 + scores) / t, 2, id="none"),
    pytest.param({"attention_core"}, lambda t, _: 34 / t, lambda t, _: 10 + 24 / t, 2, id="selective"),
    pytest.param({"layer"}, lambda t, _: 2 / t, lambda t, _: 2, 0, id="full"),
    pytest.param(
        {"attention_core", "norm", "activation", "dropout"}, lambda t, _: 20 / t, lambda t, _: 4 + 16 / t, 2, id="ours"
    ),
]


@pytest.mark.parametrize(("operations", "shared", "whole", "norms"), BYTES)
def test_a_gpt_layer_keeps_what_the_papers_say(
    world2: World, operations: set[Operation], shared: Any, whole: Any, norms: int
) -> None:
    unit, scores, statistics = S * B * H, 5 * A * S / H, norms * 2 * 4 * S * B
    assert gpt_layer(Parallel(), operations) == unit * shared(1, scores) + statistics
    tensor = world2.run(gpt_layer, Parallel(tensor=2), operations)
    assert tensor == [unit * whole(2, scores) + statistics] * 2
    sequence = world2.run(gpt_layer, Parallel(tensor=2, sequence=True), operations)
    assert sequence == [unit * shared(2, scores) + statistics / 2] * 2


def test_the_meter_counts_a_storage_once_and_tells_its_part_from_what_parts_share() -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
            return x * own + own.t().contiguous().t() * own.t()

    parts: dict[str, torch.nn.Module] = {"a": Twice(), "b": Twice()}
    x, weight = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
    with Meter([weight], parts) as meter:
        parts["a"](x, weight) + parts["b"](x, torch.ones(3, 3, requires_grad=True))
        x * weight
    # Of `a` only the copy is its own, `b` has its tensor as well; both have read x.
    assert dict(meter.bytes) == {SHARED: 36, "a": 36, "b": 72}
