"""Where a parameter's local piece lies in the global tensor. What the tensor is cut for is the layers' business."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class Placement:
    """A rank's piece of a global tensor: everything, or a run of indices of one dim."""

    shape: tuple[int, ...]
    """Shape of the global tensor, at its true size."""
    dim: int | None = None
    """The dim that is cut over the tensor axis; None: each tensor rank holds the whole."""
    start: int = 0
    """First index of the piece along `dim`."""
    length: int = 0
    """Indices of the piece along `dim`. A local tensor may be longer: the rest is padding, kept at zero."""
    gradient_partial: bool = False
    """Each tensor rank's gradient is only a part: sum it over the tensor axis before use. Only where `dim` is None."""

    def piece(self, whole: Tensor) -> Tensor:
        """This rank's piece, without padding, as a view of the global tensor."""
        return whole if self.dim is None else whole.narrow(self.dim, self.start, self.length)

    def true_part(self, local: Tensor) -> Tensor:
        """The local tensor without its padding, as a view."""
        return local if self.dim is None else local.narrow(self.dim, 0, self.length)


def shard(shape: tuple[int, ...], *, dim: int, rank: int, size: int) -> Placement:
    """Rank `rank` of `size`'s share of `dim`: runs of ceil(n / size), so that the last ones may be short or empty."""
    each = -(-shape[dim] // size)
    start = min(rank * each, shape[dim])
    return Placement(shape, dim, start, min(each, shape[dim] - start))


def place(parameter: Parameter, placement: Placement) -> Parameter:
    """Attach its placement to a parameter; readers use `placement_of`."""
    parameter.placement = placement  # type: ignore[attr-defined]
    return parameter


def placement_of(parameter: Tensor) -> Placement:
    """The placement of a parameter of a decoder."""
    return cast(Placement, parameter.placement)  # type: ignore[attr-defined]


def empty_local(placement: Placement, *, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of the local piece's shape, padding included, where `dim` is shared by `size` ranks."""
    shape = list(placement.shape)
    if placement.dim is not None:
        shape[placement.dim] = -(-shape[placement.dim] // size)
    return torch.zeros(shape, dtype=dtype, device=device)
