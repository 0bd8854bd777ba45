"""What a device of this host really does, in a second or so: `python -m engine calibrate`. Plans go by it.

Matrix products and copies are timed at sizes that fill a device, so that the figures are the most there is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from engine.mesh import device_named
from engine.plan.cluster import Device, Link, as_facts, known

SECONDS = 0.25
"""Of each measurement, about."""
WIDTH = {"cpu": 768, "cuda": 8192}
"""Of the square matrices that are multiplied: large enough to be as fast as any, small enough to be done soon."""
COPIED = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Bytes of the tensor that is copied: more than caches hold."""
SMALL = 64
"""Elements of a tensor whose sum takes as long as any operation must."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
HOST_LINK_SHARE = 0.1
"""Of the bandwidth of a host's memory, what messages between its processes reach: several copies, through sockets."""
HOST_LATENCY = 300e-6
"""Seconds of a message between two processes of a host, about: both must get a core for it."""


def main(device: str = "cpu", *, threads: int | None = None) -> int:
    """Write the figures of a slot to stdout, as one JSON object. Raises ValueError where there is no such device."""
    if threads is not None:
        torch.set_num_threads(threads)
    where = device_named(device)
    sys.stdout.write(f"{json.dumps(as_facts(*measured(where)))}\n")
    return 0


def measured(where: torch.device) -> tuple[Device, Link]:
    """A slot of this host, and what links it with the next."""
    bandwidth = copied(where)
    device = Device(
        name=torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        flops={name: multiplied(where, dtype) for name, dtype in DTYPES.items()},
        bandwidth=bandwidth,
        efficiency=1.0,
        launch=launched(where),
        measured=True,
    )
    return device, linked(device) if where.type == "cuda" else Link(bandwidth * HOST_LINK_SHARE, HOST_LATENCY)


def multiplied(where: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product."""
    width = WIDTH[where.type]
    one = torch.ones(width, width, dtype=dtype, device=where)
    two, into = torch.ones_like(one), torch.empty_like(one)
    return 2 * width**3 / _seconds(lambda: torch.mm(one, two, out=into), where)


def copied(where: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(COPIED[where.type] // 4, device=where)
    into = torch.empty_like(source)
    return 2 * COPIED[where.type] / _seconds(lambda: into.copy_(source), where)


def launched(where: torch.device) -> float:
    """Seconds of an operation on next to nothing, with what autograd does for it."""
    small = torch.ones(SMALL, device=where, requires_grad=True)

    def chain() -> Tensor:
        x = small
        for _ in range(10):
            x = x + 1
        return x

    return _seconds(chain, where) / 10


def linked(device: Device) -> Link:
    """Between two GPUs of this host: a copy's speed where there are two, else what the maker says."""
    if torch.cuda.device_count() > 1:
        source = torch.ones(COPIED["cuda"] // 16, device="cuda:0")
        into = torch.empty_like(source, device="cuda:1")
        size = source.numel() * source.element_size()
        return Link(size / _seconds(lambda: into.copy_(source), source.device), 10e-6)
    entry = known(device.name)
    return entry[1] if entry is not None else Link(25e9, 10e-6)


def _seconds(work: Callable[[], object], where: torch.device) -> float:
    """Of doing `work` once, the best of some: what else the host does only makes it slower."""
    work()
    best = float("inf")
    until = perf_counter() + SECONDS
    while perf_counter() < until:
        _finish(where)
        began = perf_counter()
        work()
        _finish(where)
        best = min(best, perf_counter() - began)
    return best


def _finish(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)
