"""Grouped-query attention over packed documents, within a window or without; heads are shared over the tensor axis.

B rows, T tokens, S tokens of this rank, Q queries and K keys of one view, D features, H heads and G key-value heads of
this rank, R width of a head, E outputs of this rank. T are those of this context rank; a row has W in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from engine import alibi
from engine.comm import TensorAxis
from engine.config import ModelShape
from engine.context import ContextAxis, share
from engine.dropout import Draw, dropout_of_pairs
from engine.ledger import Ledger
from engine.linear import ColumnLinear, RowLinear, columns
from engine.norm import RMSNorm
from engine.rope import rotate
from engine.scores import plain_core
from engine.unfused import unfused_core


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

    def copy(self) -> Cache:
        """Another with the same tokens, which goes on by itself."""
        other = copy(self)
        other._store = torch.zeros_like(self._store)
        other._store[:, :, :, : self.length] = self._store[:, :, :, : self.length]
        return other


@dataclass(frozen=True)
class View:
    """A run of queries, and the run of keys that has all they see."""

    queries: range
    """Places in the row."""
    keys: range
    """Places in the row. They end where the queries do."""
    mask_BHQK: Tensor | None = None
    """Added to the scores, with dims of one where it is the same for all: minus infinity where a query may not look, 0
    or the head's bias elsewhere. None: 0 for the query itself and all before it."""


@dataclass(frozen=True)
class Segment:
    """The tokens that one text gets in a pass over several texts, which lie side by side along T of a single row."""

    tokens: slice
    """Where they are in the pass."""
    view: View
    """What they see of their own text."""
    cache: Cache
    """The text so far; one row."""


@dataclass(frozen=True)
class Frame:
    """What all layers of one pass share: where the tokens stand, and which tokens they see."""

    views: tuple[View, ...]
    """What the queries see, run after run of them, in order."""
    angles: tuple[Tensor, Tensor] | None = None
    """Cosines and sines of the rotary positions, each B T 1 R/2; None where positions are told otherwise."""
    context: ContextAxis | None = None
    """Ranks that have the other tokens of the rows; None: each has all of them."""
    draw: Draw | None = None
    """What dropout masks are drawn from; None: no dropout."""
    cache: Cache | None = None
    """Earlier tokens, when generating."""
    segments: tuple[Segment, ...] = ()
    """Where several texts go on at once: one each, in the order of the tokens. They have own caches and views."""


def views(
    runs: Sequence[range],
    dtype: torch.dtype,
    device: torch.device,
    *,
    window: int | None = None,
    documents_BW: Tensor | None = None,
    slopes_H: Tensor | None = None,
) -> tuple[View, ...]:
    """What each run of queries sees: itself and what stands before it in the row.

    With a `window` that is its last tokens, the token itself among them; with `documents_BW`, its own document's. With
    `slopes_H` the scores of each head fall with distance.
    """
    return tuple(_view(run, dtype, device, window, documents_BW, slopes_H) for run in runs)


def _view(
    queries: range,
    dtype: torch.dtype,
    device: torch.device,
    window: int | None,
    documents_BW: Tensor | None,
    slopes_H: Tensor | None,
) -> View:
    first = 0 if window is None else max(0, queries.start - window + 1)
    keys = range(first, queries.stop)
    plain = documents_BW is None and slopes_H is None
    sees_all = len(queries) == 1 or (queries == keys and (window is None or window >= len(queries)))
    if plain and sees_all:
        return View(queries, keys)
    past = queries.start - first
    sees_B1QK = torch.ones(1, 1, len(queries), len(keys), dtype=torch.bool, device=device).tril(past)
    if window is not None:
        sees_B1QK = sees_B1QK.triu(past - window + 1)
    if documents_BW is not None:
        query_B1Q1 = documents_BW[:, None, queries.start : queries.stop, None]
        key_B11K = documents_BW[:, None, None, keys.start : keys.stop]
        sees_B1QK = sees_B1QK & (query_B1Q1 == key_B11K)
    # As the kernels want it, made once: of booleans each layer would make, and keep, numbers of its own.
    bias = torch.zeros((), dtype=dtype, device=device)
    if slopes_H is not None:
        bias = alibi.bias(slopes_H, queries, keys).to(dtype)
    return View(queries, keys, torch.where(sees_B1QK, bias, float("-inf")))


class Attention(nn.Module):
    """Projections, norms of heads and rotary positions where the family has them, core.

    The core is `unfused` where that is asked for, and where probabilities are dropped.
    """

    def __init__(
        self,
        shape: ModelShape,
        layer: int,
        axis: TensorAxis,
        *,
        ledger: Ledger,
        unfused: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.layer, self.head_dim, self.ledger = layer, shape.head_dim, ledger
        # Other context ranks' keys and values are gone by backward, be it with all that the core saves.
        self.sparing = not ledger.operations & {"attention_core", "layer"}
        self.unfused, self.rate = unfused, shape.attention_dropout
        self.first_head = axis.rank * (shape.num_heads // axis.size)
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
        if frame.angles is not None:
            q, k = made(rotate, q, frame.angles), made(rotate, k, frame.angles)
        part = self._core(frame.draw)
        if frame.segments:
            return cast(Tensor, self.o_proj(self._each_text(q, k, v, frame.segments, part), frame.draw))
        if frame.cache is not None:
            k, v = frame.cache.extend(self.layer, k, v)
        mixed_BTE = self.ledger.region("attention_core", mix, q, k, v, frame, part, self.sparing)
        return cast(Tensor, self.o_proj(mixed_BTE, frame.draw))

    def _each_text(
        self, q_BTHR: Tensor, k_BTGR: Tensor, v_BTGR: Tensor, segments: Sequence[Segment], part: Core
    ) -> Tensor:
        """`part` for each text by itself, whatever its length, so that none is padded: B T (H R)."""
        mixed = []
        for segment in segments:
            k_BWGR, v_BWGR = segment.cache.extend(self.layer, k_BTGR[:, segment.tokens], v_BTGR[:, segment.tokens])
            keys = slice(segment.view.keys.start, segment.view.keys.stop)
            mixed.append(part(q_BTHR[:, segment.tokens], k_BWGR[:, keys], v_BWGR[:, keys], segment.view))
        return torch.cat(mixed, dim=1)

    def _core(self, draw: Draw | None) -> Core:
        if not self.rate or draw is None:
            return partial(_unfused, dropped=None) if self.unfused else core
        dropped = partial(
            dropout_of_pairs,
            rate=self.rate,
            draw=draw,
            stream=f"model.layers.{self.layer}.self_attn.core",
            first_head=self.first_head,
            saves_mask="dropout" not in self.ledger.operations,
        )
        return partial(_unfused, dropped=partial(self.ledger.output, "dropout", dropped))


Core = Callable[[Tensor, Tensor, Tensor, View], Tensor]
"""Queries B Q H R, keys and values B K G R and what the queries see, to B Q (H R)."""


def mix(q_BTHR: Tensor, k_BTGR: Tensor, v_BTGR: Tensor, frame: Frame, part: Core, sparing: bool) -> Tensor:
    """`part` for each view of `frame`, whatever rank has the keys: B T (H R). `sparing` is `context.share`'s."""

    def each_view(k_BWGR: Tensor, v_BWGR: Tensor) -> list[Tensor]:
        parts, at = [], 0
        for view in frame.views:
            keys = slice(view.keys.start, view.keys.stop)
            q_BQHR = q_BTHR[:, at : at + len(view.queries)]
            parts.append(part(q_BQHR, k_BWGR[:, keys], v_BWGR[:, keys], view))
            at += len(view.queries)
        return parts

    if frame.context is None:
        (mixed_BTE,) = each_view(k_BTGR, v_BTGR)
        return mixed_BTE
    return share(each_view, k_BTGR, v_BTGR, frame.context, sparing=sparing)


def core(q_BQHR: Tensor, k_BKGR: Tensor, v_BKGR: Tensor, view: View) -> Tensor:
    """softmax(Q K^T / sqrt(R)) V, heads side by side: B Q (H R). `view` says what its queries see of its keys."""
    if q_BQHR.dtype == torch.bfloat16 and not q_BQHR.is_cuda and torch.is_grad_enabled():
        return plain_core(q_BQHR, k_BKGR, v_BKGR, view.mask_BHQK)
    return fused_core(q_BQHR, k_BKGR, v_BKGR, view.mask_BHQK)


def fused_core(q_BQHR: Tensor, k_BKGR: Tensor, v_BKGR: Tensor, mask_BHQK: Tensor | None) -> Tensor:
    """`core`, forward and backward, by torch's fused kernels. `mask_BHQK` is a view's."""
    q_BHQR, k_BGKR, v_BGKR = (x.transpose(1, 2) for x in (q_BQHR, k_BKGR, v_BKGR))
    groups = q_BHQR.shape[1] // k_BGKR.shape[1]
    if groups > 1 and mask_BHQK is not None and q_BHQR.is_cuda:
        # The CUDA kernel that takes a mask knows no groups, and torch would fall back to whole score matrices.
        k_BGKR, v_BGKR = (x.repeat_interleave(groups, dim=1) for x in (k_BGKR, v_BGKR))
        groups = 1
    mixed_BHQR = scaled_dot_product_attention(
        q_BHQR,
        k_BGKR,
        v_BGKR,
        attn_mask=mask_BHQK,
        # Torch counts a causal mask from the first key, and a lone query is at the last.
        is_causal=mask_BHQK is None and q_BHQR.shape[2] > 1,
        enable_gqa=groups > 1,
    )
    return mixed_BHQR.transpose(1, 2).flatten(2)


def _unfused(
    q_BQHR: Tensor, k_BKGR: Tensor, v_BKGR: Tensor, view: View, *, dropped: Callable[..., Tensor] | None
) -> Tensor:
    """`core` by way of score matrices. `dropped` says what is left of the probabilities at the places of a view."""
    return unfused_core(
        q_BQHR,
        k_BKGR,
        v_BKGR,
        view.mask_BHQK,
        dropped=None if dropped is None else lambda chances_BHQK: dropped(chances_BHQK, view.queries, view.keys),
    )
