"""Ask what may hang, such as a folder that lies on another host, and wait for so long and no longer.

A call that the kernel never lets go can't be ended, only left behind. So few are left, one for each thing that is
asked, and few wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from threading import BoundedSemaphore, Condition, Thread
from time import monotonic
from typing import Any, TypeVar

What = TypeVar("What", bound=Hashable)
Answer = TypeVar("Answer")

A_MOMENT = 0.1
"""Seconds that anybody may wait, as for any other work."""
meanwhile: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar("meanwhile", default=nullcontext)
"""Entered by who waits for longer than a moment: it lets go of what others of this thread's kind wait for."""


class HangsError(Exception):
    """There was no answer in time."""


class CrowdedError(HangsError):
    """It was not asked, for so much else hangs."""


@dataclass(frozen=True)
class _Call:
    answer: Future[Any] = field(default_factory=Future)
    begun: float = field(default_factory=monotonic)


class Patient:
    """Each call is made in a thread of its own, which is left where it does not come back.

    Whoever asks what is being asked already waits for the same answer: so looks must be pure, and answers be plain.
    """

    def __init__(self, *, seconds: float, most: int, waiting: int) -> None:
        """`most` calls are under way at once, and so left at worst; `waiting` threads wait longer than a moment."""
        self.seconds, self._most = seconds, most
        self._changed, self._under_way = Condition(), dict[Hashable, _Call]()
        self._waiting = BoundedSemaphore(waiting)

    def ask(self, what: Hashable, call: Callable[[], Answer]) -> Answer:
        """What `call` returns or raises; HangsError where it takes longer than `seconds` since it was first asked.

        CrowdedError where as many as may be under way hang.
        """
        under_way = self._asked({what: call}).get(what)
        if under_way is None:
            raise CrowdedError
        if not under_way.answer.done():
            raise HangsError
        answer: Answer = under_way.answer.result()
        return answer

    def ask_all(self, calls: Mapping[What, Callable[[], Answer]]) -> dict[What, Future[Answer]]:
        """The answers that come within `seconds` for all of them; what hangs is left out."""
        return {what: under_way.answer for what, under_way in self._asked(calls).items() if under_way.answer.done()}

    def _asked(self, calls: Mapping[What, Callable[[], Any]]) -> dict[What, _Call]:
        """Those of the calls that were made, whether they are done or overdue."""
        asked_at = monotonic()
        made = self._within(min(A_MOMENT, self.seconds), calls, asked_at)
        left = {what: call for what, call in calls.items() if what not in made or not made[what].answer.done()}
        if left and self._waiting.acquire(blocking=False):
            try:
                with meanwhile.get()():
                    made |= self._within(self.seconds, left, asked_at)
            finally:
                self._waiting.release()
        return made

    def _within(self, seconds: float, calls: Mapping[What, Callable[[], Any]], asked_at: float) -> dict[What, _Call]:
        made: dict[What, _Call] = {}
        for what, call in calls.items():
            if (under_way := self._made(what, call, seconds, asked_at)) is not None:
                made[what] = under_way
        for under_way in made.values():
            wait((under_way.answer,), max(0.0, _left(seconds, asked_at, [under_way])))
        return made

    def _made(self, what: Hashable, call: Callable[[], Any], seconds: float, asked_at: float) -> _Call | None:
        """The call that is under way already, or now; None where there is no room before all that is overdue."""
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: what in self._under_way or len(self._under_way) < self._most,
                _left(seconds, asked_at, self._under_way.values()),
            )
            if not has_room:
                return None
            if what not in self._under_way:
                under_way = _Call()
                Thread(target=self._call, args=(what, call, under_way.answer), name="patient", daemon=True).start()
                self._under_way[what] = under_way
            return self._under_way[what]

    def _call(self, what: Hashable, call: Callable[[], Answer], answer: Future[Answer]) -> None:
        try:
            tell = partial(answer.set_result, call())
        except BaseException as error:  # the thread's edge: it is raised where somebody waits
            tell = partial(answer.set_exception, error)
        with self._changed:
            del self._under_way[what]
            self._changed.notify_all()
        tell()


def _left(seconds: float, asked_at: float, calls: Iterable[_Call]) -> float:
    """For how long to wait on: until the last of them has taken so long, or the asker has waited so long."""
    return min(asked_at, max((call.begun for call in calls), default=asked_at)) + seconds - monotonic()
