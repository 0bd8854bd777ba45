"""A few rows at a time, so that what is made of bf16 tensors in fp32 stays in the cores' caches.

Torch adds bf16 to fp32 element by element on a CPU; widened first, within the cache, it takes a third of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from engine.plan.passing import alike

ELEMENTS = 2**18
"""Of fp32 that one core's cache keeps: 1 MiB."""

WIDENED = 2**22
"""Of whole gradients, at once: further on in the caches, but each stretch takes a dozen calls of the optimizer's."""


def rows_in_cache(x_ND: Tensor) -> int:
    """How many rows of `x_ND`, in fp32, to take at a time: as many as the caches of the cores at work keep, or fewer.

    All on a GPU, where launches count.
    """
    rows, features = x_ND.shape
    # A hundredth more is no harm, and may spare the calls of a whole block for two rows that are left over.
    return rows if x_ND.is_cuda else alike(rows, int(1.01 * ELEMENTS * torch.get_num_threads()) // features)


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


def widened(parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Tensors of one type in fp32, flat and side by side: some elements at a time, with the place of the first.

    They are good until the next. What is fp32 already comes as it is, a tensor at a time.
    """
    flat = [part.reshape(-1) for part in parts]
    first = 0
    if flat and flat[0].dtype == torch.float32:
        for x_N in flat:
            yield first, x_N
            first += x_N.shape[0]
        return
    wide_K = torch.empty(min(WIDENED, sum(x_N.shape[0] for x_N in flat)), dtype=torch.float32, device=flat[0].device)
    filled = 0
    for some_K in chain.from_iterable(torch.split(x_N, WIDENED) for x_N in flat):
        size = some_K.shape[0]
        if filled + size > WIDENED:
            yield first, wide_K[:filled]
            first, filled = first + filled, 0
        wide_K[filled : filled + size].copy_(some_K)
        filled += size
    yield first, wide_K[:filled]


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor times an fp32 scalar, rounded once to `dtype`; on a CPU no tensor of its size is made in fp32."""
    made = torch.empty_like(x, dtype=dtype)
    x_N, made_N = x.reshape(-1), made.view(-1)
    block = rows_in_cache(x_N[:, None])
    for some_N, rounded_N in zip(torch.split(x_N, block), torch.split(made_N, block), strict=True):
        # Of a bf16 tensor and a scalar on a GPU, torch would round the scalar first: all gradients by up to 0.2 %.
        rounded_N.copy_(some_N.float() * factor)
    return made
