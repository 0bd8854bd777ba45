"""Child processes that a node keeps alive: started again when they die, after a pause that grows with each death."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from time import monotonic

import structlog

log = structlog.get_logger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
STEADY_SECONDS = 30.0
"""A child that lived this long was healthy: its next death starts from the shortest pause again."""


class Child:
    """One of them."""

    def __init__(self, name: str, argv: Sequence[str]) -> None:
        self.name = name
        self._argv = tuple(argv)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._start_at = 0.0
        """On the monotonic clock; when the next start is due."""
        self._pause = FIRST_PAUSE

    def tend(self) -> None:
        """Start it if it isn't there and its pause is over. Call it often."""
        now = monotonic()
        if self._process is None:
            if now >= self._start_at:
                self._start(now)
            return
        code = self._process.poll()
        if code is None:
            return
        _kill_group(self._process.pid)
        self._process = None
        self._pause = FIRST_PAUSE if now - self._started_at > STEADY_SECONDS else self._pause
        self._start_at = now + self._pause
        log.warning("child died", child=self.name, exit_code=code, restart_seconds=self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def ask_to_end(self) -> None:
        """Let it begin to end; it is not started again."""
        self._start_at = inf
        if self._process is not None:
            self._process.terminate()

    def stop(self, grace_seconds: float) -> None:
        """End it for good; past the grace, it and what it started are killed."""
        self.ask_to_end()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            log.warning("child killed", child=self.name, grace_seconds=grace_seconds)
        _kill_group(process.pid)
        process.wait()

    def _start(self, now: float) -> None:
        # A session of its own, so that a Ctrl-C at the terminal reaches the node alone and it decides who ends when.
        self._process = subprocess.Popen(
            self._argv, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_END_WITH_PARENT
        )
        self._started_at = now
        log.info("child started", child=self.name, pid=self._process.pid)


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """In the child, before it begins: end when the node is killed, so that the next node finds nobody in its place."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


_END_WITH_PARENT = _end_with_parent if sys.platform == "linux" else None
