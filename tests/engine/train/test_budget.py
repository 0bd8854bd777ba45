"""The operations that a budget buys: the cheapest that fit, for every stage, or the smallest budget that would do."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from pathlib import Path
from random import Random

import pytest

from engine.config import ModelShape, Operation, Parallel, Recompute
from engine.plan import budget
from engine.plan.budget import GIB
from engine.plan.recompute import OPERATIONS, Setting, cost
from tests.engine.train import runs

SEVEN_B = ModelShape(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=32, head_dim=128, ffn_hidden_size=11008,
    max_seq_len=4096, vocab_size=32000,
)  # fmt: skip
ROW = Setting(SEVEN_B, seq_len=4096, micro_batch=1, element=2)


def kept(*operations: Operation) -> int:
    return budget.activations(ROW, operations, layers=32)


def bought(size: int) -> set[Operation]:
    return set(budget.cheapest(ROW, layers=32, budget=size))


def test_a_budget_with_room_for_all_replays_nothing() -> None:
    assert bought(kept()) == set()


def test_what_repeats_no_product_is_bought_first() -> None:
    assert bought(kept() - 1) in ({"norm"}, {"activation"})
    assert bought(kept("norm", "activation")) == {"norm", "activation"}


def test_products_are_repeated_only_when_nothing_else_is_left() -> None:
    assert bought(kept("norm", "activation") - GIB) == {"norm", "activation", "qkv"}
    assert bought(kept("norm", "activation", "up_projection", "qkv")) == {
        "norm", "activation", "up_projection", "qkv",
    }  # fmt: skip
    assert bought(kept("layer")) == {"layer"}


def test_no_other_set_that_fits_costs_less() -> None:
    for size in range(kept("layer"), kept(), GIB):
        best = cost(ROW, bought(size)).flops
        assert kept(*bought(size)) <= size
        assert all(cost(ROW, some).flops >= best for some in budget.choices(ROW) if kept(*some) <= size)


def settings(random: Random) -> Setting:
    """A layer, drawn."""
    heads = random.choice((8, 16, 32))
    gpt = random.random() < 0.5
    shape = SEVEN_B.model_copy(
        update={
            "architecture": "gpt2" if gpt else "llama", "num_heads": heads, "num_kv_heads": heads if gpt else 8,
            "head_dim": 4096 // heads, "ffn_hidden_size": random.choice((4096, 11008, 16384)),
            "attention_dropout": random.choice((0.0, 0.1)), "hidden_dropout": random.choice((0.0, 0.1)) * gpt,
        }
    )  # fmt: skip
    tensor = random.choice((1, 2, 8))
    parallel = Parallel(tensor=tensor, sequence=tensor > 1)
    return Setting(shape, random.choice((512, 2048, 4096)), random.choice((1, 2)), 2, parallel)


@pytest.mark.parametrize("seed", range(8))
def test_no_set_of_operations_whatsoever_fits_and_costs_less(seed: int) -> None:
    random = Random(seed)
    setting, layers = settings(random), random.randint(1, 200)
    every = [set(some) for size in range(len(OPERATIONS) + 1) for some in combinations(OPERATIONS, size)]
    held = {frozenset(some): (budget.activations(setting, some, layers=layers), cost(setting, some)) for some in every}
    least, most = min(size for size, _ in held.values()), max(size for size, _ in held.values())
    for size in [least, most, *(random.randint(least, most) for _ in range(12))]:
        best = budget.cheapest(setting, layers=layers, budget=size)
        assert held[best][0] <= size
        assert held[best][1].flops == min(one.flops for needs, one in held.values() if needs <= size)


@pytest.mark.parametrize("seed", range(4))
def test_the_frontier_is_monotone_and_nothing_off_it_is_better(seed: int) -> None:
    random = Random(seed)
    setting, layers = settings(random), random.randint(1, 200)
    best = budget.frontier(setting, layers=layers, flops_per_second=1e14, bytes_per_second=1e12)
    assert best[0].operations == frozenset()
    assert best[-1].bytes == min(budget.activations(setting, some, layers=layers) for some in budget.choices(setting))
    for more, less in pairwise(best):
        assert more.bytes > less.bytes
        assert more.flops < less.flops
        assert more.seconds < less.seconds
    for some in budget.choices(setting):
        size, flops = budget.activations(setting, some, layers=layers), layers * cost(setting, some).flops
        each = cost(setting, some)
        seconds = layers * (each.products / 1e14 + each.traffic / 1e12)
        assert not any(size < one.bytes and flops <= one.flops and seconds <= one.seconds for one in best)


def test_what_each_stage_would_choose_alone_is_best_for_all_of_them_together() -> None:
    # All choices of two stages that hold 24 and 8 layers' worth, each within the same room.
    size = kept("norm", "activation") * 3 // 4
    alone = [budget.cheapest(ROW, layers=count, budget=size) for count in (32, 16)]
    some = [list(budget.choices(ROW)) for _ in range(2)]
    together = min(
        (
            (32 * cost(ROW, first).flops + 16 * cost(ROW, second).flops, first, second)
            for first, second in product(*some)
            if budget.activations(ROW, first, layers=32) <= size and budget.activations(ROW, second, layers=16) <= size
        ),
        key=lambda found: found[0],
    )
    assert together[0] == 32 * cost(ROW, alone[0]).flops + 16 * cost(ROW, alone[1]).flops
    assert alone[1] == frozenset()


def test_a_budget_that_is_too_small_is_refused_with_the_smallest_that_would_do() -> None:
    # 32 inputs of 4096 x 4096 x 2 bytes are 1 GiB; while one layer is made again, all of it is there.
    with pytest.raises(ValueError, match=r"budget_gib=1 is too little: .* set it to ([\d.]+)") as refusal:
        bought(GIB)
    enough = float(str(refusal.value).split("set it to ")[1].split(",")[0])
    assert bought(int(enough * GIB)) == {"layer"}
    assert enough * GIB / kept("layer") == pytest.approx(1, abs=0.01)
    with pytest.raises(ValueError, match="too little"):
        bought(int(0.99 * kept("layer")))


def test_earlier_stages_keep_more_micro_batches() -> None:
    # Korthikanti et al. 2022, equation 5: the first stage keeps as much as the whole model's layers do.
    parallel = Parallel(pipeline=4, stages=(8, 8, 8, 8))
    waiting = [budget.waiting(SEVEN_B, parallel, rank=rank, micro_batches=8) for rank in range(4)]
    assert waiting == [32, 24, 16, 8]


def test_what_waits_is_counted_when_it_has_most_layers_and_not_when_it_is_most_passes() -> None:
    # The first of two ranks goes forward through chunk 0, 0, 1, 1, 0, and then back and forward in turns: back through
    # 1 and forward through 0, so that four times the nine layers of chunk 0 wait, and once the one of chunk 1.
    shape = SEVEN_B.model_copy(update={"num_layers": 12})
    parallel = Parallel(pipeline=2, virtual=2, stages=(9, 1, 1, 1))
    assert budget.waiting(shape, parallel, rank=0, micro_batches=4) == 4 * 9 + 1


def test_each_stage_of_a_run_replays_what_fits_it() -> None:
    shape = ModelShape.model_validate(runs.SHAPE | {"num_layers": 4})
    run = runs.config(
        model=runs.SHAPE | {"num_layers": 4},
        parallel={"pipeline": 2, "stages": [2, 2]},
        recompute={"mode": "budget", "budget_gib": 1.0},
    )
    layer = budget.activations(Setting.of(run, shape), (), layers=1)
    # Two layers and two micro-batches wait at the first stage, two and one at the second, which all of fit.
    tight = run.model_copy(update={"recompute": Recompute(mode="budget", budget_gib=2 * layer / GIB)})
    first, second = (budget.replayed(tight, shape, rank=rank) for rank in range(2))
    assert second == set()
    assert first
    assert budget.replayed_by_layer(tight, shape) == [first, first, second, second]


def test_a_budget_is_refused_on_every_stage_with_what_would_do_for_the_one_that_holds_most() -> None:
    shape = ModelShape.model_validate(runs.SHAPE | {"num_layers": 4})
    run = runs.config(
        model=runs.SHAPE | {"num_layers": 4},
        parallel={"pipeline": 2, "stages": [1, 3]},
        training={"global_batch": 1},
        recompute={"mode": "budget", "budget_gib": 1.0},
    )
    # One micro-batch: the second stage's three layers need most, and the first has room for its one.
    enough = budget.activations(Setting.of(run, shape), {"layer"}, layers=2) / GIB
    tight = run.model_copy(update={"recompute": Recompute(mode="budget", budget_gib=enough)})
    said = []
    for rank in range(2):
        with pytest.raises(ValueError, match=r"is too little") as refusal:
            budget.replayed(tight, shape, rank=rank)
        said.append(str(refusal.value))
    assert said[0] == said[1]
    wide = float(said[0].split("set it to ")[1].split(",")[0])
    bought = run.model_copy(update={"recompute": Recompute(mode="budget", budget_gib=wide)})
    assert budget.replayed(bought, shape, rank=1) == {"layer"}


def test_a_run_under_a_budget_has_the_losses_of_one_that_keeps_everything(tmp_path: Path) -> None:
    run = runs.config(training={"steps": 2})
    shape = run.model
    assert shape is not None
    setting = Setting.of(run, shape)
    tight = {"mode": "budget", "budget_gib": budget.activations(setting, {"norm", "up_projection"}, layers=2) / GIB}
    budgeted = runs.config(training={"steps": 2}, recompute=tight)
    assert budget.replayed(budgeted, shape) > {"norm"}
    (tmp_path / "all").mkdir()
    (tmp_path / "tight").mkdir()
    kept = runs.events_of(tmp_path / "all", runs.config(training={"steps": 2}, recompute={"mode": "none"}))
    assert runs.losses(runs.events_of(tmp_path / "tight", budgeted)) == runs.losses(kept)


@pytest.mark.parametrize(
    ("recompute", "complaint"),
    [
        ({"mode": "full", "operations": ["norm"]}, 'belong to mode "selective"'),
        ({"mode": "budget"}, 'what mode "budget" needs'),
        ({"mode": "selective", "budget_gib": 1}, 'belongs to mode "budget"'),
        ({"mode": "selective", "operations": []}, "at least 1 item"),
        ({"mode": "budget", "budget_gib": 0}, "greater than 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(recompute: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Recompute.model_validate(recompute)
