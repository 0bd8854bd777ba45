"""What a supervisor has been told to do, by whichever thread or signal. Its main thread waits here and nowhere else."""

from __future__ import annotations

import signal
from queue import Empty, SimpleQueue
from time import monotonic

from workers.outcome import Wish


class Orders:
    """An inbox with one reader. `give` and `wake` are safe from signal handlers, which a lock or an Event is not."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Wish | None] = SimpleQueue()
        self.wish: Wish | None = None
        """The greatest wish that `wait` has read."""
        self.times = 0
        """How many wishes it has read, repetitions among them."""
        self.host_goes_down = False
        """This host's node has said so."""

    def give(self, wish: Wish) -> None:
        self._inbox.put(wish)

    def wake(self) -> None:
        """End the reader's wait early: something else than a wish has changed."""
        self._inbox.put(None)

    def wait(self, seconds: float) -> Wish | None:
        """The wish in force, after at most `seconds`, earlier when something came."""
        deadline = monotonic() + seconds
        try:
            self._take(self._inbox.get(timeout=max(0.0, deadline - monotonic())))
            while True:
                self._take(self._inbox.get_nowait())
        except Empty:
            return self.wish

    def _take(self, wish: Wish | None) -> None:
        if wish is not None:
            self.wish = wish if self.wish is None else max(self.wish, wish)
            self.times += 1


HOST_GOES_DOWN = signal.SIGURG
"""What a node sends before SIGTERM, which anybody may send. Whoever does not know of it, as yet, is not disturbed."""


def obey_signals(orders: Orders) -> None:
    """From now on, being asked to end is a wish to drain."""

    def note(*_: object) -> None:
        orders.host_goes_down = True

    signal.signal(HOST_GOES_DOWN, note)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: orders.give(Wish.DRAIN))
