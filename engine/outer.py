"""Gradients of matrices: sums over tokens of the outer product of an output's gradient and an input.

Both factors have a token a row, and a product whose sum runs along its factors' rows has to turn one of them. On a CPU
the library (oneDNN 3.12) does so anew for each 64 columns of the outcome, which takes as long as the product itself; so
it is given one that was turned before.

N tokens, D features of the input, E outputs, M rows and K columns of any matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TILES = (64, 96, 48, 32)
"""Rows that are turned at once, best first."""
GAP = 32
"""Elements between the rows of what was turned: without, those of 2048 tokens fall on the same lines of a cache."""
WIDE = 512
"""Columns of an outcome from which turning a factor for it alone is cheaper than leaving that to the library."""


def outer_sums(grads_NE: Sequence[Tensor], x_ND: Tensor) -> list[Tensor]:
    """Each gradient's product with the input that they share, E D."""
    if not (_is_turned(x_ND) and all(map(_is_turned, grads_NE))):
        return [grad_NE.t() @ x_ND for grad_NE in grads_NE]
    if len(grads_NE) > 1 and tile_of(x_ND.shape[1]):
        x_DN = turned(x_ND, gap=GAP)
        return [turned(x_DN @ grad_NE) for grad_NE in grads_NE]
    if x_ND.shape[1] < WIDE:
        return [grad_NE.t() @ x_ND for grad_NE in grads_NE]
    return [turned(grad_NE, gap=GAP) @ x_ND for grad_NE in grads_NE]


def turned(x_MK: Tensor, *, gap: int = 0) -> Tensor:
    """The same numbers in K rows, by products with ones: the only way at which matrix units help.

    M is a multiple of a tile, and all numbers are finite: one that is not makes NaN of a tile's width of others.
    `gap` elements lie between the rows.
    """
    rows, columns = x_MK.shape
    tile = tile_of(rows)
    ones = torch.eye(tile, dtype=x_MK.dtype).expand(rows // tile, tile, tile)
    turned_KM = x_MK.new_empty(columns, rows + gap)[:, :rows]
    tiles = x_MK.view(-1, tile, columns).transpose(1, 2)
    torch.bmm(tiles, ones, out=turned_KM.view(columns, -1, tile).transpose(0, 1))
    return turned_KM


def tile_of(rows: int) -> int:
    """Rows to turn at once; 0 where no tile divides them."""
    return next((tile for tile in TILES if rows % tile == 0), 0)


def _is_turned(x_NK: Tensor) -> bool:
    """Products of bf16 on a CPU are the ones that gain, of rows that tiles divide."""
    return x_NK.dtype == torch.bfloat16 and x_NK.device.type == "cpu" and tile_of(len(x_NK)) > 0
