"""Child processes that are kept alive: started again when they die, after a pause that grows with each death."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from threading import Event
from time import monotonic

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
STEADY_SECONDS = 30.0
"""A child that lived this long was healthy: its next death starts from the shortest pause again."""
LOOK_SECONDS = 0.05
"""How often an ending child is looked at, as it is waited for together with something else."""


@dataclass(frozen=True)
class Death:
    """A child that ended without being told to."""

    child: str
    exit_code: int
    """Negative is a signal."""
    restart_seconds: float
    """When it starts again."""


class Child:
    """One of them, in a session of its own: a Ctrl-C at the terminal reaches its keeper, who decides who ends when."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """`environment` None is the keeper's. Output goes to the end of `log_path`, else where the keeper's goes."""
        self.name = name
        self.log_path = log_path
        self._argv = tuple(argv)
        self._environment = environment
        self._pass_fds = tuple(pass_fds)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._start_at = 0.0
        """On the monotonic clock; when the next start is due."""
        self._pause = FIRST_PAUSE

    def tend(self) -> Death | None:
        """Start it if it isn't there and its pause is over. Call it often; it tells of each death once."""
        now = monotonic()
        if self._process is None:
            if now >= self._start_at:
                self._start(now)
            return None
        code = self._process.poll()
        if code is None:
            return None
        _kill_group(self._process.pid)
        self._process = None
        pause = FIRST_PAUSE if now - self._started_at > STEADY_SECONDS else self._pause
        self._start_at = now + pause
        self._pause = min(2 * pause, LONGEST_PAUSE)
        return Death(self.name, code, pause)

    def ask_to_end(self) -> None:
        """Let it begin to end; it is not started again."""
        self._start_at = inf
        if self._process is not None:
            self._process.terminate()

    def stop(self, grace_seconds: float, *, hurry: Event | None = None, hurry_seconds: float = 0.0) -> None:
        """End it for good; past the grace, it and what it started are killed.

        Once `hurry` is set, it is asked a second time and has `hurry_seconds` left at most.
        """
        self.ask_to_end()
        process, self._process = self._process, None
        if process is None:
            return
        _let_end(process, grace_seconds, hurry or Event(), hurry_seconds)
        _kill_group(process.pid)
        process.wait()

    def _start(self, now: float) -> None:
        with ExitStack() as stack:
            output = None if self.log_path is None else stack.enter_context(self.log_path.open("ab"))
            self._process = subprocess.Popen(
                self._argv,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,
                pass_fds=self._pass_fds,
                preexec_fn=END_WITH_PARENT,
            )
        self._started_at = now


def _let_end(process: subprocess.Popen[bytes], grace_seconds: float, hurry: Event, hurry_seconds: float) -> None:
    """Wait for a process that was asked to end, until its time is up."""
    deadline, hurried = monotonic() + grace_seconds, False
    while process.poll() is None and monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_SECONDS)
            return
        # After a look, as two signals that are sent at once may arrive as one.
        if hurry.is_set() and not hurried:
            process.terminate()
            deadline, hurried = min(deadline, monotonic() + hurry_seconds), True


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """In the child, before it begins: end when its keeper is killed, so that the next one finds nobody in its place."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


END_WITH_PARENT = _end_with_parent if sys.platform == "linux" else None
"""For `preexec_fn`."""
