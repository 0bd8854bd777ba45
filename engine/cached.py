"""A few rows at a time, so that what is made of bf16 tensors in fp32 stays in the cores' caches.

Torch adds bf16 to fp32 element by element on a CPU; widened first, within the cache, it takes a third of the time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ELEMENTS = 2**18
"""Of fp32 that one core's cache keeps: 1 MiB."""

WIDENED = 2**20
"""Of a whole gradient, at once: further on in the caches, but a call of the optimizer's costs as much as 2^15."""


def rows_in_cache(x_ND: Tensor) -> int:
    """How many rows of `x_ND`, in fp32, the caches of the cores at work keep; all on a GPU, where launches count."""
    rows, features = x_ND.shape
    return rows if x_ND.is_cuda else min(rows, max(1, ELEMENTS * torch.get_num_threads() // features))


def add_wide(total: Tensor, part: Tensor, factor: float = 1.0) -> None:
    """Add `part`, of any type, times `factor` to an fp32 tensor of the same shape, in place."""
    if part.dtype == total.dtype or part.is_cuda:
        total.add_(part, alpha=factor)
        return
    total_N, part_N = total.view(-1), part.reshape(-1)
    block = rows_in_cache(total_N[:, None])
    wide_N = total_N.new_empty(block)
    for some_N, added_N in zip(torch.split(total_N, block), torch.split(part_N, block), strict=True):
        some_N.add_(wide_N[: len(added_N)].copy_(added_N), alpha=factor)


def widened(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """A tensor in fp32, flat, some elements at a time, with the place of the first. They are good until the next."""
    x_N = x.reshape(-1)
    if x_N.dtype == torch.float32:
        yield 0, x_N
        return
    wide_K = torch.empty(min(WIDENED, len(x_N)), dtype=torch.float32, device=x.device)
    for first, some_K in zip(range(0, len(x_N), WIDENED), torch.split(x_N, WIDENED), strict=True):
        yield first, wide_K[: len(some_K)].copy_(some_K)


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor times an fp32 scalar, rounded once to `dtype`; on a CPU no tensor of its size is made in fp32."""
    made = torch.empty_like(x, dtype=dtype)
    x_N, made_N = x.reshape(-1), made.view(-1)
    block = rows_in_cache(x_N[:, None])
    for some_N, rounded_N in zip(torch.split(x_N, block), torch.split(made_N, block), strict=True):
        # Of a bf16 tensor and a scalar on a GPU, torch would round the scalar first: all gradients by up to 0.2 %.
        rounded_N.copy_(some_N.float() * factor)
    return made
