"""Ranks arranged along axes, with the process groups that follow. The mesh is passed to whoever talks: none is global.

World ranks are an arange reshaped to (pipeline, data, context, tensor): tensor is fastest, so its ranks are neighbours
(Narayanan et al. 2021, section 3: tensor within a host, pipeline across hosts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from math import prod
from typing import Literal

import torch
import torch.distributed as dist

from engine.config import Parallel
from engine.placement import neighbours
from engine.standing import MOST_QUEUES, QUEUES, Standing, standing
from engine.stopwatch import Stopwatch
from engine.whereabouts import Whereabouts

Axis = Literal["tensor", "context", "data", "pipeline"]

AXES: tuple[Axis, ...] = ("tensor", "context", "data", "pipeline")
"""Fastest first."""

SPANS: dict[str, tuple[Axis, ...]] = {
    **{axis: (axis,) for axis in AXES},
    "replicas": ("context", "data"),
    "model": ("tensor", "pipeline"),
}
"""Groups by the axes along which their ranks differ: each axis by itself; the ranks that hold the same weights, among
which gradients are summed; those that hold one model between them."""
ENDS = "ends"
"""The group of the first and the last pipeline stage, which both hold a tied embedding."""
CHANNELS = ("forward", "forward around", "backward", "backward around")
"""Groups of a pipeline's ranks, one for each way in which neighbours send: to the next rank, from the last around to
the first, and the same back. What waits on one never holds up another, were both between the same two ranks."""


@dataclass
class Mesh:
    """One rank's view of all ranks."""

    parallel: Parallel
    world_rank: int
    device: torch.device
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    """Groups of this rank that have more than one member."""
    owns_world: bool = False
    """Whether `close` also ends torch's default process group."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    """What this rank's time goes to; whoever waits for other ranks does so in a span of it."""

    def size(self, span: str) -> int:
        """Ranks along an axis, or of another of the `SPANS`."""
        return prod(sizes(self.parallel)[axis] for axis in SPANS[span])

    def rank(self, span: str) -> int:
        """This rank's coordinate along an axis, or its number in another of the `SPANS`; from 0."""
        number, stride = 0, 1
        for axis in SPANS[span]:
            number += stride * coordinates(self.parallel, self.world_rank)[axis]
            stride *= sizes(self.parallel)[axis]
        return number

    def group(self, name: str) -> dist.ProcessGroup | None:
        """This rank's group of that name, see `groups_of`; None where it is alone there."""
        return self.groups.get(name)

    def exchange(self) -> AbstractContextManager[None]:
        """A block in which other ranks are waited for, if there are any: its time is communication."""
        return self.stopwatch.span("communication") if self.parallel.ranks > 1 else nullcontext()

    def barrier(self) -> None:
        """Wait until each rank of the world has come here."""
        if self.parallel.ranks > 1:
            # On the host: a device barrier has to guess the device, and waits for its work too.
            with self.exchange():
                dist.all_reduce(torch.zeros(()))

    def close(self) -> None:
        """Leave the groups. Nothing may be in flight."""
        # Groups of the same ranks are one.
        for group in set(self.groups.values()):
            dist.destroy_process_group(group)
        self.groups = {}
        if self.owns_world:
            dist.destroy_process_group()
            self.owns_world = False


def sizes(parallel: Parallel) -> dict[Axis, int]:
    """Ranks along each axis, fastest first."""
    return {axis: getattr(parallel, axis) for axis in AXES}


def coordinates(parallel: Parallel, world_rank: int) -> dict[Axis, int]:
    """Where `world_rank` stands along each axis."""
    place: dict[Axis, int] = {}
    for axis, size in sizes(parallel).items():
        world_rank, place[axis] = divmod(world_rank, size)
    return place


def members(parallel: Parallel, *along: Axis) -> list[list[int]]:
    """Every group of world ranks that differ along these axes only, in the order of ranks."""
    others = [axis for axis in AXES if axis not in along]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(parallel.ranks):
        place = coordinates(parallel, rank)
        groups.setdefault(tuple(place[axis] for axis in others), []).append(rank)
    return list(groups.values())


def groups_of(parallel: Parallel) -> Iterator[tuple[str, list[int]]]:
    """Name and world ranks of every group that talks: one for each of the `SPANS`, `ENDS`, and neighbours in tensor.

    Where there are fewer key-value heads than tensor ranks, so many neighbours hold the same one.
    """
    for name, along in SPANS.items():
        yield from ((name, ranks) for ranks in members(parallel, *along))
    for ranks in members(parallel, "pipeline"):
        yield ENDS, [ranks[0], ranks[-1]] if len(ranks) > 1 else ranks
    proper = [n for n in range(2, parallel.tensor) if parallel.tensor % n == 0]
    for count, ranks in product(proper, members(parallel, "tensor")):
        yield from ((neighbours(count), ranks[at : at + count]) for at in range(0, len(ranks), count))
    # All of them: the same ranks as along the axis.
    yield from ((neighbours(parallel.tensor), ranks) for ranks in members(parallel, "tensor"))


def channels_of(parallel: Parallel) -> Iterator[tuple[str, list[int]]]:
    """Name and world ranks of every one of the `CHANNELS` that this pipeline uses."""
    if parallel.pipeline > 1:
        for name in CHANNELS[:: 1 if parallel.virtual > 1 else 2]:
            yield from ((name, ranks) for ranks in members(parallel, "pipeline"))


def alone(device: torch.device) -> Mesh:
    """A mesh of one rank, which talks to nobody."""
    return Mesh(Parallel(), world_rank=0, device=device)


def device_named(name: str) -> torch.device:
    """`cpu`, `cuda` or `cuda:N`. Raises ValueError where this host has no such device."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"there is no device {name!r}; use cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"there is no device {name}: torch sees {count} CUDA devices here; use fewer ranks, or cpu")
    return device


def build(
    parallel: Parallel,
    device: Literal["cpu", "cuda"] = "cpu",
    *,
    timeout: timedelta = timedelta(minutes=10),
    whereabouts: Whereabouts | None = None,
) -> Mesh:
    """Meet the other ranks and form the groups; every rank of the world calls this together.

    The rank comes from RANK, WORLD_SIZE and LOCAL_RANK, as torchrun sets them (without them: one rank). On CUDA each
    rank takes the device of its local rank. A collective that waits longer than `timeout` raises. An already formed
    world is used as it is and left open by `close`. Raises ValueError where `parallel` asks for other than those ranks,
    for a device that is not there, or for a pipeline on devices with too few queues.
    """
    me = standing()
    world_rank, world_size, local_rank = me.world_rank, me.world_size, me.local_rank
    if parallel.ranks != world_size:
        raise ValueError(
            f"parallel asks for {parallel.ranks} ranks ({_asked(parallel)}) but {world_size} run; "
            f"start {parallel.ranks} or change parallel"
        )
    if device == "cuda" and parallel.pipeline > 1:
        check_queues(me.queues)
    where = device_named(f"cuda:{local_rank}" if device == "cuda" else "cpu")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    stopwatch = Stopwatch(where, whereabouts)
    if world_size == 1:
        return Mesh(parallel, world_rank=0, device=where, stopwatch=stopwatch)
    with stopwatch.span("communication"):
        groups, owns_world = _meet(parallel, me, where, timeout)
    mesh = Mesh(parallel, world_rank, where, groups, owns_world, stopwatch)
    # torch returns as soon as this rank is connected: one that then left at once would break the others' connecting.
    mesh.barrier()
    return mesh


def check_queues(asked: str | None) -> None:
    """Raise ValueError where the environment gives a device fewer queues than a pipeline's streams need."""
    if asked is not None and not (asked.isdecimal() and int(asked) >= MOST_QUEUES):
        raise ValueError(
            f"with {QUEUES}={asked} the ranks of a pipeline could wait for one another for ever; "
            f"unset it, or set it to {MOST_QUEUES}"
        )


def _meet(
    parallel: Parallel, me: Standing, where: torch.device, timeout: timedelta
) -> tuple[dict[str, dist.ProcessGroup], bool]:
    """The groups that this rank is of, and whether the world was formed for them."""
    owns_world = not dist.is_initialized()
    if owns_world:
        dist.init_process_group(
            # gloo beside nccl: host tensors (object gathers, files' facts) travel without the device.
            backend="cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo",
            init_method=me.rendezvous or "env://",
            rank=me.world_rank,
            world_size=me.world_size,
            timeout=timeout,
        )
    formed: dict[tuple[int, ...], dist.ProcessGroup] = {}
    groups: dict[str, dist.ProcessGroup] = {}
    for name, ranks in groups_of(parallel):
        if len(ranks) == 1:
            continue
        # Every rank of the world takes part in forming every group, its own or not.
        same = tuple(ranks)
        if same not in formed:
            formed[same] = dist.new_group(ranks, timeout=timeout)
        if me.world_rank in ranks:
            groups[name] = formed[same]
    for name, ranks in channels_of(parallel):
        channel = dist.new_group(ranks, timeout=timeout)
        if me.world_rank in ranks:
            groups[name] = channel
    return groups, owns_world


def _asked(parallel: Parallel) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes(parallel).items())
