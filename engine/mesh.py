"""Ranks arranged along axes, with the process groups that follow. The mesh is passed to whoever talks: none is global.

World ranks are an arange reshaped to (pipeline, data, context, tensor): tensor is fastest, so its ranks are neighbours
(Narayanan et al. 2021, section 3: tensor within a host, pipeline across hosts).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import Literal

import torch
import torch.distributed as dist

from engine.config import Parallel
from engine.standing import standing

Axis = Literal["tensor", "context", "data", "pipeline"]

AXES: tuple[Axis, ...] = ("tensor", "context", "data", "pipeline")
"""Fastest first."""


@dataclass
class Mesh:
    """One rank's view of all ranks."""

    parallel: Parallel
    world_rank: int
    device: torch.device
    groups: Mapping[Axis, dist.ProcessGroup] = field(default_factory=dict)
    """Groups of this rank along the axes that are longer than one."""
    owns_world: bool = False
    """Whether `close` also ends torch's default process group."""

    def size(self, axis: Axis) -> int:
        """Ranks along `axis`."""
        return sizes(self.parallel)[axis]

    def rank(self, axis: Axis) -> int:
        """This rank's coordinate along `axis`, from 0."""
        return coordinates(self.parallel, self.world_rank)[axis]

    def group(self, axis: Axis) -> dist.ProcessGroup | None:
        """The ranks that differ from this one along `axis` only; None where there is but one."""
        return self.groups.get(axis)

    def barrier(self) -> None:
        """Wait until each rank of the world has come here."""
        if self.parallel.ranks > 1:
            # On the host: a device barrier has to guess the device, and waits for its work too.
            dist.all_reduce(torch.zeros(()))

    def close(self) -> None:
        """Leave the groups. Nothing may be in flight."""
        for group in self.groups.values():
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


def members(parallel: Parallel, axis: Axis) -> list[list[int]]:
    """Every group of world ranks that differ along `axis` only."""
    stride = prod(size for other, size in sizes(parallel).items() if AXES.index(other) < AXES.index(axis))
    size = sizes(parallel)[axis]
    firsts = [rank for rank in range(parallel.ranks) if coordinates(parallel, rank)[axis] == 0]
    return [[first + stride * i for i in range(size)] for first in firsts]


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
    parallel: Parallel, device: Literal["cpu", "cuda"] = "cpu", *, timeout: timedelta = timedelta(minutes=10)
) -> Mesh:
    """Meet the other ranks and form the groups; every rank of the world calls this together.

    The rank comes from RANK, WORLD_SIZE and LOCAL_RANK, as torchrun sets them (without them: one rank). On CUDA each
    rank takes the device of its local rank. A collective that waits longer than `timeout` raises. An already formed
    world is used as it is and left open by `close`. Raises ValueError where `parallel` asks for other than those ranks,
    or for a device that is not there.
    """
    me = standing()
    world_rank, world_size, local_rank = me.world_rank, me.world_size, me.local_rank
    if parallel.ranks != world_size:
        raise ValueError(
            f"parallel asks for {parallel.ranks} ranks ({_asked(parallel)}) but {world_size} run; "
            f"start {parallel.ranks} or change parallel"
        )
    where = device_named(f"cuda:{local_rank}" if device == "cuda" else "cpu")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if world_size == 1:
        return Mesh(parallel, world_rank=0, device=where)
    owns_world = not dist.is_initialized()
    if owns_world:
        dist.init_process_group(
            # gloo beside nccl: host tensors (object gathers, files' facts) travel without the device.
            backend="cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo",
            init_method=me.rendezvous or "env://",
            rank=world_rank,
            world_size=world_size,
            timeout=timeout,
        )
    groups: dict[Axis, dist.ProcessGroup] = {}
    for axis, size in sizes(parallel).items():
        if size == 1:
            continue
        for ranks in members(parallel, axis):
            # Every rank of the world takes part in forming every group, its own or not.
            group = dist.new_group(ranks, timeout=timeout)
            if world_rank in ranks:
                groups[axis] = group
    return Mesh(parallel, world_rank, where, groups, owns_world)


def _asked(parallel: Parallel) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes(parallel).items())
