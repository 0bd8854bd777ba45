"""The gated feed-forward part of a layer: down(silu(gate(x)) * up(x)) (Shazeer 2020, SwiGLU).

B rows, T tokens, S tokens of this rank, D features, F inner features of this rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.comm import TensorAxis
from engine.config import ModelShape
from engine.dropout import Draw
from engine.ledger import Ledger
from engine.linear import ColumnLinear, RowLinear, columns


class MLP(nn.Module):
    """Gate and up share their outputs over the tensor axis, down its inputs."""

    def __init__(
        self, shape: ModelShape, axis: TensorAxis, *, ledger: Ledger, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.ledger = ledger
        inner, bias = shape.ffn_hidden_size, shape.mlp_bias
        self.gate_proj = ColumnLinear(shape.hidden_size, inner, axis, bias=bias, dtype=dtype, device=device)
        self.up_proj = ColumnLinear(shape.hidden_size, inner, axis, bias=bias, dtype=dtype, device=device)
        self.down_proj = RowLinear(inner, shape.hidden_size, axis, bias=bias, dtype=dtype, device=device)

    def forward(self, x_BSD: Tensor, draw: Draw | None) -> Tensor:
        """B S D to B S D."""
        gate_BTF, up_BTF = self.ledger.output("up_projection", columns, x_BSD, (self.gate_proj, self.up_proj), draw)
        return cast(Tensor, self.down_proj(self.ledger.output("activation", swiglu, gate_BTF, up_BTF), draw))


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
