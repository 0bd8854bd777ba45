"""Where a parameter's gradient is added up: in fp32, in place, over the micro-batches of a step.

Most gradients come whole, from autograd; one that is alone in its step need not be copied, nor widened. Those of a
vocabulary are large and come in parts, and whoever has the parts adds them here at once: no tensor of the vocabulary's
size is made on the way.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor
from torch.nn import Parameter

from engine.cached import add_wide


class Landing:
    """The fp32 total of one parameter's gradient, of the parameter's local shape.

    One that `keeps` leaves a gradient that came whole, and alone, as it came: of the total nothing is touched then. The
    first that is not alone ends that for good, for kept ones would then be held beside the total.
    """

    def __init__(self, total: Tensor, *, keeps: bool = False) -> None:
        self.total, self.keeps = total, keeps
        self.is_used = False
        """Something of this step has come; otherwise the total's contents mean nothing."""
        self.whole: Tensor | None = None
        """All that has come, where it is not in the total."""

    def add(self, part: Tensor) -> None:
        """Add a gradient of the whole parameter, of any type. The landing may keep it: it changes no more."""
        if self.is_used:
            add_wide(self.opened(), part)
        elif self.keeps:
            self.whole = part
        else:
            # The first one of a step overwrites what is there, which saves a pass of zeros.
            self.total.copy_(part)
        self.is_used = True

    def opened(self) -> Tensor:
        """The total, for somebody to add to: zero if nothing of this step has come."""
        if self.whole is not None:
            self.total.copy_(self.whole)
            self.whole, self.keeps = None, False
        elif not self.is_used:
            self.total.zero_()
        self.is_used = True
        return self.total

    def close(self) -> Tensor:
        """The step's total, and the end of the step."""
        total = self.opened()
        self.is_used = False
        return total

    def taken(self) -> Tensor | None:
        """The end of the step; its gradient as it came, or None where it is in the total."""
        whole, self.whole = self.whole, None
        if whole is None:
            self.opened()
        self.is_used = False
        return whole


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
