"""Whether a step's loss lies far above those of the steps before it: a pure question, asked once a step."""

from __future__ import annotations

from collections import deque
from statistics import median

WINDOW = 64
"""Steps that say what is usual."""
FEWEST = 16
"""With fewer of them nothing is usual yet."""
DEVIATIONS = 8.0
"""So many times the usual distance from the median is far. Of normally distributed losses, one step in 10**15 is."""
NORMAL = 1.4826
"""Standard deviations in a median absolute one, where losses are normally distributed (Rousseeuw & Croux 1993)."""
LEAST_SHARE = 0.02
"""Losses that hardly differ are taken to lie within such a share of their median."""


class Spikes:
    """Losses of the last steps. A loss that stays high is told of once, and in time becomes the usual one."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._is_high = False

    def begins(self, loss: float) -> float | None:
        """Take note of a step's loss; the usual one, where a spike begins with this step."""
        usual = self._usual_below(loss)
        began, self._is_high = usual is not None and not self._is_high, usual is not None
        self._losses.append(loss)
        return usual if began else None

    def _usual_below(self, loss: float) -> float | None:
        """The median, where `loss` lies far above it."""
        if len(self._losses) < FEWEST:
            return None
        usual = median(self._losses)
        spread = NORMAL * median(abs(other - usual) for other in self._losses)
        return usual if loss > usual + DEVIATIONS * max(spread, LEAST_SHARE * abs(usual)) else None
