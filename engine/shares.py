"""AdamW over a replica's rows of each parameter: masters, gradients and moments in fp32, nothing of it held twice.

Who shares the rows out, and gathers them for use, is `engine.sharding`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from engine.config import Training
from engine.gather import merged
from engine.model import Decoder
from engine.optimizer import Held, Piece, kind_of, move, norm_over, square_sum
from engine.pieces import Rectangle, globally, without_padding
from engine.placement import placement_of


@dataclass(frozen=True)
class Share(Held):
    """A replica's rows of a parameter, of which there may be none, and what AdamW keeps of them."""

    rows: Rectangle
    """Where they lie in the local tensor."""
    weight: Tensor
    average: Tensor
    square: Tensor


class ShareOptimizer:
    """Updates the shares of a decoder that was shared out. An `AnyOptimizer`."""

    def __init__(self, decoder: Decoder, *, training: Training) -> None:
        self.mesh, self.training = decoder.mesh, training
        self.steps = 0
        """Updates done since the moments were zero."""
        self.slots = [
            self._share(name, parameter) for name, parameter in decoder.named_parameters() if parameter.requires_grad
        ]
        self.shapes = merged(decoder.mesh, {share.name: list(share.placement.shape) for share in self.slots})
        """Global shape of every trainable parameter, of all stages."""
        self._units = [module for module in decoder.modules() if isinstance(module, FSDPModule)]
        self._gradients: list[Tensor] = []

    def _share(self, name: str, parameter: Parameter) -> Share:
        weight = _local(parameter)
        # As torch.chunk deals rows out.
        each = -(-parameter.shape[0] // self.mesh.size("replicas"))
        start = min(self.mesh.rank("replicas") * each, parameter.shape[0])
        assert weight.shape[0] == min(each, parameter.shape[0] - start)
        rows = Rectangle((start, *(0 for _ in weight.shape[1:])), tuple(weight.shape))
        state = (torch.zeros_like(weight), torch.zeros_like(weight))
        return Share(name, parameter, placement_of(parameter), kind_of(parameter), rows, weight, *state)

    @torch.no_grad()
    def sum_gradients(self) -> float:
        """Sum over tensor ranks what each has a part of, and return the global L2 norm; replicas are summed already."""
        self._gradients = [_taken(share) for share in self.slots]
        partial: dict[str, list[Tensor]] = {}
        for share, gradient in zip(self.slots, self._gradients, strict=True):
            if share.kind.partial:
                partial.setdefault(share.kind.partial, []).append(gradient)
        with self.mesh.exchange():
            for name, gradients in partial.items():
                if (group := self.mesh.group(name)) is not None:
                    _sum_over(group, gradients)
        return self._norm()

    def _norm(self) -> float:
        """L2 norm of the global gradient: shares are added up, and what several ranks hold counts once."""
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for share, gradient in zip(self.slots, self._gradients, strict=True):
            if share.kind.copy == 0:
                total += square_sum(gradient)
        return norm_over(self.mesh, total, "model", "replicas")

    @torch.no_grad()
    def update(self, *, lr: float, norm: float) -> None:
        """Clip by `norm`, which `sum_gradients` found, update this rank's shares, and let go of what was gathered."""
        assert isfinite(norm), "the caller stops at a gradient that is not finite"
        for decays in (True, False):
            own = [
                (share.weight, gradient, share.average, share.square)
                for share, gradient in zip(self.slots, self._gradients, strict=True)
                if share.kind.decays == decays and gradient.numel() > 0
            ]
            if own:
                weights, gradients, averages, squares = map(list, zip(*own, strict=True))
                move(
                    weights,
                    gradients,
                    averages,
                    squares,
                    steps=self.steps,
                    lr=lr,
                    norm=norm,
                    decays=decays,
                    training=self.training,
                )
        self._gradients = []
        self.steps += 1
        self.publish()

    @torch.no_grad()
    def drop_gradients(self) -> float:
        """Forget the gradients that have come since the last step; the L2 norm of the replicas' sum of them."""
        self._gradients = []
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for share in self.slots:
            total += square_sum(_taken(share))
        return norm_over(self.mesh, total, "replicas")

    @torch.no_grad()
    def restart(self, weights: Mapping[str, Tensor]) -> None:
        """Begin anew from these weights of this rank's model: no moments, no updates."""
        for share in self.slots:
            share.weight.copy_(weights[share.name][share.rows.offset[0] : share.rows.stop[0]])
            share.average.zero_()
            share.square.zero_()
        self.steps = 0
        self.publish()

    def publish(self) -> None:
        """Let go of what was gathered of the weights; it is gathered anew, from the masters, when it is needed."""
        for unit in self._units:
            unit.reshard()

    def pieces(self) -> Iterator[Piece]:
        """This rank's rows of each global parameter, padding left out."""
        for share in self.slots:
            true = without_padding(share.rows, share.placement)
            if true is None:
                continue
            states = {"weight": share.weight, "average": share.average, "square": share.square}
            tensors = {key: state[true.within(share.rows)] for key, state in states.items()}
            yield Piece(share.name, globally(true, share.placement), tensors, share.kind.copy == 0)


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows, without their graph."""
    return cast(DTensor, tensor.detach()).to_local()


def _taken(share: Share) -> Tensor:
    """The gradient of a step, which the next one does not add to."""
    gradient, share.parameter.grad = share.parameter.grad, None
    return torch.zeros_like(share.weight) if gradient is None else _local(gradient)


def _sum_over(group: dist.ProcessGroup, tensors: list[Tensor]) -> None:
    """Sum each over the group's ranks, in place, in one exchange."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, summed in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(summed.view_as(tensor))
