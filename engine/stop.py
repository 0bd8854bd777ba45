"""The wish to stop: SIGTERM or SIGINT, noted while work is in hand, heeded at once where nothing would be lost."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})


class Stop(BaseException):
    """Told to stop while nothing needed to be finished first. Not an Exception, so that no library swallows it."""


class StopWish:
    """Whether this rank was told to stop. Told while it heeds, it raises Stop there and then: once, however often."""

    def __init__(self) -> None:
        self.wanted = False
        self.safe_step = 0
        """The step that the run can go on from."""
        self._heeds = True

    def listen(self) -> None:
        """Take signals from here on, and the one that came while the launcher held them back."""
        for number in SIGNALS:
            signal.signal(number, self._told)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def note(self) -> None:
        """From here on a wish is only noted; whoever is at work asks for `wanted` when it suits."""
        self._heeds = False

    def heed(self) -> None:
        """From here on a wish raises Stop, also one noted before."""
        self._heeds = True
        if self.wanted:
            raise Stop

    def _told(self, number: int, frame: FrameType | None) -> None:
        # Told again, it is ending already: another Stop would come out of what is said and tidied up meanwhile.
        again, self.wanted = self.wanted, True
        if self._heeds and not again:
            raise Stop
