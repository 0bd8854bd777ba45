"""Run a part of the net keeping only its inputs, and run it again when its gradient is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")


def recomputed(part: Callable[..., T], *inputs: object) -> T:
    """`part(*inputs)`; what it saves for backward is computed again there, alike, so that gradients are bitwise equal.

    `part` must draw no random numbers from torch's generators. Its collectives are repeated on every rank alike.
    """
    if not torch.is_grad_enabled():
        return part(*inputs)
    replay = _Replay(part, inputs)
    with saved_tensors_hooks(replay.put_off, replay.fetch):
        return part(*inputs)


class _Enough(Exception):
    """All that backward needs is there; the rest of the part would be computed for nothing."""


class _Replay:
    """What a part saves, by number, in the order of saving: put off in forward, made in backward.

    `torch.utils.checkpoint` does the same, but imports torch's compiler at its first call: seconds, and 100 MB a rank.
    """

    def __init__(self, part: Callable[..., object], inputs: tuple[object, ...]) -> None:
        self.part = part
        self.plain = [None if isinstance(x, Tensor) else x for x in inputs]
        """The inputs, but for tensors."""
        self.places = [place for place, x in enumerate(inputs) if isinstance(x, Tensor)]
        self.kept = Kept(*(x for x in inputs if isinstance(x, Tensor)))
        self.count = 0
        """Tensors that the part saves."""
        self._made: dict[int, Tensor] = {}

    def put_off(self, saved: Tensor) -> int:
        self.count += 1
        return self.count - 1

    def fetch(self, number: int) -> Tensor:
        if number not in self._made:
            self._run_again()
        # Each is asked for once, and lives no longer than its use.
        return self._made.pop(number)

    def _run_again(self) -> None:
        self._made.clear()
        seen = 0

        def keep(saved: Tensor) -> None:
            nonlocal seen
            self._made[seen] = saved.detach()
            seen += 1
            if seen == self.count:
                raise _Enough

        inputs = list(self.plain)
        for place, x in zip(self.places, self.kept.tensors, strict=True):
            inputs[place] = x
        try:
            with torch.enable_grad(), saved_tensors_hooks(keep, _nothing_to_fetch):
                self.part(*inputs)
        except _Enough:
            pass


class Kept:
    """Tensors held by a node of autograd's graph, so that they count as saved for whoever meters or moves such."""

    def __init__(self, *tensors: Tensor) -> None:
        nothing = torch.empty(0, requires_grad=True)
        # None of them needs a gradient here, and a node without a way on holds no other part of the graph.
        detached = (x.detach() for x in tensors)
        # torch 2.11 frees what a node has saved together with the last tensor that came from it.
        self._end = cast(Tensor, _Keep.apply(nothing, *detached))  # type: ignore[no-untyped-call]
        self._learns = [x.requires_grad for x in tensors]

    @property
    def tensors(self) -> list[Tensor]:
        """As they were, apart from the graph."""
        node: Any = self._end.grad_fn
        saved = node.saved_tensors
        return [x.detach().requires_grad_(learns) for x, learns in zip(saved, self._learns, strict=True)]


class _Keep(torch.autograd.Function):
    """Saves its inputs and computes nothing."""

    @staticmethod
    def forward(ctx: Any, nothing: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return nothing.view_as(nothing)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise AssertionError("nothing is computed from what was kept")


def _nothing_to_fetch(_: None) -> Tensor:
    raise AssertionError("no gradient flows through a replay")
