"""Bytes that each rank needs, by what for and in which phase of a step, counted from the run's numbers.

What a rank keeps is counted to the byte: its parameters (`engine.plan.holdings`), gradients and optimizer state, and
what autograd saves of each micro-batch that waits (`engine.plan.saved`). What comes and goes is `engine.plan.passing`'s
business, and reckoned from above. What no count covers, such as what an allocator loses between blocks, is `MARGIN`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from engine.config import Lora, ModelShape, Operation, Parallel, Recompute, RunConfig
from engine.plan import budget, passing
from engine.plan.holdings import Holdings, holdings
from engine.plan.recompute import ELEMENTS, FP32, Setting
from engine.plan.saved import Layers, by_pass
from engine.plan.stages import Stage, stages
from engine.plan.turns import most_in_flight, room

MARGIN = 0.10
"""Share of a device's memory left to the allocator and the runtime."""

Phase = Literal["steady", "forward", "backward", "optimizer", "checkpoint"]
"""steady: between two steps; forward, backward: when most is held in either; optimizer: while weights are updated;
checkpoint: the highest of these, and beside it what a checkpoint is written from while training goes on."""
PHASES: tuple[Phase, ...] = get_args(Phase)
Item = Literal[
    "parameters",
    "adapters",
    "gradients",
    "optimizer",
    "activations",
    "recomputed",
    "logits",
    "gathered",
    "pipeline",
    "working",
    "batches",
    "reference",
    "snapshot",
]
"""parameters, adapters: weights in the training's precision; gradients: in fp32, and the replica's share of their sum;
optimizer: masters and two moments, in fp32; activations: what is saved for backward, of all micro-batches that wait;
recomputed: what one layer has besides while what it dropped is made again; logits: of the loss's chunk, with what is
made of them; gathered: what arrives from other ranks (tokens under sequence parallelism, keys and values of context
ranks, shared weights); pipeline: what is sent, and what is received ahead; working: gradients of activations and of
weights on their way; batches: ids of a step; reference: what DPO has of each answer; snapshot: what a checkpoint is
written from, where that lies in the same memory."""
ITEMS: tuple[Item, ...] = get_args(Item)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank of a pipeline. Items that it has none of are left out of a phase."""

    phases: Mapping[Phase, Mapping[Item, int]]
    stage: int = 0
    """Number of the rank in its pipeline."""
    replayed: frozenset[Operation] = field(default_factory=frozenset)
    """The operations that it runs again in backward."""

    @cached_property
    def peak(self) -> Phase:
        """The phase in which it needs most; the first of equals."""
        return max(self.phases, key=self.of_phase)

    @property
    def total(self) -> int:
        """Bytes in that phase."""
        return self.of_phase(self.peak)

    def of_phase(self, phase: Phase) -> int:
        """Bytes of all items in a phase."""
        return sum(self.phases[phase].values())

    def of(self, item: Item, phase: Phase | None = None) -> int:
        """Bytes of an item, in a phase or in that which needs most."""
        return self.phases[phase or self.peak].get(item, 0)

    def itemised(self) -> dict[str, int]:
        """Each item of the phase that needs most and their total, for a plan that is stored."""
        return {**{item: self.of(item) for item in ITEMS}, "total": self.total}

    def by_phase(self) -> dict[str, int]:
        """The total of each phase, for a plan that is stored."""
        return {phase: self.of_phase(phase) for phase in self.phases}

    @property
    def largest(self) -> Item:
        """The item that takes most, in the phase that needs most."""
        items = self.phases[self.peak]
        return max(items, key=items.__getitem__)

    @property
    def margin(self) -> int:
        """Bytes to be left free beside the total, on a device that is just large enough."""
        return margin_beside(self.total)

    def fits(self, device_bytes: int) -> bool:
        """Whether a device of this size has room, with its margin."""
        return self.total <= usable(device_bytes)


def usable(device_bytes: int) -> int:
    """What of a device's memory a plan may fill."""
    return int(device_bytes * (1 - MARGIN))


def margin_beside(total: int) -> int:
    """Bytes that make `total` just fit."""
    return int(total * MARGIN / (1 - MARGIN))


# Weights


def parameters(shape: ModelShape) -> int:
    """Weights of the whole model, each counted once."""
    return holdings(shape).elements()


def adapter_parameters(shape: ModelShape, lora: Lora) -> int:
    """Weights of the adapters."""
    return holdings(shape, lora).elements(is_adapter=True)


@dataclass(frozen=True)
class States:
    """Bytes of one rank that do not depend on how many tokens there are."""

    parameters: int
    """Frozen or trained, adapters left out; of a replica that shares weights out, its share of what is frozen."""
    adapters: int
    gradients: int
    optimizer: int

    def items(self) -> dict[Item, int]:
        return {
            "parameters": self.parameters,
            "adapters": self.adapters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
        }


def states_per_rank(setting: Setting, own: Sequence[Stage]) -> States:
    """Weights, gradients, masters and moments, between steps, of the first replica of a rank with these stages."""
    parallel, lora, element = setting.parallel, setting.lora, setting.element
    held = holdings(setting.shape, lora, tensor=parallel.tensor, stages=own)
    replicas = parallel.data * parallel.context
    if parallel.is_shared_out:
        trained = sum(count * FP32 * 3 * holding.rows_of(replicas) for holding, count in held if holding.trains)
        frozen = sum(count * element * holding.rows_of(replicas) for holding, count in held if not holding.trains)
        # The weights that train are masters; those of the model's precision are gathered when they are used.
        return States(parameters=frozen, adapters=0, gradients=0, optimizer=trained)
    shards = replicas if parallel.shard_optimizer else 1
    size = held.buffer(shards)
    share = size // shards
    # fp32 weights are their own masters; two moments always.
    kept = 2 if element == FP32 else 3
    frozen = held.elements(trains=False) * element
    return States(
        parameters=frozen + (size * element if lora is None else 0),
        adapters=0 if lora is None else size * element,
        # Where they are shared out, the sum of the replica's share stands beside.
        gradients=size * FP32 + (share * FP32 if shards > 1 else 0),
        optimizer=share * FP32 * kept,
    )


def snapshot_per_rank(setting: Setting, own: Sequence[Stage]) -> int:
    """Master and two moments, in fp32, of the weights that a rank with these stages saves: its share where the replicas
    share their state out, else all that train, which the first of them saves for all.
    """
    parallel = setting.parallel
    held = holdings(setting.shape, setting.lora, tensor=parallel.tensor, stages=own)
    shared = parallel.shard_optimizer or parallel.is_shared_out
    return 3 * FP32 * -(-held.elements(trains=True) // (parallel.data * parallel.context if shared else 1))


# A rank


def estimate(
    shape: ModelShape,
    *,
    seq_len: int,
    micro_batch: int,
    precision: str,
    parallel: Parallel,
    recompute: Recompute,
    lora: Lora | None = None,
    micro_batches: int = 1,
    packed: bool = False,
    on_host: bool = False,
    compares: bool = False,
) -> Memory:
    """What the rank that needs most needs.

    `micro_batches` are those of a step, of one replica; they matter in a pipeline, where several wait for their
    backward pass. `packed`: rows hold several documents. `on_host`: the ranks train on CPUs, so that what a checkpoint
    is written from lies in the same memory. `compares`: answers in pairs, under DPO. Raises ValueError where
    `recompute` sets a budget that is too small.
    """
    setting = Setting(
        shape, seq_len, micro_batch, ELEMENTS[precision], parallel, lora, packed=packed, on_cuda=not on_host
    )
    needs = by_rank(setting, recompute, micro_batches=micro_batches, compares=compares, alike=True)
    return max(needs, key=lambda memory: memory.total)


def of_run(run: RunConfig, shape: ModelShape) -> list[Memory]:
    """What each pipeline rank of a run needs. Raises ValueError as `estimate` does."""
    training = run.training
    return by_rank(
        Setting.of(run, shape),
        run.recompute,
        micro_batches=training.global_batch // (training.micro_batch * run.parallel.data),
        compares=run.objective == "dpo",
    )


def by_rank(
    setting: Setting, recompute: Recompute, *, micro_batches: int, compares: bool = False, alike: bool = False
) -> list[Memory]:
    """What each pipeline rank needs, in order. `alike`: of ranks whose stages are alike, the first alone.

    The first needs most of such, for it has most micro-batches waiting.
    """
    parallel, shape = setting.parallel, setting.shape
    virtual = stages(shape, parallel)
    telling: dict[tuple[tuple[int, bool, bool], ...], int] = {}
    for rank in range(parallel.pipeline):
        own = virtual[rank :: parallel.pipeline]
        telling.setdefault(tuple((len(stage.layers), stage.first, stage.last) for stage in own), rank)
    layers = Layers(setting)
    return [
        Rank(layers, virtual[rank :: parallel.pipeline], rank, micro_batches, compares).memory(recompute)
        for rank in (telling.values() if alike else range(parallel.pipeline))
    ]


def room_for_activations(setting: Setting, *, micro_batches: int, device_bytes: int, compares: bool = False) -> int:
    """Bytes that a budget for activations may have, so that no rank needs more than a device has, its margin left free.

    0 or less where all else needs more by itself. `engine.plan.budget` then chooses for each stage.
    """
    parallel = setting.parallel
    virtual, layers = stages(setting.shape, parallel), Layers(setting)
    beside = []
    for number in range(parallel.pipeline):
        rank = Rank(layers, virtual[number :: parallel.pipeline], number, micro_batches, compares)
        for operations in (frozenset[Operation](), frozenset[Operation]({"layer"})):
            needs = rank.with_operations(operations)
            ends = rank.saved(operations) - rank.layers_waiting * layers.keep(operations)
            for phase, items in needs.phases.items():
                budgeted = items.get("activations", 0) + items.get("recomputed", 0)
                beside.append(needs.of_phase(phase) - budgeted + max(0, ends))
    return usable(device_bytes) - max(beside)


@dataclass(frozen=True)
class Rank:
    """A rank of a pipeline, and how many micro-batches go through it in a step."""

    layers: Layers
    stages: Sequence[Stage]
    """Its own."""
    number: int
    micro_batches: int
    compares: bool = False

    @property
    def setting(self) -> Setting:
        return self.layers.setting

    @property
    def layers_waiting(self) -> int:
        """Layers, of all micro-batches, that wait for their backward pass when the most do."""
        layers = [len(stage.layers) for stage in self.stages]
        return sum(layers[chunk] * count for chunk, count in self._in_flight(layers).items())

    def _in_flight(self, weights: Sequence[int]) -> dict[int, int]:
        """Micro-batches of each stage that wait when what waits weighs most."""
        parallel = self.setting.parallel
        return most_in_flight(
            ranks=parallel.pipeline,
            rank=self.number,
            chunks=parallel.virtual,
            micro_batches=self.micro_batches,
            layers=weights,
        )

    def saved(self, operations: frozenset[Operation]) -> int:
        """Bytes that autograd holds for backward when it holds most, all micro-batches together."""
        each = [by_pass(self.layers, stage, operations).total for stage in self.stages]
        return sum(each[chunk] * count for chunk, count in self._in_flight(each).items())

    def memory(self, recompute: Recompute) -> Memory:
        """Raises ValueError where `recompute` sets a budget that is too small."""
        operations = budget.chosen(recompute, self.setting, layers=self.layers_waiting)
        return self.with_operations(operations)

    def with_operations(self, operations: frozenset[Operation]) -> Memory:
        """What it needs when it replays these."""
        setting, parallel = self.setting, self.setting.parallel
        states = states_per_rank(setting, self.stages)
        held = holdings(setting.shape, setting.lora, tensor=parallel.tensor, stages=self.stages)
        of_stages = [stage.layers for stage in self.stages]
        steady = states.items() | {"batches": passing.batches(setting, micro_batches=self.micro_batches)}
        waiting: dict[Item, int] = {"activations": self.saved(operations), "pipeline": self._on_the_way()}
        if self.compares and self.stages[-1].last:
            waiting["reference"] = passing.reference(setting)
        shared = _shared_out(setting, held)
        logits = passing.logits(setting, trains=setting.lora is None) if self.stages[-1].last else 0
        forward = {
            **steady,
            **waiting,
            "logits": logits,
            "gathered": max(passing.gathered(setting, backward=False), passing.loss_gathered(setting) if logits else 0)
            + shared.weights,
            # The loss comes behind the layers.
            "working": 0 if logits else passing.forward(setting),
        }
        again = self.layers.keep(frozenset()) - self.layers.keep(operations) if any(map(len, of_stages)) else 0
        backward = {
            **steady,
            **waiting,
            "recomputed": again,
            "gathered": passing.gathered(setting, backward=True) + shared.weights,
            "gradients": states.gradients + shared.gradients,
            "working": passing.backward(setting),
        }
        optimizer = steady | {"gathered": shared.after, "gradients": states.gradients + shared.summed}
        phases: dict[Phase, dict[Item, int]] = {
            "steady": _present(steady),
            "forward": _present(forward),
            "backward": _present(backward),
            "optimizer": _present(optimizer),
        }
        highest = max(phases.values(), key=lambda items: sum(items.values()))
        snapshot: dict[Item, int] = {"snapshot": snapshot_per_rank(setting, self.stages)}
        # Of a device the copy lies in the host's memory.
        phases["checkpoint"] = phases["steady"] if setting.on_cuda else _present(highest | snapshot)
        return Memory(phases, self.number, operations)

    def _on_the_way(self) -> int:
        """Hidden states and gradients that are kept until a neighbour has them, and those received ahead."""
        parallel, setting = self.setting.parallel, self.setting
        if parallel.pipeline == 1:
            return 0
        behind = room(ranks=parallel.pipeline, chunks=parallel.virtual, micro_batches=self.micro_batches)
        ways = (not all(stage.last for stage in self.stages)) + (not all(stage.first for stage in self.stages))
        one = setting.element * setting.own_tokens * setting.shape.hidden_size
        # What the turn at hand has received as a gradient, and what the next will need.
        return one * (ways * behind + 2)


@dataclass(frozen=True)
class _SharedOut:
    """What replicas that share gradients or weights out hold beyond their shares."""

    weights: int = 0
    """Gathered."""
    gradients: int = 0
    """Arising, and summed, while backward is at its last."""
    summed: int = 0
    """Their share, until weights are updated."""
    after: int = 0
    """Of the weights, gathered still when they are updated."""


def _shared_out(setting: Setting, held: Holdings) -> _SharedOut:
    parallel, element = setting.parallel, setting.element
    if not parallel.is_shared_out:
        return _SharedOut()
    replicas = parallel.data * parallel.context
    layer = sum(holding.elements for holding in held.layer)
    ends = sum(holding.elements for holding in held.ends)
    layer_trains = sum(holding.elements for holding in held.layer if holding.trains)
    ends_train = sum(holding.elements for holding in held.ends if holding.trains)
    # What is no layer's is whole throughout; a layer is gathered while the one before it runs.
    gathered = (ends + (min(2, held.layers) if parallel.shard_weights else held.layers) * layer) * element
    summed = sum(count * FP32 * holding.rows_of(replicas) for holding, count in held if holding.trains)
    # Of one layer at a time, and once more in fp32 on their way to be summed.
    arising = (ends_train + min(1, held.layers) * layer_trains) * (element + FP32)
    return _SharedOut(gathered, arising + summed, summed, ends * element if parallel.shard_weights else gathered)


def _present(items: Mapping[Item, int]) -> dict[Item, int]:
    return {item: items[item] for item in ITEMS if items.get(item)}
