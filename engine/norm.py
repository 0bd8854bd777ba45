"""Root-mean-square norm that saves its input and one statistic per token (Zhang & Sennrich 2019, equation 4).

B rows, S tokens of this rank, D features.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.comm import TensorAxis
from engine.placement import Placement, place


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps), statistics in fp32. The weight is replicated over the tensor axis."""

    def __init__(
        self,
        size: int,
        eps: float,
        axis: TensorAxis,
        *,
        of_heads: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`of_heads`: what is normed are this rank's heads, not its tokens."""
        super().__init__()
        self.eps = eps
        # Each rank sees its own heads only, or, under sequence parallelism, tokens: it has a part of the gradient.
        partial = axis.size > 1 if of_heads else axis.sequence
        self.weight = place(
            nn.Parameter(torch.ones(size, dtype=dtype, device=device)),
            Placement((size,), copy=axis.rank, partial="tensor" if partial else None),
        )

    def forward(self, x_BSD: Tensor) -> Tensor:
        """B S D to B S D, or with another dim before the last."""
        return cast(Tensor, _RMSNorm.apply(x_BSD, self.weight, self.eps))  # type: ignore[no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    """Saves the input, which the residual keeps alive anyway, and 1 / rms in fp32: 4 bytes a token."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        wide_BSD = x_BSD.float()
        scale_BS1 = torch.rsqrt(wide_BSD.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x_BSD, weight_D, scale_BS1)
        return (wide_BSD * scale_BS1).to(x_BSD.dtype).mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_BSD, weight_D, scale_BS1 = ctx.saved_tensors
        normed_BSD = x_BSD.float() * scale_BS1
        wide_BSD = grad_BSD.float()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (wide_BSD * normed_BSD).flatten(0, -2).sum(0).to(weight_D.dtype)
        if ctx.needs_input_grad[0]:
            inner_BSD = wide_BSD * weight_D
            shared_BS1 = (inner_BSD * normed_BSD).mean(-1, keepdim=True)
            grad_x = inner_BSD.sub_(normed_BSD.mul_(shared_BS1)).mul_(scale_BS1).to(x_BSD.dtype)
        return grad_x, grad_weight, None
