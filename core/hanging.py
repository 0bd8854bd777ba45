"""Ask what may hang, such as a folder that lies on another host, and wait for so long and no longer.

A call that the kernel never lets go can't be ended, only left behind. So few are left, and what hangs is asked nothing
more until it answers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from threading import Lock, Thread
from typing import TypeVar

Answer = TypeVar("Answer")


class HangsError(Exception):
    """There was no answer in time."""


class Patient:
    """Each call is made in a thread of its own, which is left where it does not come back."""

    def __init__(self, *, seconds: float, most: int) -> None:
        """`most` may hang at once; then whatever else is asked is taken to hang, too."""
        self.seconds, self._most = seconds, most
        self._lock, self._hanging = Lock(), set[Hashable]()

    def ask(self, what: Hashable, call: Callable[[], Answer]) -> Answer:
        """What `call` returns or raises; HangsError where that takes too long, at once while `what` still hangs."""
        with self._lock:
            if what in self._hanging or len(self._hanging) >= self._most:
                raise HangsError
        answer: Future[Answer] = Future()
        Thread(target=self._call, args=(what, call, answer), name="patient", daemon=True).start()
        wait((answer,), self.seconds)
        with self._lock:
            if not answer.done():
                self._hanging.add(what)
                raise HangsError
        return answer.result()

    def _call(self, what: Hashable, call: Callable[[], Answer], answer: Future[Answer]) -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # the thread's edge: it is raised where somebody waits
            answer.set_exception(error)
        with self._lock:
            self._hanging.discard(what)
