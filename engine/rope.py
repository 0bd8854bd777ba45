"""Rotary positions (Su et al. 2021, equation 34) and the ways to stretch them, each as `transformers` computes it.

B rows, T tokens, H heads, C half a head's width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from engine.config import ModelShape, kind_of_scaling


class Rope:
    """Angles for a model shape, scaled as its `rope_scaling` says."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self.shape = shape
        self.scaling: Mapping[str, Any] = shape.rope_scaling or {}
        self.type = kind_of_scaling(self.scaling)
        frequencies, self.amplitude = FREQUENCIES[self.type](shape, self.scaling)
        self.frequencies_C = frequencies.to(device)

    def angles(
        self, positions_BT: Tensor, dtype: torch.dtype, *, furthest: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each B T 1 C in `dtype`, at `positions_BT` (tokens, from 0).

        `furthest` is the last position that there is, for who has only some; None: it is among these.
        """
        frequencies_C = self.frequencies_C
        if self.type == "dynamic":
            frequencies_C = _stretched(
                self.shape, float(self.scaling["factor"]), (positions_BT.max() if furthest is None else furthest) + 1
            )
        turns_BT1C = (positions_BT[..., None].float() * frequencies_C).unsqueeze(2)
        cos_BT1C, sin_BT1C = turns_BT1C.cos() * self.amplitude, turns_BT1C.sin() * self.amplitude
        return cos_BT1C.to(dtype), sin_BT1C.to(dtype)


def rotate(x_BTHR: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + C) of a head's R = 2C elements by its angle. Saves no activation."""
    return cast(Tensor, _Rotate.apply(x_BTHR, *angles))  # type: ignore[no-untyped-call]


class _Rotate(torch.autograd.Function):
    """Forward: turn by the angle. Backward: turn back."""

    @staticmethod
    def forward(ctx: Any, x_BTHR: Tensor, cos_BT1C: Tensor, sin_BT1C: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BT1C, sin_BT1C)
        return _turned(x_BTHR, cos_BT1C, sin_BT1C)

    @staticmethod
    def backward(ctx: Any, grad_BTHR: Tensor) -> tuple[Tensor, None, None]:
        cos_BT1C, sin_BT1C = ctx.saved_tensors
        return _turned(grad_BTHR, cos_BT1C, -sin_BT1C), None, None


def _turned(x_BTHR: Tensor, cos_BT1C: Tensor, sin_BT1C: Tensor) -> Tensor:
    """Each half times its cosine, and then the other half times its sine added."""
    first, second = x_BTHR.chunk(2, dim=-1)
    sines = torch.cat((-sin_BT1C, sin_BT1C), -1)
    if not x_BTHR.is_cuda:
        # Without a stretch of memory that repeats, a CPU goes through all heads at once, however narrow they are.
        sines = sines.expand_as(x_BTHR).contiguous()
    turned = x_BTHR * torch.cat((cos_BT1C, cos_BT1C), -1)
    return turned.addcmul_(torch.cat((second, first), -1), sines)


def _plain(shape: ModelShape) -> Tensor:
    exponents_C = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    return 1.0 / (shape.rope_theta**exponents_C)


def _default(shape: ModelShape, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    return _plain(shape), 1.0


def _linear(shape: ModelShape, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    return _plain(shape) / scaling["factor"], 1.0


def _stretched(shape: ModelShape, factor: float, length: Tensor) -> Tensor:
    """Base grown with the sequence beyond the trained length ("dynamic NTK"); plain up to there."""
    width = shape.head_dim
    growth = factor * length.clamp_min(shape.max_seq_len) / shape.max_seq_len - (factor - 1)
    base = shape.rope_theta * growth ** (width / (width - 2))
    exponents_C = torch.arange(0, width, 2, dtype=torch.float32, device=length.device) / width
    return 1.0 / (base**exponents_C)


def _llama3(shape: ModelShape, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Long waves are slowed by `factor`, short ones kept, those between blended (Llama 3.1)."""
    plain_C = _plain(shape)
    factor, low, high = (scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = scaling.get("original_max_position_embeddings", shape.max_seq_len)
    waves_C = 2 * math.pi / plain_C
    slowed_C = torch.where(waves_C > original / low, plain_C / factor, plain_C)
    blend_C = (original / waves_C - low) / (high - low)
    blended_C = (1 - blend_C) * slowed_C / factor + blend_C * slowed_C
    between_C = ~(waves_C < original / high) & ~(waves_C > original / low)
    return torch.where(between_C, blended_C, slowed_C), 1.0


def _yarn(shape: ModelShape, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Blend of interpolated and plain frequencies by the turns each makes (Peng et al. 2023, section 3.2)."""
    width, base = shape.head_dim, shape.rope_theta
    original = scaling.get("original_max_position_embeddings", shape.max_seq_len)
    factor = scaling["factor"]
    if factor is None:
        factor = shape.max_seq_len / original

    def dim_turning(turns: float) -> float:
        return (width * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(base))

    low, high = dim_turning(scaling.get("beta_fast") or 32), dim_turning(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # as transformers does, so that the ramp has a slope
    ramp_C = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers_C = base ** (torch.arange(0, width, 2).float() / width)
    kept_C = 1 - ramp_C
    return 1.0 / (factor * powers_C) * (1 - kept_C) + 1.0 / powers_C * kept_C, _yarn_amplitude(factor, scaling)


def _yarn_amplitude(factor: float, scaling: Mapping[str, Any]) -> float:
    """Factor of cosines and sines (Peng et al. 2023, equation 22): attention's temperature."""

    def grown(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1.0)


FREQUENCIES: dict[str, Callable[[ModelShape, Mapping[str, Any]], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""Turns per token of each pair, and the amplitude, by `rope_type`. "dynamic" starts plain and depends on the length."""
