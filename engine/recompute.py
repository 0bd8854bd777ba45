"""Run a part of the net keeping only its inputs, and run it again when its gradient is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

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
        self.part, self.inputs = part, inputs
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

        # Detached, so that this graph, of which nothing is asked, does not hang on to the one that is being walked.
        inputs = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in self.inputs]
        try:
            with torch.enable_grad(), saved_tensors_hooks(keep, _nothing_to_fetch):
                self.part(*inputs)
        except _Enough:
            pass


def _nothing_to_fetch(_: None) -> Tensor:
    raise AssertionError("no gradient flows through a replay")
