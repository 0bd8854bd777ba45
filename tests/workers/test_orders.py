"""What a supervisor is told, from threads and signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from queue import Empty
from threading import Thread

import pytest

from workers.orders import DEAF_SECONDS, HOST_GOES_DOWN, Orders, obey_signals
from workers.outcome import Wish

DEADLINE_SECONDS = 20


@pytest.fixture
def usual_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, HOST_GOES_DOWN)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_greatest_wish_counts_whatever_the_order() -> None:
    orders = Orders()
    for wish in (Wish.PAUSE, Wish.CANCEL, Wish.DRAIN):
        orders.give(wish)

    assert orders.wait(0) is Wish.CANCEL
    assert orders.wait(0) is Wish.CANCEL, "and stays"


def test_waiting_ends_when_a_thread_says_something() -> None:
    orders = Orders()
    Thread(target=orders.give, args=(Wish.LOST,)).start()

    assert orders.wait(DEADLINE_SECONDS) is Wish.LOST


def test_waking_is_no_wish() -> None:
    orders = Orders()
    orders.wake()

    assert orders.wait(DEADLINE_SECONDS) is None


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_being_asked_to_end_is_a_wish_to_drain(number: int) -> None:
    orders = Orders()
    obey_signals(orders)

    os.kill(os.getpid(), number)

    assert orders.wait(DEADLINE_SECONDS) is Wish.DRAIN


def test_no_wait_is_so_long_that_a_signal_just_before_it_goes_unheard():
    """Python calls the handler of a signal that comes between its last look and the wait only once that ends."""
    waited = []

    class Inbox:
        def get(self, timeout):
            waited.append(timeout)
            if len(waited) < 4:
                raise Empty
            return Wish.DRAIN

        def get_nowait(self):
            raise Empty

    orders = Orders()
    orders._inbox = Inbox()
    assert orders.wait(60) is Wish.DRAIN
    assert waited == [DEAF_SECONDS] * 4
