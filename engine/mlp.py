"""The feed-forward part of a layer: down(silu(gate(x)) * up(x)) (Shazeer 2020, SwiGLU), or down(gelu(up(x))).

B rows, T tokens, S tokens of this rank, D features, F inner features of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.comm import TensorAxis
from engine.config import ModelShape
from engine.dropout import Draw
from engine.ledger import Ledger
from engine.linear import ColumnLinear, RowLinear, columns


class MLP(nn.Module):
    """Up and, where the family has one, gate share their outputs over the tensor axis, down its inputs."""

    def __init__(
        self, shape: ModelShape, axis: TensorAxis, *, ledger: Ledger, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.ledger = ledger
        inner, bias = shape.ffn_hidden_size, shape.mlp_bias
        self._inward, self._activation = KINDS[shape.family.mlp]
        for name in self._inward:
            column = ColumnLinear(shape.hidden_size, inner, axis, bias=bias, dtype=dtype, device=device)
            self.add_module(name, column)
        self.down_proj = RowLinear(inner, shape.hidden_size, axis, bias=bias, dtype=dtype, device=device)

    def forward(self, x_BSD: Tensor, draw: Draw | None) -> Tensor:
        """B S D to B S D."""
        inward = [cast(ColumnLinear, self.get_submodule(name)) for name in self._inward]
        inner = self.ledger.output("up_projection", columns, x_BSD, inward, draw)
        return cast(Tensor, self.down_proj(self.ledger.output("activation", self._activation, *inner), draw))


def swiglu(gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
    """silu(gate) * up, B T F. Saves its two inputs only."""
    return cast(Tensor, _SwiGLU.apply(gate_BTF, up_BTF))  # type: ignore[no-untyped-call]


class _SwiGLU(torch.autograd.Function):
    """Computes silu(gate) again in backward instead of saving it."""

    @staticmethod
    def forward(ctx: Any, gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_BTF, up_BTF)
        return torch.nn.functional.silu(gate_BTF).mul_(up_BTF)

    @staticmethod
    def backward(ctx: Any, grad_BTF: Tensor) -> tuple[Tensor, Tensor]:
        gate_BTF, up_BTF = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grad_BTF * up_BTF, gate_BTF)
        return grad_gate, torch.nn.functional.silu(gate_BTF).mul_(grad_BTF)


def gelu(x_BTF: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), B T F. Saves its input only."""
    return cast(Tensor, _GELU.apply(x_BTF))  # type: ignore[no-untyped-call]


class _GELU(torch.autograd.Function):
    """The output is saved by the matrix behind it (Korthikanti et al. 2022, section 4.1)."""

    @staticmethod
    def forward(ctx: Any, x_BTF: Tensor) -> Tensor:
        ctx.save_for_backward(x_BTF)
        return torch.nn.functional.gelu(x_BTF, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, grad_BTF: Tensor) -> Tensor:
        (x_BTF,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(grad_BTF, x_BTF, approximate="tanh")  # type: ignore[no-any-return]


KINDS: Mapping[str, tuple[tuple[str, ...], Callable[..., Tensor]]] = {
    "swiglu": (("gate_proj", "up_proj"), swiglu),
    "gelu": (("up_proj",), gelu),
}
"""By `Traits.mlp`: the matrices on the way in, and what is made of their outputs."""
