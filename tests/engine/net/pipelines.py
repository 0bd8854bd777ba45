"""What a world runs for the tests of pipelines: steps of a model that is spread over stages, against a lone rank's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine import gather, mesh
from engine.batch import IGNORE, Batch
from engine.config import Lora, ModelShape, Parallel, Training
from engine.model import Decoder
from engine.optimizer import Optimizer
from engine.passes import Passes
from engine.placement import placement_of
from tests.engine.net import nets

TRAINING = Training(steps=3, global_batch=2, micro_batch=1, lr=1e-3, eps=1e-6, clip=1.0, precision="fp32")
"""`eps`: Adam divides what is left of a gradient that all but cancels by itself, which makes lr of its last digit."""


@dataclass(frozen=True)
class Case:
    """A model, how it is spread, and what it learns."""

    parallel: dict[str, Any]
    shape: dict[str, Any] = field(default_factory=lambda: {"num_layers": 4})
    micro_batches: int = 4
    """Of each replica."""
    recompute: str = "none"
    lora: Lora | None = None

    def model(self, grid: mesh.Mesh, **more: Any) -> Decoder:
        recompute = more.pop("recompute", self.recompute)
        # Four layers as wild as two are elsewhere amplify a rounding of fp32 beyond the bounds, pipeline or not.
        shape = nets.shape(**{"init_std": 0.1, **self.shape})
        model = nets.uneven(nets.decoder(shape, grid=grid, recompute=recompute, **more))
        return model if self.lora is None else nets.adapted(model, self.lora)


def micro_batches(count: int, *, step: int = 0) -> list[Batch]:
    """Packed documents; the second is without a label, and the last has one row where the others have two."""
    batches = [nets.batch(seed=100 * step + number, packed=number != 0) for number in range(count)]
    if count > 1:
        batches[1] = replace(batches[1], labels_BT=torch.full_like(batches[1].labels_BT, IGNORE))
        last = nets.batch(seed=100 * step + 99, rows=1, packed=True)
        batches[-1] = last
    # Dropout masks follow the place in the step.
    at, placed = 0, []
    for batch in batches:
        rows = len(batch.tokens_BT)
        placed.append(replace(batch, rows_B=torch.arange(at, at + rows), step=step))
        at += rows
    return placed


def labels_in(batches: list[Batch]) -> int:
    return sum(int((batch.labels_BT != IGNORE).sum()) for batch in batches)


def step(passes: Passes, batches: list[Batch]) -> float:
    """Leave the gradients of a step in which each replica has its share; the mean loss over the world."""
    grid = passes.decoder.mesh
    share = len(batches) // grid.size("data")
    mine = batches[grid.rank("data") * share : (grid.rank("data") + 1) * share]
    return over_ranks(grid, passes.train(mine, labels=labels_in(batches)))[0].item() / labels_in(batches)


def over_ranks(grid: mesh.Mesh, sums: Tensor) -> Tensor:
    """What all replicas have, of which each tensor rank has the same."""
    if grid.parallel.ranks > 1:
        sums = sums if grid.rank("tensor") == 0 else torch.zeros_like(sums)
        dist.all_reduce(sums)
    return sums


def summed_gradients(model: Decoder) -> dict[str, Tensor]:
    """This rank's parameters' gradients, each as a global tensor, over all that have a part."""
    group = model.mesh.group("replicas")
    found = nets.gradients(model)
    for gradient in found.values():
        if group is not None:
            dist.all_reduce(gradient, group=group)
    return found


def loss_and_gradients(case: Case) -> tuple[float, float, set[str]]:
    """Relative distance of the loss, of the worst gradient, and whose gradients this rank compared."""
    parallel = Parallel.model_validate(case.parallel)
    batches = micro_batches(case.micro_batches * parallel.data)
    alone = case.model(mesh.alone(nets.CPU), recompute="none")
    loss = step(Passes(alone), batches)
    expected = nets.gradients(alone)
    grid = mesh.build(parallel)
    model = case.model(grid)
    got_loss = step(Passes(model), batches)
    got = summed_gradients(model)
    grid.close()
    return abs(got_loss / loss - 1), nets.apart(got, {name: expected[name] for name in got}), set(got)


def several_steps(case: Case) -> tuple[float, float]:
    """Relative distance of the worst norm and of the worst weight after three steps."""
    parallel = Parallel.model_validate(case.parallel)

    def trained(grid: mesh.Mesh) -> tuple[list[float], dict[str, Tensor]]:
        model = case.model(grid)
        optimizer = Optimizer(model.named_parameters(), grid, training=TRAINING, shard=grid.parallel.shard_optimizer)
        passes, norms = Passes(model), []
        for number in range(3):
            step(passes, micro_batches(case.micro_batches * parallel.data, step=number))
            norms.append(optimizer.sum_gradients())
            optimizer.update(lr=TRAINING.lr, norm=norms[-1])
        return norms, dict(gather.wholes(model, model.named_parameters()))

    norms, weights = trained(mesh.alone(nets.CPU))
    grid = mesh.build(parallel)
    got_norms, got = trained(grid)
    grid.close()
    assert list(got) == list(weights)
    return (
        max(abs(one / other - 1) for one, other in zip(got_norms, norms, strict=True)),
        max(nets.distance(got[name], weights[name]) for name in weights),
    )


def foreseen(case: Case) -> tuple[list[float], list[float]]:
    """The sums of an evaluation, in the pipeline and alone."""
    parallel = Parallel.model_validate(case.parallel)
    batches = micro_batches(case.micro_batches)
    expected = Passes(case.model(mesh.alone(nets.CPU)).eval()).evaluate(batches)
    grid = mesh.build(parallel)
    sums = over_ranks(grid, Passes(case.model(grid).eval()).evaluate(iter(batches)))
    grid.close()
    return sums.tolist(), expected.tolist()


def tied_copies(parallel: dict[str, Any]) -> tuple[Tensor | None, float, int]:
    """This rank's part of a tied embedding after two steps, the norm of a gradient of ones, and unique parameters.

    The second end's masters are put off before, as sums in another order would in the long run.
    """
    grid = mesh.build(Parallel.model_validate(parallel))
    shape = nets.shape(num_layers=4)
    model = nets.decoder(shape, grid=grid, dtype=torch.bfloat16)
    optimizer = Optimizer(model.named_parameters(), grid, training=TRAINING, shard=True)
    passes = Passes(model)
    if grid.rank("pipeline") == grid.size("pipeline") - 1:
        optimizer.masters_S.mul_(1.01)
    for number in range(2):
        step(passes, micro_batches(4, step=number))
        optimizer.update(lr=TRAINING.lr, norm=optimizer.sum_gradients())
    for parameter in model.parameters():
        placement = placement_of(parameter)
        holders = grid.group(placement.partial) if placement.partial else None
        parts = grid.size("data") * (1 if holders is None else dist.get_world_size(holders))
        (parameter.sum() / parts).backward()  # type: ignore[no-untyped-call]
    norm = optimizer.sum_gradients()
    embedding = model.model.embed_tokens
    grid.close()
    return None if embedding is None else embedding.weight.detach().clone(), norm, unique(shape)


def unique(shape: ModelShape) -> int:
    return sum(parameter.numel() for parameter in nets.decoder(shape).parameters())


def refused_logits() -> str:
    grid = mesh.build(Parallel(pipeline=2))
    try:
        nets.decoder(nets.shape(), grid=grid).logits(nets.batch().tokens_BT)
    except ValueError as error:
        return str(error)
    finally:
        grid.close()
    return ""


def kept_by_the_first_stage(count: int) -> int:
    """The most bytes of activations that the first of two stages keeps at once, over `count` micro-batches."""
    grid = mesh.build(Parallel(pipeline=2))
    model = nets.decoder(nets.shape(num_layers=4), grid=grid)
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}
    most = 0

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal most
            self.tensor, self.address = tensor, tensor.untyped_storage().data_ptr()
            if self.address not in known:
                held[id(self)] = tensor.nbytes
            most = max(most, sum(held.values()))

        def __del__(self) -> None:
            held.pop(id(self), None)

    batches = [nets.batch(seed=number) for number in range(count)]
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        Passes(model).train(batches, labels=1)
    grid.close()
    return most
