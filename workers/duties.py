"""Things to do every so often, and the loop that does them until it is told to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from time import monotonic

import structlog

from workers.orders import Orders
from workers.outcome import Wish

log = structlog.get_logger(__name__)

END_SECONDS = 3.0
"""How long a loop beside another may take to end; then it is left to end with the process."""


@dataclass
class Duty:
    """Something to do every so often. Any number of processes may do it at once: the rows decide."""

    name: str
    every_seconds: float
    do: Callable[[], None]
    due_at: float = 0.0
    """On the monotonic clock."""

    def do_if_due(self) -> None:
        if monotonic() < self.due_at:
            return
        self.due_at = monotonic() + self.every_seconds
        try:
            self.do()
        except Exception:  # the loop's edge: the other duties go on, and this one's time comes again
            log.warning("duty not done", duty=self.name, exc_info=True)


def keep(duties: Sequence[Duty], orders: Orders) -> None:
    """Until a wish comes."""
    while orders.wait(max(0.0, min(duty.due_at for duty in duties) - monotonic())) is None:
        for duty in duties:
            duty.do_if_due()


@contextmanager
def beside(run: Callable[[Orders], None], name: str) -> Iterator[None]:
    """`run` in a thread of its own, so that what is slow there delays nothing here; told to drain at the end."""
    orders = Orders()
    thread = Thread(target=run, args=(orders,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        orders.give(Wish.DRAIN)
        thread.join(END_SECONDS)
