"""Grouped-query attention over packed documents, within a window or without; heads are shared over the tensor axis.

B rows, T tokens, S tokens of this rank, K keys in sight, D features, H heads and G key-value heads of this rank,
R width of a head, E outputs of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from engine.comm import TensorAxis
from engine.config import ModelShape
from engine.dropout import Draw
from engine.ledger import Ledger
from engine.linear import ColumnLinear, RowLinear, columns
from engine.norm import RMSNorm
from engine.rope import rotate


class Cache:
    """Keys and values of the tokens seen so far, of every layer, with room for `tokens`."""

    def __init__(
        self, shape: ModelShape, axis: TensorAxis, *, rows: int, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (shape.num_layers, 2, rows, tokens, max(1, shape.num_kv_heads // axis.size), shape.head_dim)
        self._store = torch.zeros(size, dtype=dtype, device=device)
        self.capacity = tokens
        self.length = 0
        """Tokens held; the decoder advances it after each pass."""

    def extend(self, layer: int, keys_BTGR: Tensor, values_BTGR: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the new tokens of `layer`; all its keys and values, B K G R. Raises ValueError beyond the capacity."""
        end = self.length + keys_BTGR.shape[1]
        if end > self.capacity:
            raise ValueError(f"{end} tokens don't fit a cache of {self.capacity}; make it larger")
        keys, values = self._store[layer]
        keys[:, self.length : end] = keys_BTGR
        values[:, self.length : end] = values_BTGR
        return keys[:, :end], values[:, :end]


@dataclass(frozen=True)
class Frame:
    """What all layers of one pass share: where the tokens stand, and which tokens they see."""

    angles: tuple[Tensor, Tensor]
    """Cosines and sines of the rotary positions, each B T 1 R/2."""
    sees_B1TK: Tensor | None = None
    """True where a token may look. None: at itself and everything before it."""
    draw: Draw | None = None
    """What dropout masks are drawn from; None: no dropout."""
    cache: Cache | None = None
    """Earlier tokens, when generating."""


def sight(
    tokens: int, device: torch.device, *, past: int = 0, window: int | None = None, documents_BT: Tensor | None = None
) -> Tensor | None:
    """bool B or 1, 1 T K: what `tokens` after `past` others see; None where that is themselves and all before them.

    With a `window` those are its last tokens, the token itself among them; with `documents_BT`, its own document's.
    """
    if not past and documents_BT is None and (window is None or window >= tokens):
        return None
    sees_TK = torch.ones(tokens, past + tokens, dtype=torch.bool, device=device).tril(past)
    if window is not None:
        sees_TK = sees_TK.triu(past - window + 1)
    if documents_BT is None:
        return sees_TK[None, None]
    return (documents_BT[:, :, None] == documents_BT[:, None, :]).logical_and_(sees_TK).unsqueeze(1)


class Attention(nn.Module):
    """Projections, norms of heads where the family has them, rotary positions, core."""

    def __init__(
        self,
        shape: ModelShape,
        layer: int,
        axis: TensorAxis,
        *,
        ledger: Ledger,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.layer, self.head_dim, self.ledger = layer, shape.head_dim, ledger
        heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        bias = shape.attention_bias != "none"
        self.q_proj = ColumnLinear(shape.hidden_size, heads, axis, bias=bias, dtype=dtype, device=device)
        # Neighbours whose query heads share a key-value head each hold that head.
        column = partial(ColumnLinear, copies=max(1, axis.size // shape.num_kv_heads), dtype=dtype, device=device)
        self.k_proj = column(shape.hidden_size, kv_heads, axis, bias=bias)
        self.v_proj = column(shape.hidden_size, kv_heads, axis, bias=bias)
        bias = shape.attention_bias == "all"
        self.o_proj = RowLinear(heads, shape.hidden_size, axis, bias=bias, dtype=dtype, device=device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if shape.qk_norm:
            norm = partial(RMSNorm, shape.head_dim, shape.norm_eps, axis, of_heads=True, dtype=dtype, device=device)
            self.q_norm, self.k_norm = norm(), norm()

    def forward(self, x_BSD: Tensor, frame: Frame) -> Tensor:
        """B S D to B S D."""
        made = partial(self.ledger.output, "qkv")
        q, k, v = (
            y_BTE.view(*y_BTE.shape[:2], -1, self.head_dim)
            for y_BTE in made(columns, x_BSD, (self.q_proj, self.k_proj, self.v_proj), frame.draw)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = made(self.q_norm, q), made(self.k_norm, k)
        q, k = made(rotate, q, frame.angles), made(rotate, k, frame.angles)
        if frame.cache is not None:
            k, v = frame.cache.extend(self.layer, k, v)
        mixed_BTE = self.ledger.region("attention_core", core, q, k, v, frame.sees_B1TK)
        return cast(Tensor, self.o_proj(mixed_BTE, frame.draw))


def core(q_BTHR: Tensor, k_BKGR: Tensor, v_BKGR: Tensor, sees_B1TK: Tensor | None) -> Tensor:
    """softmax(Q K^T / sqrt(R)) V, heads side by side: B T (H R). Without `sees_B1TK` it is causal, and T equals K."""
    q_BHTR, k_BGKR, v_BGKR = (x.transpose(1, 2) for x in (q_BTHR, k_BKGR, v_BKGR))
    groups = q_BHTR.shape[1] // k_BGKR.shape[1]
    if groups > 1 and sees_B1TK is not None and q_BHTR.is_cuda:
        # The CUDA kernel that takes a mask knows no groups, and torch would fall back to whole score matrices.
        k_BGKR, v_BGKR = (x.repeat_interleave(groups, dim=1) for x in (k_BGKR, v_BGKR))
        groups = 1
    mixed_BHTR = scaled_dot_product_attention(
        q_BHTR, k_BGKR, v_BGKR, attn_mask=sees_B1TK, is_causal=sees_B1TK is None, enable_gqa=groups > 1
    )
    return mixed_BHTR.transpose(1, 2).flatten(2)
