"""Which operations each stage of a pipeline replays so that its activations fit a budget, at least cost.

What each operation is worth is `engine.plan.recompute`'s; how many micro-batches wait, `engine.plan.turns`' business.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import combinations

from engine.config import ModelShape, Operation, Parallel, Recompute, RunConfig
from engine.plan.recompute import OPERATIONS, Layer, Setting, cost
from engine.plan.stages import chunks, stages
from engine.plan.turns import most_in_flight

GIB = 2**30


def replayed(run: RunConfig, shape: ModelShape, *, rank: int = 0) -> frozenset[Operation]:
    """The operations that pipeline rank `rank` of a run replays. Raises ValueError as `replayed_by_rank` does."""
    return replayed_by_rank(run, shape)[rank]


def replayed_by_rank(run: RunConfig, shape: ModelShape) -> list[frozenset[Operation]]:
    """The operations that each pipeline rank of a run replays. Raises ValueError where the budget is too small for one,
    with what would do for each.
    """
    parallel = run.parallel
    if run.recompute.budget_gib is None:
        return [run.recompute.replayed] * parallel.pipeline
    micro_batches = run.training.global_batch // (run.training.micro_batch * parallel.data)
    layers = [waiting(shape, parallel, rank=rank, micro_batches=micro_batches) for rank in range(parallel.pipeline)]
    setting = Setting.of(run, shape)
    # The one that holds most is asked first, so that a refusal is the same on every rank.
    chosen(run.recompute, setting, layers=max(layers))
    return [chosen(run.recompute, setting, layers=count) for count in layers]


def replayed_by_layer(run: RunConfig, shape: ModelShape) -> list[frozenset[Operation]]:
    """What each layer of a run replays, in order. Raises ValueError as `replayed_by_rank` does."""
    of_rank = replayed_by_rank(run, shape)
    return [
        of_rank[number % run.parallel.pipeline]
        for number, stage in enumerate(stages(shape, run.parallel))
        for _ in stage.layers
    ]


def chosen(recompute: Recompute, setting: Setting, *, layers: int) -> frozenset[Operation]:
    """What `recompute` names, or, under a budget, the cheapest set that fits it.

    `layers` are those of all micro-batches that wait for their backward pass. Raises ValueError as `cheapest` does.
    """
    if recompute.budget_gib is None:
        return recompute.replayed
    return cheapest(setting, layers=layers, budget=int(recompute.budget_gib * GIB))


def cheapest(setting: Setting, *, layers: int, budget: int) -> frozenset[Operation]:
    """The operations to replay so that activations fit `budget` bytes with as few FLOPs added as can be, by trying all.

    Raises ValueError with the smallest budget that would do.
    """
    least = min(activations(setting, some, layers=layers) for some in choices(setting))
    if least > budget:
        raise ValueError(
            f"recompute.budget_gib={budget / GIB:.3g} is too little: activations take {least / GIB:.3g} GiB however "
            f"much is recomputed; set it to {_rounded_up(least / GIB)}, or lower training.micro_batch or data.seq_len"
        )
    fitting = [some for some in choices(setting) if activations(setting, some, layers=layers) <= budget]

    def price(some: frozenset[Operation]) -> tuple[int, int, int]:
        costs = cost(setting, some)
        return costs.flops, len(some), costs.saved

    return min(fitting, key=price)


@dataclass(frozen=True)
class Choice:
    """What replaying these operations takes and costs, in all layers that wait."""

    operations: frozenset[Operation]
    bytes: int
    """Of activations, with what one layer has besides while what it dropped is made again."""
    flops: int
    """Done once more."""
    seconds: float
    """In which they are done, about."""


def frontier(setting: Setting, *, layers: int, flops_per_second: float, bytes_per_second: float) -> list[Choice]:
    """The choices worth making, from what keeps all to what keeps least: bytes fall, FLOPs and seconds rise.

    Each other choice takes more bytes than one of these, or as many, and is in FLOPs or in seconds no better.
    `layers` are those of all micro-batches that wait for their backward pass.
    """
    found: list[Choice] = []
    for some in choices(setting):
        each = cost(setting, some)
        seconds = each.products / flops_per_second + each.traffic / bytes_per_second
        bytes_ = activations(setting, some, layers=layers)
        found.append(Choice(some, bytes_, layers * each.flops, layers * seconds))
    best: list[Choice] = []
    for choice in sorted(found, key=lambda one: (one.bytes, one.flops, one.seconds, len(one.operations))):
        # Whatever keeps more has to cost less.
        if not best or (choice.flops < best[-1].flops and choice.seconds < best[-1].seconds):
            best.append(choice)
    return best[::-1]


def choices(setting: Setting) -> Iterator[frozenset[Operation]]:
    """Every set of operations that this layer has, and the whole layer."""
    has = {recipe.operation for recipe in Layer(setting).recipes.values()} | {"attention_core"}
    operations = [operation for operation in OPERATIONS if operation in has]
    for size in range(len(operations) + 1):
        yield from map(frozenset, combinations(operations, size))
    yield frozenset({"layer"})


def activations(setting: Setting, operations: Collection[Operation], *, layers: int) -> int:
    """Bytes that `layers` keep, and what one of them has besides while its backward pass makes again what it dropped.

    `layers` are those of all micro-batches that wait for their backward pass.
    """
    saved = cost(setting, operations).saved
    return layers * saved + (cost(setting, ()).saved - saved if layers else 0)


def waiting(shape: ModelShape, parallel: Parallel, *, rank: int, micro_batches: int) -> int:
    """Layers times micro-batches that wait for their backward pass on pipeline rank `rank`, when the most do."""
    layers = [len(stage.layers) for stage in chunks(shape, parallel, rank=rank)]
    in_flight = most_in_flight(
        ranks=parallel.pipeline, rank=rank, chunks=parallel.virtual, micro_batches=micro_batches, layers=layers
    )
    return sum(layers[chunk] * count for chunk, count in in_flight.items())


def _rounded_up(number: float) -> str:
    """To three digits, never down."""
    rounded = float(f"{number:.3g}")
    return f"{rounded if rounded >= number else float(f'{number * 1.005:.3g}'):g}"
