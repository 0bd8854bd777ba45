"""What ranks of the tensor axis say to one another, as autograd pairs. What they compute between is the layers' part.

Without sequence parallelism each rank holds all T tokens; with it, S = T / size of them between the layers' matrices
(Korthikanti et al. 2022, section 4.2.2). Both cases have the same two pairs, so that layers are written once:

- `gather_tokens`, a rank's tokens become all tokens (without SP: nothing to do), and its mirror
- `sum_parts`, the ranks' partial results are summed, each rank keeping its tokens (without SP: all of them).

B rows, T tokens, S tokens of this rank, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from engine.mesh import Mesh
from engine.stopwatch import Stopwatch

# torch 2.13 renamed both; 2.11 knows the old names only.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class TensorAxis:
    """The tensor axis as a layer sees it."""

    size: int
    rank: int
    group: dist.ProcessGroup | None
    """None where there is one rank."""
    sequence: bool
    """Tokens are shared between the matrices; never with one rank."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch, compare=False)
    """What waiting for the other ranks counts on."""

    @classmethod
    def of(cls, mesh: Mesh) -> TensorAxis:
        """The tensor axis of a mesh."""
        size = mesh.size("tensor")
        sequence = mesh.parallel.sequence and size > 1
        return cls(size, mesh.rank("tensor"), mesh.group("tensor"), sequence, mesh.stopwatch)

    def tokens(self, num_tokens: int) -> slice:
        """The run of a row's tokens that this rank holds between the matrices.

        Raises ValueError where the ranks can't share the tokens evenly.
        """
        if not self.sequence:
            return slice(0, num_tokens)
        if num_tokens % self.size:
            raise ValueError(
                f"sequence parallelism shares {num_tokens} tokens among {self.size} ranks, which must divide them; "
                f"pad rows to {num_tokens + -num_tokens % self.size}"
            )
        each = num_tokens // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


@dataclass(frozen=True)
class Pending:
    """A collective that may still be under way, so that the caller can compute meanwhile."""

    work: dist.Work | None
    result: Callable[[], Tensor]
    stopwatch: Stopwatch
    """What waiting counts on."""

    def wait(self) -> Tensor:
        """The outcome, once it is there."""
        if self.work is not None:
            with self.stopwatch.span("communication"):
                self.work.wait()
        return self.result()


def start_gather_tokens(x_BSD: Tensor, axis: TensorAxis) -> Pending:
    """Begin to turn this rank's tokens into all tokens, B T D."""
    if not axis.sequence:
        return Pending(None, lambda: x_BSD, axis.stopwatch)
    rows, tokens, *features = x_BSD.shape
    parts = x_BSD.new_empty(axis.size, rows, tokens, *features)
    work = all_gather_flat(parts.flatten(0, 1), x_BSD.contiguous(), group=axis.group, async_op=True)
    # Ranks are the slow dim of what arrives; with one row this is already the order of tokens and costs no copy.
    return Pending(work, lambda: parts.transpose(0, 1).reshape(rows, axis.size * tokens, *features), axis.stopwatch)


def start_sum_parts(x_BTD: Tensor, axis: TensorAxis) -> Pending:
    """Begin to sum the ranks' parts of all tokens into this rank's tokens, B S D. `x_BTD` may be overwritten."""
    if axis.group is None:
        return Pending(None, lambda: x_BTD, axis.stopwatch)
    if not axis.sequence:
        whole = x_BTD.contiguous()
        return Pending(dist.all_reduce(whole, group=axis.group, async_op=True), lambda: whole, axis.stopwatch)
    rows, tokens, *features = x_BTD.shape
    parts = x_BTD.reshape(rows, axis.size, tokens // axis.size, *features).transpose(0, 1).contiguous()
    mine = parts.new_empty(parts.shape[1:])
    work = reduce_scatter_flat(mine, parts.flatten(0, 1), group=axis.group, async_op=True)
    return Pending(work, lambda: mine, axis.stopwatch)


class _GatherTokens(torch.autograd.Function):
    """Forward: a rank's tokens become all. Backward: the parts of the gradient are summed. Mirror of _SumParts."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        x_BTD = start_gather_tokens(x_BSD, axis).wait()
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
        return start_sum_parts(grad_BTD.clone(), ctx.axis).wait(), None


class _SumParts(torch.autograd.Function):
    """Forward: partial results are summed, each rank keeps its tokens. Backward: gather. Mirror of _GatherTokens."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return start_sum_parts(x_BTD.clone(), axis).wait()

    @staticmethod
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor, None]:
        return start_gather_tokens(grad_BSD, ctx.axis).wait(), None


def gather_tokens(x_BSD: Tensor, axis: TensorAxis) -> Tensor:
    """All tokens, B T D, from each rank's own. In backward each rank's gradient is taken for a part and summed."""
    return x_BSD if axis.group is None else cast(Tensor, _GatherTokens.apply(x_BSD, axis))  # type: ignore[no-untyped-call]


def sum_parts(x_BTD: Tensor, axis: TensorAxis) -> Tensor:
    """This rank's tokens, B S D, of the sum over ranks. In backward each rank receives the gradient of all tokens."""
    return x_BTD if axis.group is None else cast(Tensor, _SumParts.apply(x_BTD, axis))  # type: ignore[no-untyped-call]


def sum_over(x: Tensor, axis: TensorAxis) -> Tensor:
    """Sum over the ranks, in place, outside autograd; bitwise the same on each."""
    if axis.group is not None:
        with axis.stopwatch.span("communication"):
            dist.all_reduce(x, group=axis.group)
    return x


def max_over(x: Tensor, axis: TensorAxis) -> Tensor:
    """Largest over the ranks, in place, outside autograd."""
    if axis.group is not None:
        with axis.stopwatch.span("communication"):
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=axis.group)
    return x


def gather_dim(x: Tensor, dim: int, axis: TensorAxis, *, every: int = 1) -> Tensor:
    """The ranks' equal pieces of `dim` put together, outside autograd; those of `every` so many neighbours are one."""
    if axis.group is None:
        return x
    parts = x.new_empty(axis.size, *x.shape)
    with axis.stopwatch.span("communication"):
        all_gather_flat(parts.flatten(0, 1), x.contiguous(), group=axis.group)
    return torch.cat(parts[::every].unbind(0), dim=dim)
