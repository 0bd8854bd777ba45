"""What several ranks hold must be the same on each of them, bit for bit; this finds the first difference there is.

Such are the weights of data replicas, norms and some biases over the tensor axis, key-value heads that are held twice,
a tied embedding on two pipeline stages, and the optimizer's numbers of each of these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.failure import RunFailure
from engine.mesh import Mesh
from engine.optimizer import AnyOptimizer
from engine.placement import placement_of

CHUNK = 2**18
"""Elements that are widened at once: 2 MiB, which a core's cache keeps."""
PRIME = 1_000_003
_INTEGERS = {2: torch.int16, 4: torch.int32}
"""Dtype of the same width as so many bytes."""


class Replicas:
    """The tensors of a model and its optimizer that other ranks hold, too. Every rank calls the methods together."""

    def __init__(self, model: nn.Module, optimizer: AnyOptimizer, mesh: Mesh) -> None:
        self.model, self.optimizer, self.mesh = model, optimizer, mesh
        self.holders: dict[str, list[int]] = {}
        """Ranks that hold it, for each thing that more than one does; the same on every rank."""
        if mesh.parallel.ranks == 1:
            return
        held: list[list[str]] = [[] for _ in range(mesh.parallel.ranks)]
        with mesh.exchange():
            dist.all_gather_object(held, [name for name, _ in self._held()])
        holders = defaultdict(list)
        for rank, names in enumerate(held):
            for name in names:
                holders[name].append(rank)
        self.holders = {name: ranks for name, ranks in sorted(holders.items()) if len(ranks) > 1}

    def check(self) -> None:
        """Raise RunFailure on every rank, naming what differs and where, if anything does."""
        if not self.holders:
            return
        own = {name: checksum(tensor) for name, tensor in self._held() if name in self.holders}
        nothing = torch.zeros((), dtype=torch.int64, device=self.mesh.device)
        sums_K = torch.stack([own.get(name, nothing) for name in self.holders]).cpu()
        everyones = [torch.empty_like(sums_K) for _ in range(self.mesh.parallel.ranks)]
        with self.mesh.exchange():
            dist.all_gather(everyones, sums_K)
        differing = []
        for number, (name, holders) in enumerate(self.holders.items()):
            by_sum: dict[int, list[int]] = defaultdict(list)
            for rank in holders:
                by_sum[int(everyones[rank][number])].append(rank)
            if len(by_sum) > 1:
                # Where most agree, they come first.
                parties = sorted(by_sum.values(), key=lambda party: (-len(party), party))
                differing.append(
                    f"{name} differs between ranks that must hold the same, {' and '.join(map(str, parties))}"
                )
        if differing:
            more = f"; so do {len(differing) - 1} more" if len(differing) > 1 else ""
            raise RunFailure(
                "internal",
                differing[0] + more,
                "Go on from the last checkpoint, where they were the same. If it comes back on the same rank, its "
                "memory or its network may be faulty; if it moves, this is a fault of ours.",
            )

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank holds, under a name that says which part of which thing it is."""
        # What is shared out is no replica's twice, and what tensor ranks have twice of it are the optimizer's numbers.
        parameters = [] if self.mesh.parallel.is_shared_out else self.model.named_parameters()
        for name, parameter in parameters:
            where = placement_of(parameter)
            part = "" if where.dim is None else f" (dim {where.dim} from {where.start})"
            yield f"{name}{part}", parameter.detach()
        for piece in self.optimizer.pieces():
            for key, tensor in piece.tensors.items():
                yield f"{piece.parameter} (optimizer's {key}, {piece.box.size} from {piece.box.offset})", tensor


def checksum(x: Tensor) -> Tensor:
    """int64 scalar that any one flipped bit, or two elements changed for one another, makes another.

    Sums of the elements' bits, each times an odd number of its place, modulo 2^64: the same in whatever order.
    """
    bits_N = x.contiguous().view(-1).view(_INTEGERS[x.element_size()])
    odd_C = torch.arange(1, 2 * min(CHUNK, len(bits_N)) + 1, 2, device=x.device)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for chunk in torch.split(bits_N, CHUNK):
        total = total * PRIME + (chunk * odd_C[: len(chunk)]).sum()
    return total
