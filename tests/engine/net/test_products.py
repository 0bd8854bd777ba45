"""Matrix products of a step: what torch's counter finds is what the plan says, for each choice of what is replayed."""

from __future__ import annotations

from functools import partial
from itertools import combinations
from typing import Any, get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine import mesh
from engine.config import Lora, Operation, Parallel
from engine.plan.products import products
from engine.plan.recompute import Setting, hardware_flops
from engine.plan.stages import stages
from tests.engine.net import nets
from tests.worlds import World

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
CHOICES = [frozenset(some) for size in range(2) for some in combinations(OPERATIONS, size)]
CHOICES += [frozenset(OPERATIONS) - {"layer"}, frozenset(OPERATIONS), frozenset({"norm", "qkv"})]
FEW: list[frozenset[Operation]] = [frozenset({"attention_core"}), frozenset({"layer"}), frozenset({"norm", "qkv"})]
GPT: dict[str, Any] = {"architecture": "gpt2", "num_kv_heads": 4, "hidden_dropout": 0.2, "attention_dropout": 0.3}


def added_in_place(total: Any, left: Any, right: Any, **_: Any) -> int:
    """What the counter says of sums of products that make a new tensor; it does not know others."""
    return 2 * left[0] * left[1] * right[1]


IN_PLACE: dict[Any, Any] = {torch.ops.aten.addmm_: added_in_place}


def counted(
    grid: mesh.Mesh, operations: frozenset[Operation], by: Lora | None, dtype: torch.dtype, **changes: Any
) -> int:
    model = nets.decoder(nets.shape(**changes), grid=grid, recompute=operations, dtype=dtype)
    if by is not None:
        nets.adapted(model, by)
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        model.loss(nets.batch()).loss_sum.backward()
    return counter.get_total_flops()


def unlike_the_plan(
    grid: mesh.Mesh, by: Lora | None, dtype: torch.dtype, some: list[frozenset[Operation]] = CHOICES, **changes: Any
) -> dict[str, tuple[int, int]]:
    """What is counted and what is planned, wherever they differ."""
    shape = nets.shape(**changes)
    setting = Setting(shape, 16, 2, dtype.itemsize, grid.parallel, by, context_rank=grid.rank("context"))
    found = {}
    for operations in some:
        real = counted(grid, operations, by, dtype, **changes)
        planned = products(setting, stages(shape, grid.parallel), operations)
        if real != planned:
            found["+".join(operations)] = (real, planned)
    return found


@pytest.mark.parametrize(
    ("by", "changes"),
    [
        pytest.param(None, {}, id="llama"),
        pytest.param(None, {"attention_dropout": 0.3}, id="whole scores"),
        pytest.param(None, GPT, id="gpt2 with dropout"),
        pytest.param(Lora(rank=4), {"architecture": "qwen3", "attention_dropout": 0.3}, id="adapters"),
        pytest.param(Lora(rank=4, dropout=0.3), GPT, id="adapters and dropout"),
        pytest.param(Lora(rank=4, targets=("k", "up")), {"attention_dropout": 0.3}, id="few adapters"),
        pytest.param(Lora(rank=4, targets=("down",)), {"attention_dropout": 0.3}, id="adapters at the end"),
    ],
)
def test_the_counter_finds_what_the_plan_says(by: Lora | None, changes: dict[str, Any]) -> None:
    assert unlike_the_plan(mesh.alone(nets.CPU), by, torch.float32, **changes) == {}


def test_in_bf16_the_counter_finds_the_products_of_our_own_core() -> None:
    assert unlike_the_plan(mesh.alone(nets.CPU), Lora(rank=4, targets=("k", "up")), torch.bfloat16) == {}


def unlike_the_plan_on_two(
    parallel: Parallel, by: Lora | None, dtype: torch.dtype = torch.float32, **changes: Any
) -> dict[str, tuple[int, int]]:
    grid = mesh.build(parallel)
    found = unlike_the_plan(grid, by, dtype, FEW, **changes)
    grid.close()
    return found


@pytest.mark.parametrize(
    ("parallel", "by"),
    [(Parallel(tensor=2, sequence=True), Lora(rank=4)), (Parallel(tensor=2), None)],
    ids=["tensor and sequence, adapters", "tensor"],
)
def test_the_counter_of_two_ranks_finds_what_the_plan_says(world2: World, parallel: Parallel, by: Lora | None) -> None:
    run = partial(world2.run, unlike_the_plan_on_two, parallel, by)
    assert run(num_kv_heads=1, vocab_size=97, attention_dropout=0.3) == [{}, {}]


@pytest.mark.parametrize(
    ("by", "dtype", "changes"),
    [
        pytest.param(None, torch.float32, {}, id="fused"),
        pytest.param(Lora(rank=4), torch.float32, {"attention_dropout": 0.3}, id="whole scores, adapters"),
        pytest.param(
            None,
            torch.float32,
            {"architecture": "mistral", "attention_dropout": 0.3, "sliding_window": 5},
            id="a window",
        ),
        pytest.param(None, torch.bfloat16, {}, id="our own core"),
    ],
)
def test_the_counter_of_ranks_that_share_rows_finds_what_the_plan_says_of_each(
    world2: World, by: Lora | None, dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    assert world2.run(unlike_the_plan_on_two, Parallel(context=2), by, dtype, **changes) == [{}, {}]


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_replay_counts_as_far_as_it_happens(micro_batch: int) -> None:
    # Of several rows the core's products read copies of keys and values, and nothing asks for those again.
    shape, grid = nets.shape(**GPT), mesh.alone(nets.CPU)
    setting = Setting(shape, 16, micro_batch, 4)
    tokens = 16 * micro_batch
    more = []
    for operations in (frozenset[Operation](), frozenset[Operation]({"qkv"})):
        with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
            model = nets.decoder(shape, grid=grid, recompute=operations)
            model.loss(nets.batch(rows=micro_batch)).loss_sum.backward()
        planned = hardware_flops(
            shape, tokens=tokens, pairs=tokens * 16, replayed=[operations] * shape.num_layers, of=setting
        )
        more.append((counter.get_total_flops(), planned))
    (counted_none, planned_none), (counted_qkv, planned_qkv) = more
    assert counted_qkv - counted_none == planned_qkv - planned_none
    assert (planned_qkv > planned_none) == (micro_batch == 1)
