"""Matrices shared over the tensor axis (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, figure 5).

A column layer shares its outputs and a row layer its inputs, so that one follows the other with one exchange on the way
in and one on the way out.

B rows, T tokens, S tokens of this rank, N rows and tokens in one, D features, E outputs of this rank, F inputs of this
rank, V vocab shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.comm import TensorAxis, start_gather_tokens, start_sum_parts
from engine.dropout import Draw
from engine.landing import landing_of
from engine.outer import outer_sums
from engine.placement import Placement, empty_local, place, placement_of, shard


class ColumnLinear(nn.Module):
    """y = x W^T + b with W's rows, the outputs, and b shared. Layers of one input run together through `columns`.

    With `copies`, so many neighbours hold the same outputs.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        axis: TensorAxis,
        *,
        bias: bool = False,
        copies: int = 1,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.axis = axis
        self.weight = _parameter((outputs, inputs), 0, axis, copies=copies, dtype=dtype, device=device)
        self.bias = _parameter((outputs,), 0, axis, copies=copies, dtype=dtype, device=device) if bias else None
        self.adapter: nn.Module | None = None
        """What is added to the output, computed from the same input: B S D to B T E."""


class RowLinear(nn.Module):
    """y = x W^T + b with W's columns, the inputs, shared: each rank has a part of every output; the parts are summed.

    The bias is replicated, and added to the sum: once.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        axis: TensorAxis,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.axis = axis
        self.weight = _parameter((outputs, inputs), 1, axis, dtype=dtype, device=device)
        self.bias: nn.Parameter | None = None
        if bias:
            # Under sequence parallelism each rank adds it to its own tokens, and so has a part of the gradient.
            placement = Placement((outputs,), copy=axis.rank, partial="tensor" if axis.sequence else None)
            self.bias = place(nn.Parameter(torch.zeros(outputs, dtype=dtype, device=device)), placement)
        self.adapter: nn.Module | None = None
        """What is added to the output, computed from the same input: B T F to B S D."""

    def forward(self, x_BTF: Tensor, draw: Draw | None) -> Tensor:
        """B T F of this rank's features to B S D of all features and this rank's tokens."""
        y_BSD = cast(Tensor, _Row.apply(x_BTF, self.weight, self.axis))  # type: ignore[no-untyped-call]
        if self.bias is not None:
            y_BSD = y_BSD + self.bias
        return y_BSD if self.adapter is None else y_BSD + self.adapter(x_BTF, draw)


class VocabEmbedding(nn.Module):
    """Rows of a table whose vocabulary is shared, padded to a multiple of the ranks."""

    def __init__(self, vocab: int, size: int, axis: TensorAxis, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.axis = axis
        self.weight = _parameter((vocab, size), 0, axis, dtype=dtype, device=device)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """int64 ids B T to this rank's tokens B S D. Ids must lie in the true vocabulary."""
        placement = placement_of(self.weight)
        x_BSD = _Lookup.apply(tokens_BT, self.weight, placement, self.axis)  # type: ignore[no-untyped-call]
        return cast(Tensor, x_BSD)


class PositionEmbedding(nn.Module):
    """Rows of a replicated table, one for each position (Radford et al. 2018)."""

    def __init__(self, length: int, size: int, axis: TensorAxis, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        # Under sequence parallelism each rank looks up its own tokens', and so has a part of the gradient.
        placement = Placement((length, size), copy=axis.rank, partial="tensor" if axis.sequence else None)
        self.weight = place(nn.Parameter(torch.zeros(length, size, dtype=dtype, device=device)), placement)

    def forward(self, positions_BS: Tensor) -> Tensor:
        """int64 positions B S, below the table's length, to B S D."""
        alone = TensorAxis(1, 0, None, False)
        x_BSD = _Lookup.apply(positions_BS, self.weight, placement_of(self.weight), alone)  # type: ignore[no-untyped-call]
        return cast(Tensor, x_BSD)


def columns(x_BSD: Tensor, layers: Sequence[ColumnLinear], draw: Draw | None) -> list[Tensor]:
    """Each layer's outputs B T E for one input, whose tokens are gathered once and whose gradient is summed once."""
    weights_ED = [layer.weight for layer in layers]
    outputs: list[Tensor] = list(_Columns.apply(x_BSD, layers[0].axis, *weights_ED))  # type: ignore[no-untyped-call]
    for number, layer in enumerate(layers):
        if layer.bias is not None:
            outputs[number] = outputs[number] + layer.bias
        if layer.adapter is not None:
            outputs[number] = outputs[number] + layer.adapter(x_BSD, draw)
    return outputs


class _Columns(torch.autograd.Function):
    """Forward: gather tokens, multiply. Backward: multiply, sum the parts. Mirror of _Row.

    Under sequence parallelism the rank's own tokens are saved and gathered once more in backward, meanwhile the input's
    gradient is computed; its sum is under way while the weights' gradients are computed.
    """

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, axis: TensorAxis, *weights_ED: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        # Frozen matrices have no gradient, and theirs is all that needs the input.
        ctx.learns = any(ctx.needs_input_grad[2:])
        ctx.save_for_backward(*weights_ED, *([x_BSD] if ctx.learns else []))
        x_BTD = start_gather_tokens(x_BSD, axis).wait()
        return tuple(x_BTD @ weight_ED.t() for weight_ED in weights_ED)

    @staticmethod
    def backward(ctx: Any, *grads_BTE: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        weights_ED = saved[: len(grads_BTE)]
        gathering = start_gather_tokens(saved[-1], ctx.axis) if ctx.learns else None
        summing = None
        if ctx.needs_input_grad[0]:
            summing = start_sum_parts(_through(grads_BTE, weights_ED), ctx.axis)
        grads_ED: list[Tensor | None] = [None] * len(weights_ED)
        if gathering is not None:
            x_ND = gathering.wait().flatten(0, -2)
            learning = [number for number, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
            found = outer_sums([grads_BTE[number].flatten(0, -2) for number in learning], x_ND)
            for number, grad_ED in zip(learning, found, strict=True):
                grads_ED[number] = grad_ED
        return (None if summing is None else summing.wait(), None, *grads_ED)


class _Row(torch.autograd.Function):
    """Forward: multiply, sum the parts. Backward: gather tokens, multiply. Mirror of _Columns."""

    @staticmethod
    def forward(ctx: Any, x_BTF: Tensor, weight_DF: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        ctx.learns = ctx.needs_input_grad[1]
        ctx.save_for_backward(weight_DF, *([x_BTF] if ctx.learns else []))
        return start_sum_parts(x_BTF @ weight_DF.t(), axis).wait()

    @staticmethod
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_BTD = start_gather_tokens(grad_BSD, ctx.axis).wait()
        weight_DF, *inputs = ctx.saved_tensors
        grad_x = grad_BTD @ weight_DF if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.learns:
            (grad_weight,) = outer_sums([grad_BTD.flatten(0, -2)], inputs[0].flatten(0, -2))
        return grad_x, grad_weight, None


class _Lookup(torch.autograd.Function):
    """Forward: each rank looks up the ids it holds, the parts are summed. Backward: gather tokens, add up per id."""

    @staticmethod
    def forward(ctx: Any, tokens_BT: Tensor, weight_VD: Tensor, placement: Placement, axis: TensorAxis) -> Tensor:
        local_BT = tokens_BT - placement.start
        absent_BT1 = None
        if axis.size > 1:
            absent_BT1 = ((local_BT < 0) | (local_BT >= placement.length)).unsqueeze(-1)
            local_BT = local_BT.masked_fill(absent_BT1.squeeze(-1), 0)
        x_BTD = torch.nn.functional.embedding(local_BT, weight_VD)
        if absent_BT1 is not None:
            x_BTD = x_BTD.masked_fill_(absent_BT1, 0)
        ctx.axis, ctx.num_rows, ctx.dtype = axis, weight_VD.shape[0], weight_VD.dtype
        ctx.save_for_backward(local_BT, absent_BT1)
        ctx.landing = landing_of(weight_VD)
        return start_sum_parts(x_BTD, axis).wait()

    @staticmethod
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[None, Tensor | None, None, None]:
        local_BT, absent_BT1 = ctx.saved_tensors
        # In fp32, for a frequent id adds up many small numbers.
        grad_BTD = start_gather_tokens(grad_BSD, ctx.axis).wait().float()
        if absent_BT1 is not None:
            grad_BTD = grad_BTD.masked_fill(absent_BT1, 0)
        if ctx.landing is not None and not grad_BTD.is_cuda:
            ctx.landing.opened().index_add_(0, local_BT.flatten(), grad_BTD.flatten(0, 1))
            return None, None, None, None
        # Sorted by id on a GPU, and so repeatable, unlike `index_add_`.
        grad_VD = torch.ops.aten.embedding_dense_backward(grad_BTD, local_BT, ctx.num_rows, -1, False)
        return None, grad_VD.to(ctx.dtype), None, None


def _through(grads_BTE: Sequence[Tensor], weights_ED: Sequence[Tensor]) -> Tensor:
    """Gradient of the shared input: sum over layers of grad W."""
    rows, tokens, _ = grads_BTE[0].shape
    grad_ND = grads_BTE[0].flatten(0, -2) @ weights_ED[0]
    for grad_BTE, weight_ED in zip(grads_BTE[1:], weights_ED[1:], strict=True):
        grad_ND.addmm_(grad_BTE.flatten(0, -2), weight_ED)
    return grad_ND.view(rows, tokens, -1)


def _parameter(
    shape: tuple[int, ...], dim: int, axis: TensorAxis, *, copies: int = 1, dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    placement = shard(shape, dim=dim, rank=axis.rank, size=axis.size, copies=copies)
    return place(nn.Parameter(empty_local(placement, dtype=dtype, device=device)), placement)
