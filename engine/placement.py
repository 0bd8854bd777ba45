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
    pieces: int = 1
    """Different pieces along `dim`. Fewer than there are tensor ranks: neighbours hold the same."""
    copy: int = 0
    """Number of this rank among those, of one replica, that hold the same. The first counts, and is what is saved."""
    partial: str | None = None
    """The mesh group over whose ranks the gradient is only a part, to be summed before use; None: it is whole."""

    def piece(self, whole: Tensor) -> Tensor:
        """This rank's piece, without padding, as a view of the global tensor."""
        return whole if self.dim is None else whole.narrow(self.dim, self.start, self.length)

    def true_part(self, local: Tensor) -> Tensor:
        """The local tensor without its padding, as a view."""
        return local if self.dim is None else local.narrow(self.dim, 0, self.length)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of the local tensor, padding included."""
        return tuple(-(-size // self.pieces) if dim == self.dim else size for dim, size in enumerate(self.shape))


def shard(shape: tuple[int, ...], *, dim: int, rank: int, size: int, copies: int = 1) -> Placement:
    """Rank `rank` of `size`'s share of `dim`: runs of ceil(n / pieces), so that the last ones may be short or empty.

    Each piece is held by `copies` ranks side by side, each of which has a part of its gradient.
    """
    number, copy = divmod(rank, copies)
    pieces = size // copies
    each = -(-shape[dim] // pieces)
    start = min(number * each, shape[dim])
    length = min(each, shape[dim] - start)
    return Placement(shape, dim, start, length, pieces, copy, neighbours(copies) if copies > 1 else None)


def neighbours(ranks: int) -> str:
    """Name of the mesh group of so many tensor ranks side by side."""
    return f"tensor/{ranks}"


def place(parameter: Parameter, placement: Placement) -> Parameter:
    """Attach its placement to a parameter; readers use `placement_of`."""
    parameter.placement = placement  # type: ignore[attr-defined]
    return parameter


def placement_of(parameter: Tensor) -> Placement:
    """The placement of a parameter of a decoder."""
    return cast(Placement, parameter.placement)  # type: ignore[attr-defined]


def empty_local(placement: Placement, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of the local piece's shape, padding included."""
    return torch.zeros(placement.local_shape, dtype=dtype, device=device)
