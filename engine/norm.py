"""Norms that save their input and a token's statistics: RMSNorm (Zhang & Sennrich 2019, equation 4) and LayerNorm.

B rows, S tokens of this rank, N of both in one, K of a block, D features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.cached import rows_in_cache
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
        x_ND = x_BSD.reshape(-1, x_BSD.shape[-1])
        y_ND = torch.empty_like(x_ND)
        scale_N1 = x_ND.new_empty((len(x_ND), 1), dtype=torch.float32)
        block = rows_in_cache(x_ND)
        wide_ND = torch.empty_like(x_ND[:block], dtype=torch.float32)
        pieces = (x_ND, y_ND, scale_N1)
        for x_KD, y_KD, scale_K1 in zip(*(torch.split(piece, block) for piece in pieces), strict=True):
            wide_KD = wide_ND[: len(x_KD)].copy_(x_KD)
            torch.linalg.vector_norm(wide_KD, dim=-1, keepdim=True, out=scale_K1)
            scale_K1.square_().div_(x_ND.shape[1]).add_(eps).rsqrt_()
            y_KD.copy_(wide_KD.mul_(scale_K1)).mul_(weight_D)
        ctx.save_for_backward(x_BSD, weight_D, scale_N1)
        return y_ND.view(x_BSD.shape)

    @staticmethod
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_BSD, weight_D, scale_N1 = ctx.saved_tensors
        x_ND, grad_ND = (piece.reshape(-1, piece.shape[-1]) for piece in (x_BSD, grad_BSD))
        weight_D = weight_D.float()
        sum_D = torch.zeros_like(weight_D)
        grad_x_ND = torch.empty_like(x_ND)
        block = rows_in_cache(x_ND)
        normed_ND, wide_ND = (torch.empty_like(x_ND[:block], dtype=torch.float32) for _ in range(2))
        pieces = (x_ND, grad_ND, grad_x_ND, scale_N1)
        for x_KD, grad_KD, grad_x_KD, scale_K1 in zip(*(torch.split(piece, block) for piece in pieces), strict=True):
            normed_KD = normed_ND[: len(x_KD)].copy_(x_KD).mul_(scale_K1)
            wide_KD = wide_ND[: len(x_KD)].copy_(grad_KD)
            product_KD = wide_KD * normed_KD
            sum_D += product_KD.sum(0)
            shared_K1 = (product_KD @ weight_D).div_(len(weight_D)).unsqueeze(-1)
            wide_KD.mul_(weight_D).addcmul_(normed_KD, shared_K1, value=-1).mul_(scale_K1)
            grad_x_KD.copy_(wide_KD)
        grad_x = grad_x_ND.view(x_BSD.shape) if ctx.needs_input_grad[0] else None
        return grad_x, sum_D.to(x_BSD.dtype) if ctx.needs_input_grad[1] else None, None


class LayerNorm(nn.Module):
    """y = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias, statistics in fp32 (Ba et al. 2016, equation 4).

    Weight and bias are replicated over the tensor axis.
    """

    def __init__(self, size: int, eps: float, axis: TensorAxis, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        # Under sequence parallelism each rank sees its own tokens, and so has a part of the gradient.
        placement = Placement((size,), copy=axis.rank, partial="tensor" if axis.sequence else None)
        self.weight = place(nn.Parameter(torch.ones(size, dtype=dtype, device=device)), placement)
        self.bias = place(nn.Parameter(torch.zeros(size, dtype=dtype, device=device)), placement)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """B S D to B S D."""
        normed_BSD = _LayerNorm.apply(x_BSD, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        return cast(Tensor, normed_BSD)


class _LayerNorm(torch.autograd.Function):
    """Saves the input, which the residual keeps alive anyway, mean and 1 / deviation in fp32: 8 bytes a token."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
        wide_BSD = x_BSD.float()
        variance_BS1, mean_BS1 = torch.var_mean(wide_BSD, -1, correction=0, keepdim=True)
        scale_BS1 = variance_BS1.add_(eps).rsqrt_()
        ctx.save_for_backward(x_BSD, weight_D, mean_BS1, scale_BS1)
        return ((wide_BSD - mean_BS1) * scale_BS1).mul_(weight_D).add_(bias_D).to(x_BSD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_BSD, weight_D, mean_BS1, scale_BS1 = ctx.saved_tensors
        normed_BSD = (x_BSD.float() - mean_BS1) * scale_BS1
        wide_BSD = grad_BSD.float()
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_weight = (wide_BSD * normed_BSD).flatten(0, -2).sum(0).to(weight_D.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = wide_BSD.flatten(0, -2).sum(0).to(weight_D.dtype)
        if ctx.needs_input_grad[0]:
            inner_BSD = wide_BSD * weight_D
            level_BS1 = inner_BSD.mean(-1, keepdim=True)
            shared_BS1 = (inner_BSD * normed_BSD).mean(-1, keepdim=True)
            grad_x = inner_BSD.sub_(level_BS1).sub_(normed_BSD.mul_(shared_BS1)).mul_(scale_BS1).to(x_BSD.dtype)
        return grad_x, grad_weight, grad_bias, None


NORMS: Mapping[str, type[RMSNorm] | type[LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}
"""By `Traits.norm`."""
