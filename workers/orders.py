"""What a supervisor has been told to do, by whichever thread or signal. Its main thread waits here and nowhere else."""

from __future__ import annotations

import signal
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic

from workers.outcome import Wish

DEAF_SECONDS = 0.5
"""The longest that a signal may go unheard."""


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
        with suppress(Empty):
            self._take(self._next(monotonic() + seconds))
            while True:
                self._take(self._inbox.get_nowait())
        return self.wish

    def _next(self, deadline: float) -> Wish | None:
        """What comes first; Empty where nothing has by then.

        Python notes a signal that comes between its last look for one and the wait, but calls its handler only once
        that ends. So none is long.
        """
        while True:
            left = deadline - monotonic()
            try:
                return self._inbox.get(timeout=max(0.0, min(left, DEAF_SECONDS)))
            except Empty:
                if left <= DEAF_SECONDS:
                    raise

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
