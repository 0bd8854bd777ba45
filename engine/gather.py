"""What a model's ranks hold between them, on each of them: names of all stages, and global tensors, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from engine.comm import TensorAxis, gather_dim
from engine.mesh import ENDS, Mesh
from engine.model import Decoder, whole_shapes
from engine.placement import placement_of

T = TypeVar("T")


def of_stages(mesh: Mesh, own: T) -> list[T]:
    """What each rank of the pipeline gives as its `own`, in their order. They call this together."""
    group = mesh.group("pipeline")
    if group is None:
        return [own]
    all_of_them: list[Any] = [None] * mesh.size("pipeline")
    with mesh.exchange():
        dist.all_gather_object(all_of_them, own, group=group)
    return cast(list[T], all_of_them)


def merged(mesh: Mesh, own: Mapping[str, T]) -> dict[str, T]:
    """The entries of all stages; those of a name that several have are the same."""
    return {name: value for part in of_stages(mesh, dict(own)) for name, value in part.items()}


def whole(local: Tensor, like: Tensor, axis: TensorAxis) -> Tensor:
    """The global tensor, at its true size, whose pieces are placed as the parameter `like` is."""
    placement = placement_of(like)
    if placement.dim is None:
        return local.detach()
    gathered = gather_dim(local.detach(), placement.dim, axis, every=axis.size // placement.pieces)
    return gathered.narrow(placement.dim, 0, placement.shape[placement.dim])


def wholes(decoder: Decoder, parameters: Iterable[tuple[str, Parameter]]) -> Iterator[tuple[str, Tensor]]:
    """Name and global host tensor of each of these parameters, of all stages, one at a time in the model's order.

    All ranks that hold a model between them go through it together, and all replicas where they share it out; each gets
    every tensor.
    """
    mesh, group = decoder.mesh, decoder.mesh.group("pipeline")
    # The last stage's copy of a tied embedding is the first's.
    own = {name: p for name, p in parameters if (placement_of(p).partial, placement_of(p).copy) != (ENDS, 1)}
    stages = of_stages(mesh, {name: (placement_of(p).shape, decoder.dtype) for name, p in own.items()})
    listed = [(name, stage) for stage, names in enumerate(stages) for name in names]
    if group is not None:
        order = {host_of(name): number for number, name in enumerate(whole_shapes(decoder.shape))}
        listed.sort(key=lambda item: order[host_of(item[0])])
    for name, stage in mesh.stopwatch.whereabouts.through(listed):
        if stage == mesh.rank("pipeline"):
            tensor = whole(decoder.piece_of(own[name]), own[name], decoder.axis).contiguous()
        else:
            shape, dtype = stages[stage][name]
            tensor = torch.empty(shape, dtype=dtype, device=mesh.device)
        if group is not None:
            with mesh.exchange():
                dist.broadcast(tensor, group=group, group_src=stage)
        yield name, tensor.cpu()


def host_of(name: str) -> str:
    """The layer that a parameter belongs to, or that its adapter stands beside."""
    host, adapter, _ = name.partition(".adapter.")
    return host if adapter else name.rpartition(".")[0]
