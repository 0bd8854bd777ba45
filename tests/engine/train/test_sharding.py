"""Weights and gradients shared out among replicas, against one rank and against the flat optimizer."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from engine import checkpoint, gather, weights
from engine.batch import IGNORE, Batch
from engine.checkpoint import Facts
from engine.config import Lora, Parallel, Training
from engine.makings import ready_optimizer
from engine.mesh import alone, build
from engine.model import Decoder
from engine.optimizer import AnyOptimizer, Optimizer
from tests.engine.net import nets
from tests.engine.train.toy import save
from tests.worlds import World

ROWS, MICRO, STEPS = 12, 2, 4
TRAINING = Training(steps=STEPS, global_batch=ROWS, micro_batch=MICRO, lr=1e-3, precision="fp32")
FACTS = Facts(step=STEPS, tokens=96, rows=12, seed=7)


@dataclass(frozen=True)
class Case:
    """What is trained, in which layout."""

    parallel: Parallel
    shape: dict[str, Any] = field(default_factory=dict)
    by: Lora | None = None
    more: dict[str, Any] = field(default_factory=dict)
    training: Training = TRAINING

    def model(self) -> Decoder:
        mesh = alone(nets.CPU) if self.parallel.ranks == 1 else build(self.parallel)
        model = nets.uneven(nets.decoder(nets.shape(**self.shape), grid=mesh, **self.more))
        return (model if self.by is None else nets.adapted(model, self.by)).train()

    def on(self, **parallel: Any) -> Case:
        return replace(self, parallel=Parallel(**parallel))


@dataclass(frozen=True)
class Seen:
    """What a rank saw: global tensors are the same on each."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    """Of the first step."""
    weights: dict[str, Tensor]


def rows(step: int, *, first: int, count: int) -> Batch:
    """A run of a step's global batch, whose last quarter has no label, and whose other rows have some or other."""
    batch = nets.batch(rows=ROWS, seed=step, packed=True)
    batch.labels_BT[-ROWS // 4 :] = IGNORE
    of = slice(first, first + count)
    return Batch(
        batch.tokens_BT[of], batch.labels_BT[of], batch.positions_BT[of], batch.documents_BT[of],
        rows_B=torch.arange(ROWS)[of], step=step,
    )  # fmt: skip


def labels(step: int) -> int:
    return int((rows(step, first=0, count=ROWS).labels_BT != IGNORE).sum())


def take_step(model: Decoder, optimizer: AnyOptimizer, step: int) -> tuple[float, float, dict[str, Tensor]]:
    """Mean loss, norm and gradients of a step, whose rows a replica takes two at a time, a last one alone."""
    mesh = model.mesh
    each = ROWS // mesh.size("data")
    begin = mesh.rank("data") * each
    loss = torch.zeros(())
    for first in range(begin, begin + each, MICRO):
        batch = rows(step, first=first, count=min(MICRO, begin + each - first))
        part = model.loss(batch).loss_sum / labels(step)
        part.backward()
        loss += part.detach()
    if (group := mesh.group("replicas")) is not None:
        torch.distributed.all_reduce(loss, group=group)
    gradients = whole_gradients(model, optimizer)
    norm = optimizer.sum_gradients()
    optimizer.update(lr=TRAINING.lr, norm=norm)
    return loss.item(), norm, gradients


def whole_gradients(model: Decoder, optimizer: AnyOptimizer) -> dict[str, Tensor]:
    """Before they are summed over tensor ranks, which is done here."""
    whole = {}
    for slot in optimizer.slots:
        if isinstance(optimizer, Optimizer):
            gradient = optimizer.gradients_N[slot.start : slot.stop].view(slot.shape).clone()
        else:
            gradient = model.piece_of(slot.parameter.grad)
        if slot.kind.partial and (group := model.mesh.group(slot.kind.partial)) is not None:
            torch.distributed.all_reduce(gradient, group=group)
        whole[slot.name] = gather.whole(gradient, slot.parameter, model.axis)
    return whole


def trained(case: Case) -> Seen:
    model = case.model()
    optimizer = ready_optimizer(model, case.training)
    steps = [take_step(model, optimizer, step) for step in range(STEPS)]
    state = {
        slot.name: gather.whole(model.piece_of(slot.parameter), slot.parameter, model.axis).clone()
        for slot in optimizer.slots
    }
    model.mesh.close()
    return Seen([loss for loss, _, _ in steps], [norm for _, norm, _ in steps], steps[0][2], state)


def assert_same(seen: Seen, expected: Seen) -> None:
    assert seen.losses == pytest.approx(expected.losses, rel=2e-6)
    assert seen.norms == pytest.approx(expected.norms, rel=2e-6)
    assert nets.apart(seen.gradients, expected.gradients) < 2e-6
    assert nets.apart(seen.weights, expected.weights) < 2e-6


TIED = Case(Parallel(), {"vocab_size": 97})
UNTIED = Case(Parallel(), {"tie_embeddings": False, "num_kv_heads": 1, "architecture": "qwen3", "init_std": 0.1})
FULL = replace(UNTIED, more={"recompute": "full"})
BLOOM = Case(
    Parallel(),
    {"architecture": "bloom", "num_kv_heads": 4, "ffn_hidden_size": 128},
    # Nothing is left of the gradient of a key's bias without rotary positions, which Adam would divide by itself.
    training=TRAINING.model_copy(update={"eps": 1e-3}),
)
ADAPTED = Case(Parallel(), {"num_kv_heads": 1}, Lora(rank=2, alpha=6.0, dropout=0.2), {"recompute": "full"})

TWO = [
    pytest.param(TIED.on(data=2, shard_gradients=True), id="gradients-tied"),
    pytest.param(FULL.on(data=2, shard_gradients=True), id="gradients-untied-full"),
    pytest.param(TIED.on(data=2, shard_weights=True), id="weights-tied"),
    pytest.param(FULL.on(data=2, shard_weights=True), id="weights-untied-full"),
    pytest.param(ADAPTED.on(data=2, shard_weights=True), id="weights-lora-full"),
]
FOUR = [
    pytest.param(TIED.on(data=4, shard_gradients=True), id="gradients-tied"),
    pytest.param(UNTIED.on(data=4, shard_weights=True), id="weights-untied"),
    pytest.param(FULL.on(data=2, tensor=2, sequence=True, shard_gradients=True), id="gradients-tensor-sequence"),
    pytest.param(TIED.on(data=2, tensor=2, sequence=True, shard_weights=True), id="weights-tensor-sequence"),
    pytest.param(UNTIED.on(data=2, tensor=2, shard_weights=True), id="weights-tensor"),
    pytest.param(ADAPTED.on(data=2, tensor=2, sequence=True, shard_weights=True), id="weights-tensor-lora"),
    pytest.param(ADAPTED.on(data=4, shard_gradients=True), id="gradients-lora"),
    pytest.param(BLOOM.on(data=2, tensor=2, sequence=True, shard_weights=True), id="weights-tensor-sequence-bloom"),
    pytest.param(FULL.on(data=2, context=2, shard_weights=True), id="weights-context"),
]


@pytest.fixture(scope="module")
def one_rank() -> Any:
    """What one rank sees of a case, computed once."""
    known: dict[str, Seen] = {}

    def see(case: Case) -> Seen:
        # Recomputing and sharing out change nothing.
        alike = replace(case, parallel=Parallel(), more={})
        if repr(alike) not in known:
            known[repr(alike)] = trained(alike)
        return known[repr(alike)]

    return see


@pytest.mark.parametrize("case", TWO)
def test_two_ranks_train_as_one_does(world2: World, one_rank: Any, case: Case) -> None:
    for seen in world2.run(trained, case):
        assert_same(seen, one_rank(case))


@pytest.mark.parametrize("case", FOUR)
def test_four_ranks_train_as_one_does(world4: World, one_rank: Any, case: Case) -> None:
    for seen in world4.run(trained, case):
        assert_same(seen, one_rank(case))


def norm_of_ones(case: Case) -> tuple[float, int]:
    """And how many numbers the model has to train."""
    model = case.model()
    optimizer = ready_optimizer(model, TRAINING)
    mesh = model.mesh
    for slot in optimizer.slots:
        ones, placement = torch.zeros(slot.placement.local_shape), slot.placement
        parts = torch.distributed.get_world_size(mesh.group(placement.partial)) if placement.partial else 1
        placement.true_part(ones).fill_(1 / parts)
        gradient = torch.zeros_like(slot.parameter)
        local = gradient.to_local()
        first = mesh.rank("replicas") * -(-len(ones) // mesh.size("replicas"))
        local.copy_(ones[first : first + len(local)])
        slot.parameter.grad = gradient
    norm = optimizer.sum_gradients()
    mesh.close()
    return norm, sum(prod(slot.placement.shape) for slot in optimizer.slots)


@pytest.mark.parametrize("case", [FOUR[2], FOUR[3], FOUR[5]])
def test_all_ones_have_the_root_of_the_number_of_parameters_as_norm(world4: World, case: Case) -> None:
    for norm, numbers in world4.run(norm_of_ones, case):
        assert norm == pytest.approx(numbers**0.5, rel=1e-7)


# ---- Checkpoints ----

ODD = {"vocab_size": 99, "num_layers": 1}
"""Each rank of two pads its vocabulary; four replicas have unequal shares of it."""
LAYOUTS = {
    "flat": Parallel(),
    "flat-data": Parallel(data=4),
    "gradients": Parallel(data=4, shard_gradients=True),
    "weights": Parallel(data=4, shard_weights=True),
    "weights-tensor": Parallel(tensor=2, sequence=True, data=2, shard_weights=True),
}
Boxes = list[tuple[str, str, Any, Tensor, list[int]]]


def boxes(optimizer: AnyOptimizer) -> Boxes:
    """Copies of all that a rank has of each global state, and the parameter's shape."""
    shapes = optimizer.shapes
    return [
        (piece.parameter, key, piece.box, tensor.clone(), shapes[piece.parameter])
        for piece in optimizer.pieces()
        for key, tensor in piece.tensors.items()
    ]


def assembled(ranks: list[Boxes]) -> dict[tuple[str, str], Tensor]:
    """Global states from the boxes of all ranks, which must agree where several hold the same."""
    states: dict[tuple[str, str], Tensor] = {}
    for name, key, box, tensor, shape in (entry for held in ranks for entry in held):
        state = states.setdefault((name, key), torch.full(shape, torch.nan))
        where = tuple(slice(first, first + size) for first, size in zip(box.offset, box.size, strict=True))
        seen = state[where]
        assert torch.equal(seen[~seen.isnan()], tensor[~seen.isnan()])
        state[where] = tensor
    return states


def train_and_save(case: Case, folder: Path) -> Boxes:
    model = case.model()
    optimizer = ready_optimizer(model, TRAINING)
    for step in range(2):
        take_step(model, optimizer, step)
    save(folder, optimizer, FACTS)
    model.mesh.close()
    return boxes(optimizer)


def loaded(case: Case, path: Path) -> tuple[Boxes, float, dict[str, Tensor]]:
    """What is there after loading, the loss of it on the first rows, and the weights in use."""
    model = case.model()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.fill_(torch.nan)
    optimizer = ready_optimizer(model, TRAINING)
    if case.parallel.shard_gradients:
        with torch.no_grad():
            # Gathers what is stale then.
            model.loss(rows(0, first=0, count=2))
    assert checkpoint.load(path, optimizer, base=None) == FACTS
    assert optimizer.steps == 2
    held = boxes(optimizer)
    with torch.no_grad():
        loss = model.eval().loss(rows(0, first=0, count=2)).loss_sum.item()
    state = {name: tensor.clone() for name, tensor in weights.whole_state(model)}
    model.mesh.close()
    return held, loss, state


def on(world: World, case: Case, do: Any, *args: Any) -> list[Any]:
    return [do(case, *args)] if case.parallel.ranks == 1 else world.run(do, case, *args)


SHARED = [name for name, parallel in LAYOUTS.items() if parallel.shard_gradients]
PAIRS = [pair for pair in product(LAYOUTS, repeat=2) if {*pair} & {*SHARED} and pair[0] != pair[1]]
FEW = Lora(rank=2)
"""Fewer rows than there are replicas."""


@pytest.fixture(scope="module")
def saved_by(world4: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a layout's ranks held when they saved, and the checkpoint; made when first asked for."""
    made: dict[tuple[str, Lora | None], tuple[dict[tuple[str, str], Tensor], Path]] = {}

    def of(layout: str, lora: Lora | None) -> tuple[dict[tuple[str, str], Tensor], Path]:
        if (layout, lora) not in made:
            folder = tmp_path_factory.mktemp("saved")
            held = on(world4, Case(LAYOUTS[layout], ODD, lora), train_and_save, folder)
            made[layout, lora] = assembled(held), folder / f"step-{STEPS:08}"
        return made[layout, lora]

    return of


@pytest.mark.parametrize(
    ("saved", "then", "lora"),
    [
        *(pytest.param(*pair, None, id="-to-".join(pair)) for pair in PAIRS),
        pytest.param("weights", "flat", FEW, id="adapters-weights-to-flat"),
        pytest.param("flat-data", "weights-tensor", FEW, id="adapters-flat-data-to-weights-tensor"),
    ],
)
def test_any_layout_loads_what_any_other_saved(
    world4: World, saved_by: Any, saved: str, then: str, lora: Lora | None
) -> None:
    before, path = saved_by(saved, lora)
    answers = on(world4, Case(LAYOUTS[then], ODD, lora), loaded, path)
    after = assembled([held for held, _, _ in answers])
    assert before.keys() == after.keys()
    for key, state in before.items():
        assert not state.isnan().any()
        assert torch.equal(state, after[key]), key
    for _, loss, state in answers:
        assert loss == pytest.approx(answers[0][1], rel=1e-6)
        for name, tensor in state.items():
            if lora is None:
                assert torch.equal(tensor, before[name, "weight"]), name
            else:
                assert not tensor.isnan().any()


# ---- Memory ----


LARGE = Case(Parallel(), {"num_layers": 6, "hidden_size": 64, "head_dim": 16, "ffn_hidden_size": 128})
FP32 = 4


@dataclass(frozen=True)
class Held:
    """Bytes of a rank's tensors."""

    numbers: int
    """Not bytes: what the model has to train."""
    between_steps: int
    gathered: int
    """Besides, after it has looked at rows without learning."""


def living() -> int:
    """Bytes of all tensors that came since `gc.freeze`, each storage once."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def between_barriers(look: Callable[[], int], *, times: int) -> Iterator[int]:
    for _ in range(times):
        dist.barrier()
        yield look()


def bytes_held(case: Case) -> Held:
    gc.collect()
    # What there is already, hundreds of thousands of objects, is not looked at again.
    gc.freeze()
    model = case.model()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    optimizer = ready_optimizer(model, TRAINING)
    take_step(model, optimizer, 0)
    between_steps = living()
    with torch.no_grad():
        model.loss(rows(0, first=0, count=2))
    # For a moment longer a group's thread may hold what the last gathering brought.
    looking = min(between_barriers(living, times=20))
    model.mesh.close()
    gc.unfreeze()
    return Held(numbers, between_steps, looking - between_steps)


def test_a_rank_holds_its_share_of_all_states_and_besides_what_it_needs_at_a_time(world4: World) -> None:
    flat = world4.run(bytes_held, LARGE.on(data=4))
    for held in flat:
        # Whole weights and gradients; a quarter of two moments and of summed gradients.
        assert held.between_steps == pytest.approx(FP32 * held.numbers * (2 + 3 / 4), rel=0.05)
    # Embedding and last norm.
    ends = 96 * 64 + 64
    for way, layers in (("shard_gradients", 1.0), ("shard_weights", 0.0)):
        for held in world4.run(bytes_held, LARGE.on(data=4, **{way: True})):
            # A quarter of masters and of two moments.
            assert held.between_steps == pytest.approx(FP32 * held.numbers * 3 / 4, rel=0.05)
            assert held.gathered == pytest.approx(FP32 * (ends + layers * (held.numbers - ends)), rel=0.02)


def test_bf16_weights_are_gathered_from_fp32_masters(world2: World) -> None:
    case = replace(TIED.on(data=2, shard_weights=True), more={"dtype": torch.bfloat16})
    flat = replace(case, parallel=Parallel(data=2))
    for seen, expected in zip(world2.run(trained, case), world2.run(trained, flat), strict=True):
        assert seen.losses == pytest.approx(expected.losses, rel=1e-3)
        assert all(tensor.dtype == torch.bfloat16 for tensor in seen.weights.values())


# ---- Configuration ----


@pytest.mark.parametrize(
    ("asked", "shares"),
    [
        ({}, (True, False, False)),
        ({"shard_optimizer": False}, (False, False, False)),
        ({"shard_gradients": True}, (True, True, False)),
        ({"shard_weights": True}, (True, True, True)),
    ],
)
def test_sharing_weights_includes_gradients_and_those_the_optimizers_state(
    asked: dict[str, bool], shares: tuple[bool, ...]
) -> None:
    parallel = Parallel(data=2, **asked)
    assert (parallel.shard_optimizer, parallel.shard_gradients, parallel.shard_weights) == shares
    assert Parallel.model_validate(parallel.model_dump()) == parallel


@pytest.mark.parametrize(
    ("stricter", "weaker"),
    [
        ("shard_weights", "shard_gradients"),
        ("shard_weights", "shard_optimizer"),
        ("shard_gradients", "shard_optimizer"),
    ],
)
def test_what_cannot_be_shared_by_itself_is_refused(stricter: str, weaker: str) -> None:
    with pytest.raises(ValidationError, match=f"includes {weaker}, which is false"):
        Parallel(data=2, **{stricter: True, weaker: False})


def test_shared_gradients_and_a_pipeline_do_not_go_together_yet() -> None:
    with pytest.raises(ValidationError, match="not available with pipeline=2; leave it and shard_weights out"):
        Parallel(data=2, pipeline=2, shard_gradients=True)


def where_it_is_made() -> tuple[set[str], str]:
    mesh = build(Parallel(data=2, shard_weights=True))
    mesh.device = torch.device("meta")
    model = Decoder(nets.shape(), mesh)
    mesh.close()
    return {parameter.device.type for parameter in model.parameters()}, model.device.type


def test_what_is_to_be_shared_out_is_made_on_the_host(world2: World) -> None:
    assert world2.run(where_it_is_made) == [({"cpu"}, "meta")] * 2


def waiting_for_a_whole_weight() -> list[str]:
    mesh = build(Parallel(data=2, shard_weights=True))
    model = Decoder(nets.shape(), mesh)
    ready_optimizer(model, TRAINING)
    mesh.stopwatch.lap()
    model.piece_of(next(model.parameters()))
    spans = [name for name, *_ in mesh.stopwatch.spans]
    mesh.close()
    return spans


def test_gathering_a_weight_for_files_counts_as_waiting_for_others(world2: World) -> None:
    assert world2.run(waiting_for_a_whole_weight) == [["communication"]] * 2
