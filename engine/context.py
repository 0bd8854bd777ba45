"""Ranks that share one sequence: which tokens each has, and how all their keys and values reach its queries.

A row is cut into 2C chunks, of which rank i of C has chunks i and 2C-1-i: under a causal mask a chunk costs the more
the later it stands, and such a pair costs the same on every rank (Grattafiori et al. 2024, section 3.3.2).

B rows, T tokens of a row, S tokens of this rank, Q queries of a run, G key-value heads of this rank, R width of a head,
E outputs of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from engine.comm import all_gather_flat, reduce_scatter_flat
from engine.mesh import Mesh
from engine.recompute import Kept
from engine.stopwatch import Stopwatch


@dataclass(frozen=True)
class ContextAxis:
    """The context axis as attention sees it."""

    size: int
    rank: int
    group: dist.ProcessGroup | None
    """None where there is one rank."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch, compare=False)
    """What waiting for the other ranks counts on."""

    @classmethod
    def of(cls, mesh: Mesh) -> ContextAxis:
        """The context axis of a mesh."""
        return cls(mesh.size("context"), mesh.rank("context"), mesh.group("context"), mesh.stopwatch)

    def runs(self, num_tokens: int) -> list[range]:
        """Places in a row of `num_tokens` of the tokens that this rank has: as runs, in order.

        Raises ValueError where the chunks can't be of one length.
        """
        if self.size == 1:
            return [range(num_tokens)]
        chunks = 2 * self.size
        if num_tokens % chunks:
            raise ValueError(
                f"context={self.size} cuts rows of {num_tokens} tokens into {chunks} chunks, which must divide them; "
                f"pad rows to {num_tokens + -num_tokens % chunks}"
            )
        each = num_tokens // chunks
        return [range(chunk * each, (chunk + 1) * each) for chunk in (self.rank, chunks - 1 - self.rank)]

    def places(self, num_tokens: int, device: torch.device) -> Tensor:
        """int64: places in a row of `num_tokens` of the tokens that this rank has."""
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in self.runs(num_tokens)])


def share(
    mix: Callable[[Tensor, Tensor], list[Tensor]], k_BSGR: Tensor, v_BSGR: Tensor, axis: ContextAxis, *, sparing: bool
) -> Tensor:
    """What `mix` makes for each run of queries from the keys and values of all ranks, put together: B S E.

    Each rank calls it with its own keys and values, and `mix` gets B T G R, in the order of the row. With `sparing`
    only its own are kept for backward, which gathers the others' once more: for whatever is not recomputed anyhow.
    """
    k_BTGR, v_BTGR = _GatherKeys.apply(k_BSGR, v_BSGR, axis)  # type: ignore[no-untyped-call]
    if not sparing or not torch.is_grad_enabled():
        return torch.cat(mix(k_BTGR, v_BTGR), dim=1)
    spared = _Spared(axis)
    with saved_tensors_hooks(spared.put_down, spared.take_up):
        parts_BQE = mix(k_BTGR, v_BTGR)
    mixed_BSE = torch.cat(parts_BQE, dim=1)
    spared.hold(k_BSGR, v_BSGR, gathered=k_BTGR, parts_BQE=parts_BQE, mixed_BSE=mixed_BSE)
    return mixed_BSE


class _GatherKeys(torch.autograd.Function):
    """Forward: a rank's keys and values become all ranks'. Backward: the parts of their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, k_BSGR: Tensor, v_BSGR: Tensor, axis: ContextAxis) -> tuple[Tensor, Tensor]:
        ctx.axis = axis
        k_BTGR, v_BTGR = _gathered(k_BSGR, v_BSGR, axis)
        return k_BTGR, v_BTGR

    @staticmethod
    def backward(ctx: Any, grad_k_BTGR: Tensor, grad_v_BTGR: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_k_BSGR, grad_v_BSGR = _scattered(grad_k_BTGR, grad_v_BTGR, ctx.axis)
        return grad_k_BSGR, grad_v_BSGR, None


def _gathered(k_BSGR: Tensor, v_BSGR: Tensor, axis: ContextAxis) -> Tensor:
    """2 B T G R: all ranks' keys and values, in the order of the row."""
    own = torch.stack((k_BSGR, v_BSGR))
    _, rows, tokens, *head = own.shape
    parts = own.new_empty(axis.size, *own.shape)
    with axis.stopwatch.span("communication"):
        all_gather_flat(parts.flatten(0, 1), own, group=axis.group)
    early, late = parts.chunk(2, dim=3)
    whole = own.new_empty(2, rows, 2 * axis.size, tokens // 2, *head)
    whole[:, :, : axis.size] = early.movedim(0, 2)
    whole[:, :, axis.size :] = late.flip(0).movedim(0, 2)
    return whole.flatten(2, 3)


def _scattered(k_BTGR: Tensor, v_BTGR: Tensor, axis: ContextAxis) -> Tensor:
    """2 B S G R: of the sum over ranks, what belongs to this rank's tokens. Mirror of `_gathered`."""
    whole = torch.stack((k_BTGR, v_BTGR))
    chunks = whole.chunk(2 * axis.size, dim=2)
    parts = torch.stack([torch.cat(pair, dim=2) for pair in zip(chunks[: axis.size], chunks[::-1], strict=False)])
    own = parts.new_empty(parts.shape[1:])
    with axis.stopwatch.span("communication"):
        reduce_scatter_flat(own, parts.flatten(0, 1), group=axis.group)
    return own


@dataclass(frozen=True)
class _Stretch:
    """Where a saved tensor lies in one that is there in backward."""

    base: int
    """0: the gathered keys and values; 1: what is made of all runs; then what lies in neither."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Spared:
    """What the core saves, in that order, held without what is there anyhow.

    Of the gathered keys and values the rank's own are held, and its outputs as parts of what is made of all runs, which
    the next layer keeps. All are put into one node of autograd's graph once the core is through, so that whoever
    meters, moves or recomputes saved tensors sees them: hooks within one another don't hear of each other.
    """

    def __init__(self, axis: ContextAxis) -> None:
        self.axis = axis
        self._saved: list[Tensor] = []
        """Until the core is through."""
        self._stretches: list[_Stretch] = []
        self._kept = Kept()
        self._bases: list[Tensor] = []
        """In backward, until the last is taken up."""
        self._left = 0

    def put_down(self, tensor: Tensor) -> int:
        self._saved.append(tensor.detach())
        return len(self._saved) - 1

    def hold(
        self, k_BSGR: Tensor, v_BSGR: Tensor, *, gathered: Tensor, parts_BQE: list[Tensor], mixed_BSE: Tensor
    ) -> None:
        """The core is through: from here on only the node of autograd's graph holds what it saved."""
        outputs = {_address(part): part for part in parts_BQE if part.is_contiguous()}
        starts = dict(
            zip(map(_address, parts_BQE), accumulate((part.shape[1] for part in parts_BQE), initial=0), strict=False)
        )
        others: list[Tensor] = []
        for saved in self._saved:
            base, stride, offset = 0, saved.stride(), int(saved.storage_offset())
            if (part := outputs.get(_address(saved))) is not None:
                # Rows lie further apart where all runs are, and the run begins somewhere within its row.
                rows, tokens = mixed_BSE.stride()[:2]
                base, stride = 1, tuple(rows if step == part.stride(0) else step for step in stride)
                offset += tokens * starts[_address(saved)]
            elif _address(saved) != _address(gathered):
                others.append(saved)
                base = 1 + len(others)
            self._stretches.append(_Stretch(base, saved.size(), stride, offset))
        self._saved.clear()
        self._kept = Kept(k_BSGR, v_BSGR, mixed_BSE, *others)

    def take_up(self, number: int) -> Tensor:
        if not self._left:
            k_BSGR, v_BSGR, *others = self._kept.tensors
            self._bases = [_gathered(k_BSGR, v_BSGR, self.axis), *others]
            self._left = len(self._stretches)
        stretch = self._stretches[number]
        saved = self._bases[stretch.base].detach().as_strided(stretch.size, stretch.stride, stretch.offset)
        self._left -= 1
        if not self._left:
            self._bases = []
        return saved


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
