"""Tensors of a family's files as ours and back: turned where they lie the other way, apart where they hold several.

What they are called and where they lie is `engine.naming`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from engine.config import ModelShape
from engine.naming import Stored, stored


def read(
    there: Stored,
    window: Callable[[int, int, int], Tensor],
    ours: tuple[int, ...],
    dim: int,
    start: int,
    length: int,
) -> Tensor:
    """Our indices `start` to `start + length` of `dim`, of a tensor of shape `ours` as a whole.

    `window(dim, start, length)` is a part of the file's tensor; no more is read than what holds ours.
    """
    at = len(ours) - 1 - dim if there.transposed else dim
    if there.parts == 1:
        return _turned(there, window(at, start, length))
    assert dim == 0, "parts lie along the outputs"
    first, last = start // there.block, -(-(start + length) // there.block)
    within = start - first * there.block
    if last - first == 1:
        return _turned(there, window(at, (first * there.parts + there.part) * there.block + within, length))
    group = there.parts * there.block
    several = _turned(there, window(at, first * group, (last - first) * group))
    return parted(several, there)[there.part][within : within + length]


def _turned(there: Stored, tensor: Tensor) -> Tensor:
    return tensor.t() if there.transposed else tensor


def to_files(shape: ModelShape, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Our global tensors as those of the family's files; what shares a file's tensor is held until all parts came."""
    waiting: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        there = stored(shape, name)
        if there.parts > 1:
            parts = waiting.setdefault(there.name, {})
            parts[there.part] = tensor
            if len(parts) < there.parts:
                continue
            del waiting[there.name]
            tensor = joined([parts[number] for number in range(there.parts)], there)
        yield there.name, tensor.t() if there.transposed and tensor.dim() == 2 else tensor
    assert not waiting, "a part of a tensor never came"


def joined(parts: list[Tensor], there: Stored) -> Tensor:
    """Tensors whose first dim are outputs, as they lie together."""
    blocks = [part.reshape(-1, there.block, *part.shape[1:]) for part in parts]
    return torch.stack(blocks, dim=1).flatten(0, 2)


def parted(tensor: Tensor, there: Stored) -> list[Tensor]:
    """The parts of what `joined` put together."""
    blocks = tensor.reshape(-1, there.parts, there.block, *tensor.shape[1:])
    return [part.flatten(0, 1) for part in blocks.unbind(1)]
