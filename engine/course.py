"""How a run's validation loss goes: which step had the lowest, and for how long none has been lower."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Course:
    """What all validations so far come to."""

    best_step: int | None = None
    """Of the lowest loss; None before the first validation."""
    best_loss: float | None = None
    mark: float | None = None
    """The last loss that was lower enough than the mark before; the first one is a mark."""
    waited: int = 0
    """Validations since then."""

    def after(self, step: int, loss: float, *, min_delta: float = 0.0) -> Course:
        """With one more validation. A loss is lower enough where it lies below the mark by more than `min_delta`."""
        course = self
        if self.best_loss is None or loss < self.best_loss:
            course = replace(course, best_step=step, best_loss=loss)
        if self.mark is None or loss < self.mark - min_delta:
            return replace(course, mark=loss, waited=0)
        return replace(course, waited=self.waited + 1)
