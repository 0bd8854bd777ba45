"""What a rank holds is what the plan says: to the byte what it keeps, within a bound what comes and goes.

Runs are drawn at random, from every family, kind of layout, way to replay and kind of row. What is counted is what the
engine's own parts hold; transients are storages that torch's operators make, and neither what is within a kernel nor
what gloo copies.
"""

from __future__ import annotations

from random import Random
from typing import Any, get_args

import pytest
import torch

from engine.config import ModelShape, Operation, RunConfig
from engine.plan import memory
from engine.plan.memory import Item
from tests.engine.train import runs
from tests.engine.train.held import Held, held
from tests.worlds import World

EXACT: dict[str, Item] = {"parameters": "parameters", "adapters": "adapters", "gradients": "gradients",
                          "optimizer": "optimizer", "saved": "activations"}  # fmt: skip
"""What is measured, and what the plan calls it."""
LEAST, MOST = 0.94, 1.4
"""Planned over measured, of all that a rank holds when it holds most: these nets are so small that transients are a
tenth of it and more. Replicas that share gradients or weights out are planned for from further above."""
MOST_SHARED_OUT = 1.6

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor": 2},
    {"tensor": 2, "sequence": True},
    {"context": 2},
    {"data": 2},
    {"data": 2, "shard_optimizer": False},
    {"data": 2, "shard_gradients": True},
    {"data": 2, "shard_weights": True},
    {"pipeline": 2},
    {"pipeline": 2, "virtual": 2},
    {"tensor": 4, "sequence": True},
    {"tensor": 2, "sequence": True, "pipeline": 2},
    {"tensor": 2, "context": 2, "sequence": True},
    {"pipeline": 4},
    {"pipeline": 2, "virtual": 3, "data": 2},
    {"context": 2, "data": 2},
    {"pipeline": 2, "context": 2},
    {"tensor": 2, "sequence": True, "data": 2, "shard_weights": True},
]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "bloom")
OPERATIONS: tuple[Operation, ...] = get_args(Operation)[:-1]


def configuration(number: int) -> tuple[RunConfig, ModelShape]:
    """Drawn from its number."""
    random = Random(number)
    layout = dict(LAYOUTS[number % len(LAYOUTS)])
    architecture = FAMILIES[number // len(LAYOUTS) % len(FAMILIES)] if number % 3 else random.choice(FAMILIES)
    least = layout.get("pipeline", 1) * layout.get("virtual", 1)
    layers = max(2, least) + random.randint(0, 1)
    stages = layout.get("pipeline", 1) * layout.get("virtual", 1)
    if stages > 1 and random.random() < 0.6:
        cuts = sorted(random.sample(range(1, layers), stages - 1))
        layout["stages"] = [after - before for before, after in zip([0, *cuts], [*cuts, layers], strict=True)]
    gpt = architecture in ("gpt2", "bloom")
    heads = random.choice((4, 8))
    hidden = random.choice((32, 64))
    adapts = random.random() < 0.3
    seq_len = random.choice((16, 32))
    model: dict[str, Any] = {
        "architecture": architecture, "num_layers": layers, "hidden_size": hidden, "num_heads": heads,
        "num_kv_heads": heads if gpt else random.choice((1, 2, heads)),
        "head_dim": hidden // heads if gpt else random.choice((4, 8)),
        "ffn_hidden_size": 4 * hidden if gpt else random.choice((48, 96, 256)), "max_seq_len": 32,
        "vocab_size": random.choice((97, 261, 600)), "tie_embeddings": random.random() < 0.5,
        "attention_dropout": random.choice((0.0, 0.1)),
        "hidden_dropout": random.choice((0.0, 0.1)) if gpt else 0.0,
        "sliding_window": random.choice((None, 8)) if architecture in ("mistral", "qwen2", "qwen3") else None,
    }  # fmt: skip
    changes: dict[str, Any] = random.choice(({}, runs.COMPLETION, runs.PREFERENCE))
    micro_batch, data = random.choice((1, 2)), layout.get("data", 1)
    some = random.sample(OPERATIONS, random.randint(1, 4))
    recompute = random.choice(
        ({"mode": "none"}, {"mode": "full"}, {"mode": "selective"}, {"mode": "selective", "operations": some})
    )
    run = runs.config(
        model=model,
        data={**changes.get("data", {}), "seq_len": seq_len},
        objective=changes.get("objective", "pretrain"),
        training={
            "micro_batch": micro_batch, "global_batch": micro_batch * data * random.randint(1, 4),
            "precision": random.choice(("bf16", "fp32")),
        },
        parallel=layout,
        recompute=recompute,
    )  # fmt: skip
    shape = run.model
    assert shape is not None
    if not adapts:
        return run, shape
    lora = {"rank": random.choice((2, 4)), "dropout": random.choice((0.0, 0.2))}
    targets = random.choice((None, ("q", "down"), ("up",), ("k", "o")))
    # A base is read by nobody here.
    adapted = run.model_dump() | {"lora": {**lora, "targets": targets}, "base": "base", "model": None}
    return RunConfig.model_validate(adapted), shape


LOOKED_AT = 5
"""Of so many runs one is looked at in each operator, which takes twice the time of all else."""


def several(asked: list[tuple[int, RunConfig, ModelShape]]) -> list[Held]:
    return [held(run, shape, looks=number % LOOKED_AT == 0) for number, run, shape in asked]


def unlike_the_plan(request: pytest.FixtureRequest, numbers: range, ranks: int) -> list[Any]:
    """Number, stage, what, measured and planned, wherever they differ; all runs of so many ranks in one go."""
    asked = [
        (number, run, shape)
        for number in numbers
        for run, shape in [configuration(number)]
        if run.parallel.ranks == ranks
    ]
    if ranks == 1:
        told = [several(asked)]
    else:
        world: World = request.getfixturevalue(f"world{ranks}")
        told = world.run(several, asked, seconds=280)
    found = []
    for place, (number, run, shape) in enumerate(asked):
        found += differences(number, run, memory.of_run(run, shape), [rank[place] for rank in told])
    return found


def differences(number: int, run: RunConfig, planned: list[memory.Memory], measured: list[Held]) -> list[Any]:
    found: list[Any] = []
    of_a_stage = len(measured) // run.parallel.pipeline
    for stage, needs in enumerate(planned):
        ranks = measured[stage * of_a_stage : (stage + 1) * of_a_stage]
        for what, item in EXACT.items():
            plan = needs.of(item, "backward" if what == "saved" else "steady")
            # Context ranks see windows of different sizes, and the last of several replicas may have the smallest
            # share of a matrix's rows: the plan is for the one with most, and the others have what is near it.
            each = {getattr(rank, what) for rank in ranks}
            alike = not (run.parallel.is_shared_out or run.parallel.context > 1)
            if max(each) != plan or (alike and len(each) > 1):
                found.append((number, stage, what, each, plan))
        if ranks[0].peak is None:
            continue
        most = max(needs.of_phase(phase) for phase in ("forward", "backward", "optimizer"))  # type: ignore[arg-type]
        real = max(rank.parameters + rank.adapters + rank.gradients + rank.optimizer + rank.batches + (rank.peak or 0)
                   for rank in ranks)  # fmt: skip
        if not LEAST <= most / real <= (MOST_SHARED_OUT if run.parallel.is_shared_out else MOST):
            found.append((number, stage, "peak", real, most))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fifty_runs_drawn_at_random_hold_what_the_plan_says(request: pytest.FixtureRequest, ranks: int) -> None:
    assert unlike_the_plan(request, range(50), ranks) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("first", range(50, 450, 50))
def test_hundreds_of_runs_hold_what_the_plan_says(request: pytest.FixtureRequest, first: int, ranks: int) -> None:
    assert unlike_the_plan(request, range(first, first + 50), ranks) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, whose allocator says what it gave out")
@pytest.mark.parametrize(
    "changes", [{}, {"recompute": {"mode": "full"}}, runs.COMPLETION], ids=["core", "full", "packed"]
)
def test_a_gpu_gives_out_what_the_plan_says_within_a_twentieth(changes: dict[str, Any]) -> None:
    # Large enough that the runtime's own buffers are little beside it.
    model = {"num_layers": 8, "hidden_size": 1024, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64,
             "ffn_hidden_size": 2816, "max_seq_len": 2048, "vocab_size": 32000}  # fmt: skip
    given = {key: value for key, value in changes.items() if key != "data"}
    run = runs.config(
        model=model, device="cuda", data=changes.get("data", {}) | {"seq_len": 2048},
        training={"micro_batch": 2, "global_batch": 4, "precision": "bf16"}, **given,
    )  # fmt: skip
    assert run.model is not None
    (needs,) = memory.of_run(run, run.model)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    held(run, run.model)
    assert needs.total == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.05)
