"""A model that is nothing but parameters with placements and made-up gradients, whole or cut over ranks."""

import torch
from torch.nn import Parameter

from engine.config import Training
from engine.optimizer import Optimizer
from engine.placement import Placement, place, placement_of, shard
from engine.saving import Saver

TRAINING = Training(
    steps=5, global_batch=2, micro_batch=1, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), clip=1.0, precision="fp32"
)
SHAPES = {"embed": (7, 6), "q": (8, 6), "k": (4, 6), "o": (6, 8), "bias": (8,), "norm": (6,)}
"""Global shapes. Seven rows over two ranks leave a row of padding; bias and norm are what is not a matrix."""
CUT = {"embed": 0, "q": 0, "k": 0, "o": 1, "bias": 0}
COPIES = {"k": 2}
"""Neighbours that hold the same, where there are so many tensor ranks."""


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def gradients(step, part):
    """Of the whole model; two parts make a step's global gradient."""
    generator = torch.Generator().manual_seed(100 * step + part)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def placements(mesh):
    """All but the norm are cut over the tensor axis; that is whole on each rank, with a gradient that is a part."""
    size, rank = mesh.size("tensor"), mesh.rank("tensor")
    return {
        name: shard(shape, dim=CUT[name], rank=rank, size=size, copies=COPIES.get(name, 1))
        if name in CUT and size > 1
        else Placement(shape, copy=rank, partial="tensor" if size > 1 and name == "norm" else None)
        for name, shape in SHAPES.items()
    }


def local(whole, placement):
    """A rank's tensor, padded as the layers pad."""
    tensor = whole.new_zeros(placement.local_shape)
    placement.true_part(tensor).copy_(placement.piece(whole))
    return tensor


def ours(mesh, *, dtype=torch.float32, training=TRAINING, shard_optimizer=True):
    where = placements(mesh)
    parameters = {
        name: place(Parameter(local(whole, where[name])), where[name]) for name, whole in weights(dtype).items()
    }
    return parameters, Optimizer(parameters.items(), mesh, training=training, shard=shard_optimizer)


def backward(parameters, whole):
    """Give each parameter this rank's share of the gradient `whole`, as a backward pass does."""
    share = {
        name: local(whole[name] / (2 if placement_of(parameter).partial else 1), placement_of(parameter))
        for name, parameter in parameters.items()
    }
    sum((parameter * share[name].to(parameter.dtype)).sum() for name, parameter in parameters.items()).backward()


def train(mesh, steps, **options):
    """Our optimizer on this rank; each replica has one part of the gradient, a lone one accumulates both."""
    parameters, optimizer = ours(mesh, **options)
    norms = []
    for step in range(steps):
        for part in range(2) if mesh.size("replicas") == 1 else [mesh.rank("replicas")]:
            backward(parameters, gradients(step, part))
        norms.append(optimizer.sum_gradients())
        optimizer.update(lr=TRAINING.lr, norm=norms[-1])
    return parameters, norms, optimizer


def save(folder, optimizer, facts, *, keep=3, beside=lambda folder: None):
    """Publish a checkpoint and return where it lies."""
    published = []
    with Saver(folder, optimizer, keep=keep, beside=beside, saved=published.append) as saver:
        saver.begin(facts)
        saver.wait()
    return published[0].path
