"""Parity is the law: any product of the axes trains the model that one process trains, on the same rows, in fp32.

Each case is a whole run of ten steps by the trainer's own parts, which saves half-way. What is compared: every step's
loss and gradient norm, every parameter's first moment after the first step, which is its gradient but for a factor, all
weights and both moments after the last, and which rows each step took.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.config import Parallel, RunConfig
from engine.makings import ready_data, ready_model
from engine.mesh import build
from engine.model import Decoder
from engine.optimizer import AnyOptimizer, Optimizer
from engine.placement import placement_of
from engine.plan.memory import parameters
from engine.stop import StopWish
from engine.trainer import PATIENCE, Reporter, Work
from tests.engine.train import runs
from tests.worlds import World

SHAPE = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 2, "head_dim": 4}
"""Fewer key-value heads than four tensor ranks."""
MODELS: dict[str, dict[str, Any]] = {
    "text": {"model": SHAPE},
    "untied": {"model": {**SHAPE, "tie_embeddings": False, "num_kv_heads": 1}},
    # Answers of different lengths, several in a row; some micro-batches and ranks have no label at all.
    "packed answers": {"model": SHAPE, **runs.COMPLETION},
    "a real vocabulary": {"model": {**SHAPE, "vocab_size": 50_257, "hidden_size": 16}},
    "dropout": {
        "model": {
            **SHAPE, "architecture": "gpt2", "num_kv_heads": 8, "hidden_dropout": 0.1, "attention_dropout": 0.1,
        },
        **runs.COMPLETION,
    },
    "pairs": {"model": SHAPE, **runs.PREFERENCE},
}  # fmt: skip

STEPS, HALF = 10, 5
"""Of a run; and after which of them it saves what others go on from."""
TRAINING = {"eps": 1e-5, "steps": STEPS}
"""Adam divides what is left of a gradient that all but cancels by itself, which makes 2 lr of its last digit.

This is less than a tenth of the median gradient here. With a tenth of it, one weight of 512 in a matrix differed by
4e-7 between layouts, where the others did by less than 6e-9.
"""


@dataclass(frozen=True)
class Told:
    """What a run says for itself, on one rank."""

    losses: list[float]
    norms: list[float]
    held: dict[int, list[tuple[str, str, Any, Tensor]]]
    """Parameter, state, box and values of what this rank held after some steps."""
    shapes: dict[str, tuple[int, ...]]
    rows: list[list[tuple[int, bytes]]]
    """Of each step: place in the global batch, and its tokens."""


def a_run(run_dir: Path, run: RunConfig) -> Told:
    """All steps of `run` on this rank. Looks at what it holds after the first, half and the last, or goes on from."""
    mesh = build(run.parallel, timeout=PATIENCE)
    steps: list[Any] = []
    held: dict[int, Any] = {}

    def emit(event: Any) -> None:
        if event.type == "step":
            steps.append(event)
            if event.step in (1, HALF):
                held[event.step] = states(work.optimizer)

    tokenizer, prepared = ready_data(run, run_dir, mesh, Reporter(lambda event: None, mesh.stopwatch.whereabouts))
    decoder = ready_model(run, run_dir, mesh, tokenizer)
    work = Work(run, run_dir, mesh, emit, StopWish(), tokenizer, prepared, decoder)
    work.refer(Reporter(lambda event: None, mesh.stopwatch.whereabouts))
    if run.resume is not None:
        work.resume()
        held[work.step] = states(work.optimizer)
    begun = work.step
    assert work.all_steps()
    rows = [
        [
            (int(place), tokens.numpy().tobytes())
            for batch in work.loader.step(step)
            if batch.rows_B is not None
            for place, tokens in zip(batch.rows_B, batch.tokens_BT, strict=True)
        ]
        for step in range(begun, work.step)
    ]
    told = Told(
        [step.loss for step in steps],
        [step.grad_norm for step in steps],
        held | {work.step: states(work.optimizer)},
        {slot.name: slot.placement.shape for slot in work.optimizer.slots},
        rows,
    )
    mesh.close()
    return told


def states(optimizer: AnyOptimizer) -> list[tuple[str, str, Any, Tensor]]:
    return [
        (piece.parameter, key, piece.box, tensor.clone())
        for piece in optimizer.pieces()
        for key, tensor in piece.tensors.items()
    ]


def assembled(ranks: list[Told], step: int) -> dict[tuple[str, str], Tensor]:
    """Global states after a step from all ranks' boxes, which must be bitwise equal where several hold the same."""
    shapes = {name: shape for told in ranks for name, shape in told.shapes.items()}
    whole = {
        (name, key): torch.full(shape, torch.nan)
        for name, shape in shapes.items()
        for key in ("weight", "average", "square")
    }
    for name, key, box, tensor in (entry for told in ranks for entry in told.held[step]):
        where = tuple(slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True))
        there = whole[name, key][where]
        known = ~there.isnan()
        assert torch.equal(there[known], tensor[known]), f"{name}: {key} differs between ranks that hold the same"
        whole[name, key][where] = tensor
    assert not any(state.isnan().any() for state in whole.values())
    return whole


def distances(
    got: dict[tuple[str, str], Tensor], expected: dict[tuple[str, str], Tensor], key: str
) -> dict[str, float]:
    assert got.keys() == expected.keys()
    return {
        name: ((got[name, key] - whole).norm() / expected[scale_of(name), key].norm().clamp_min(1e-30)).item()
        for (name, state), whole in expected.items()
        if state == key
    }


def scale_of(name: str) -> str:
    """The parameter whose size a difference is measured by: its own, but for a bias that has no true gradient.

    What a key's bias adds to a query's scores is the same for all keys, and softmax does not see it.
    """
    return name.replace("k_proj.bias", "k_proj.weight")


@dataclass(frozen=True)
class Layout:
    """A way to run, to be compared with one process."""

    model: str
    parallel: dict[str, Any]
    recompute: str = "none"
    micro_batch: int = 1

    def __str__(self) -> str:
        axes = " ".join(f"{axis}={size}" for axis, size in self.parallel.items())
        return f"{self.model}: {axes} recompute={self.recompute} micro_batch={self.micro_batch}"

    @property
    def ranks(self) -> int:
        return Parallel(**self.parallel).ranks

    def run(self) -> RunConfig:
        return runs.config(
            **MODELS[self.model],
            parallel=self.parallel,
            recompute={"mode": self.recompute},
            training=TRAINING | {"micro_batch": self.micro_batch, "checkpoint_every": HALF},
        )

    def alone(self) -> Layout:
        """One process that trains the same."""
        return Layout(self.model, {})


TELLING = [
    Layout("untied", {"tensor": 2, "sequence": True}, "selective"),
    Layout("packed answers", {"data": 2, "shard_optimizer": False}, micro_batch=2),
    Layout("text", {"tensor": 4, "sequence": True}, "full", micro_batch=2),
    Layout("a real vocabulary", {"tensor": 4}, "selective", micro_batch=2),
    Layout("packed answers", {"tensor": 2, "sequence": True, "data": 2}, "selective"),
    Layout("text", {"context": 2}),
    Layout("packed answers", {"context": 2, "data": 2}, "full", micro_batch=2),
    Layout("untied", {"context": 2, "tensor": 2, "sequence": True}, "selective", micro_batch=2),
    Layout("packed answers", {"pipeline": 2, "virtual": 2}, "full"),
    Layout("text", {"pipeline": 2, "tensor": 2, "sequence": True}, "selective", micro_batch=2),
    Layout("untied", {"pipeline": 2, "virtual": 2, "context": 2}),
    Layout("a real vocabulary", {"pipeline": 4}),
    Layout("dropout", {"tensor": 2, "sequence": True, "pipeline": 2, "data": 2}, "selective"),
    Layout("packed answers", {"tensor": 2, "pipeline": 2, "virtual": 2, "context": 2}, "full", micro_batch=2),
    Layout("packed answers", {"data": 2, "shard_gradients": True}, "selective", micro_batch=2),
    Layout("untied", {"tensor": 2, "sequence": True, "data": 2, "shard_weights": True}, "full"),
    Layout("pairs", {"tensor": 2, "sequence": True}, "selective", micro_batch=2),
    Layout("pairs", {"pipeline": 2, "data": 2}),
    Layout("pairs", {"context": 2, "tensor": 2}, micro_batch=2),
]
"""Each axis, and the products that have met trouble elsewhere."""


def every_product(*, most: int) -> Iterator[Layout]:
    """Each product of the axes on at most so many ranks; what else may differ takes turns over them."""
    others = cycle(product(MODELS, ("none", "selective", "full"), (1, 2)))
    tensors = [{"tensor": 1}, *({"tensor": size, "sequence": shared} for size in (2, 4) for shared in (False, True))]
    stages = [(1, 1), (2, 1), (2, 2), (4, 1)]
    for tensor, (pipeline, virtual), data, context in product(tensors, stages, (1, 2), (1, 2)):
        parallel = {**tensor, "pipeline": pipeline, "virtual": virtual, "data": data, "context": context}
        if 1 < Parallel(**parallel).ranks <= most:
            # A stride without a common factor, so that no model meets only one kind of layout.
            model, recompute, micro_batch = next(islice(others, 6, None))
            yield Layout(model, parallel, recompute, micro_batch)


def told_by(request: pytest.FixtureRequest, layout: Layout, folder: Path, resume: Path | None = None) -> list[Told]:
    """What the ranks of a layout tell of its run, or of the rest of it, in that folder."""
    run = layout.run().model_copy(update={"resume": resume})
    runs.write(folder, run)
    if layout.ranks == 1:
        return [a_run(folder, run)]
    world: World = request.getfixturevalue(f"world{layout.ranks}")
    return world.run(a_run, folder, run, seconds=240)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A layout's run: what its ranks told, and the checkpoint of half of it; made when first asked for."""
    made: dict[str, tuple[list[Told], Path]] = {}

    def of(request: pytest.FixtureRequest, layout: Layout) -> tuple[list[Told], Path]:
        if str(layout) not in made:
            folder = tmp_path_factory.mktemp("trained")
            checkpoint = folder / "checkpoints" / f"step-{HALF:08}"
            made[str(layout)] = told_by(request, layout, folder), checkpoint
        return made[str(layout)]

    return of


def compare(told: list[Told], alone: list[Told]) -> None:
    (expected,) = alone
    for rank in told:
        assert rank.losses == pytest.approx(expected.losses, rel=2e-6)
        assert rank.norms == pytest.approx(expected.norms, rel=2e-6)
        assert (rank.losses, rank.norms) == (told[0].losses, told[0].norms)
    assert max(distances(assembled(told, 1), assembled(alone, 1), "average").values()) <= 2e-6
    last, expected_last = assembled(told, STEPS), assembled(alone, STEPS)
    for key, most in (("weight", 2e-6), ("average", 5e-6), ("square", 1e-5)):
        assert max(distances(last, expected_last, key).values()) <= most, key
    for step, rows in enumerate(expected.rows):
        taken = {row for rank in told for row in rank.rows[step]}
        assert sorted(taken) == sorted(rows)


@pytest.mark.parametrize("layout", TELLING, ids=str)
def test_any_product_of_axes_trains_the_model_of_one_process(
    request: pytest.FixtureRequest, trained: Any, layout: Layout
) -> None:
    told, _ = trained(request, layout)
    alone, _ = trained(request, layout.alone())
    compare(told, alone)


def ring(model: str, *, most: int) -> list[tuple[Layout, Layout]]:
    """From one process through all telling layouts of a model, on at most so many ranks, and back."""
    layouts = [Layout(model, {}), *(layout for layout in TELLING if layout.model == model and layout.ranks <= most)]
    return list(zip(layouts, layouts[1:] + layouts[:1], strict=True))


def goes_on(request: pytest.FixtureRequest, trained: Any, folder: Path, before: Layout, after: Layout) -> None:
    first, checkpoint = trained(request, before)
    second = told_by(request, after, folder, resume=checkpoint)
    written, read = assembled(first, HALF), assembled(second, HALF)
    assert written.keys() == read.keys()
    assert all(torch.equal(read[key], state) for key, state in written.items())
    assert second[0].losses == pytest.approx(first[0].losses[HALF:], rel=2e-6)
    assert second[0].norms == pytest.approx(first[0].norms[HALF:], rel=2e-6)
    taken, expected = (
        [{row for rank in told for row in rank.rows[step]} for step in range(HALF - STEPS, 0)]
        for told in (first, second)
    )
    assert taken == expected
    if before == after:
        unbroken, resumed = assembled(first, STEPS), assembled(second, STEPS)
        assert all(torch.equal(resumed[key], state) for key, state in unbroken.items())


STAGED = Layout("packed answers", {"pipeline": 2, "virtual": 2}, "full")


@pytest.mark.parametrize(
    ("before", "after"), [*ring("text", most=4), *ring("packed answers", most=4), (STAGED, STAGED)], ids=str
)
def test_a_run_goes_on_in_another_layout_from_the_very_state_and_the_next_rows(
    request: pytest.FixtureRequest, trained: Any, tmp_path: Path, before: Layout, after: Layout
) -> None:
    goes_on(request, trained, tmp_path, before, after)


RESUMED = [
    Layout("text", {}),
    Layout("text", {"tensor": 2, "sequence": True}, "selective"),
    Layout("text", {"pipeline": 2, "virtual": 2}),
    Layout("text", {"context": 2}),
    Layout("text", {"data": 2, "shard_optimizer": False}, micro_batch=2),
    Layout("text", {"tensor": 4, "sequence": True}, "full"),
    Layout("text", {"pipeline": 2, "data": 2}),
    Layout("text", {"tensor": 2, "context": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), list(product(RESUMED, repeat=2)), ids=str)
def test_every_layout_goes_on_from_every_other(
    request: pytest.FixtureRequest, trained: Any, tmp_path: Path, before: Layout, after: Layout
) -> None:
    goes_on(request, trained, tmp_path, before, after)


def norm_of_ones(run: RunConfig) -> tuple[float, int]:
    """The norm of a gradient of ones, and the parameters of the whole model, each counted once."""
    mesh = build(run.parallel, timeout=PATIENCE)
    assert run.model is not None
    decoder = Decoder(run.model, mesh)
    optimizer = Optimizer(
        decoder.named_parameters(), mesh, training=run.training, shard=run.parallel.shard_optimizer
    )  # fmt: skip
    for parameter in decoder.parameters():
        placement = placement_of(parameter)
        partial = mesh.group(placement.partial) if placement.partial else None
        parts = mesh.size("replicas") * (1 if partial is None else dist.get_world_size(partial))
        (placement.true_part(parameter).sum() / parts).backward()
    norm = optimizer.sum_gradients()
    mesh.close()
    return norm, parameters(run.model)


@pytest.mark.parametrize("layout", TELLING, ids=str)
def test_a_gradient_of_ones_has_the_root_of_the_number_of_parameters_as_norm(
    request: pytest.FixtureRequest, layout: Layout
) -> None:
    for norm, unique in request.getfixturevalue(f"world{layout.ranks}").run(norm_of_ones, layout.run()):
        assert norm == pytest.approx(unique**0.5, rel=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(every_product(most=8)), ids=str)
def test_every_product_of_axes_trains_the_model_of_one_process(
    request: pytest.FixtureRequest, trained: Any, tmp_path: Path, layout: Layout
) -> None:
    alone, _ = trained(request, layout.alone())
    compare(told_by(request, layout, tmp_path), alone)
