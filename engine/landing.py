"""Where a parameter's gradient is added up: in fp32, in place, over the micro-batches of a step.

Most gradients come whole, from autograd. Those of a vocabulary are large and come in parts, and whoever has the parts
adds them here at once: no tensor of the vocabulary's size is made on the way.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor
from torch.nn import Parameter

from engine.cached import add_wide


class Landing:
    """The fp32 total of one parameter's gradient, of the parameter's local shape."""

    def __init__(self, total: Tensor) -> None:
        self.total = total
        self.is_used = False
        """Something of this step is in the total; otherwise its contents mean nothing."""

    def add(self, part: Tensor) -> None:
        """Add a gradient of the whole parameter, of any type."""
        # The first one of a step overwrites what is there, which saves a pass of zeros.
        if self.is_used:
            add_wide(self.total, part)
        else:
            self.total.copy_(part)
            self.is_used = True

    def opened(self) -> Tensor:
        """The total, for somebody to add to: zero if nothing of this step is in it."""
        if not self.is_used:
            self.total.zero_()
            self.is_used = True
        return self.total

    def close(self) -> Tensor:
        """The step's total, and the end of the step."""
        total = self.opened()
        self.is_used = False
        return total


def land(parameter: Parameter, landing: Landing) -> None:
    """Let `parameter`'s gradients be added up in `landing`: those that autograd has, and those that others add."""
    parameter.landing = landing  # type: ignore[attr-defined]

    def take_over(parameter: Tensor) -> None:
        # Nothing comes where all of it was added before.
        if parameter.grad is not None:
            landing.add(parameter.grad)
            parameter.grad = None

    parameter.register_post_accumulate_grad_hook(take_over)  # type: ignore[no-untyped-call]


def landing_of(parameter: Tensor) -> Landing | None:
    """Where to add a parameter's gradient; None: give it to autograd."""
    return cast("Landing | None", getattr(parameter, "landing", None))
