"""Programs that take turns: all stay up, one works at a time, so that what else the machine does strikes all alike.

A contestant is a process that ends each step by `Turns.done`, which says how the step went and waits for its next turn.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self


class GivenUp(Exception):
    """A contestant ended, or did not answer in time; the message has the end of what it wrote."""


@dataclass(frozen=True)
class Turn:
    """One step, as the contestant itself measured it."""

    seconds: float
    """On the wall clock."""
    user_seconds: float
    system_seconds: float
    """Of which the kernel had: page faults above all."""
    peak_bytes: int
    """Resident at most since the process began."""
    loss: float


class Turns:
    """A contestant's side."""

    def __init__(self) -> None:
        """Take standard output for answers; what libraries print there goes to standard error from here on."""
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._begun = time.perf_counter()
        self._used = _used()

    def ready(self) -> None:
        """All is set up. Returns when the first turn comes."""
        self._answer({})

    def done(self, loss: float) -> None:
        """A step is done. Returns when the next turn comes."""
        seconds, (user, system) = time.perf_counter() - self._begun, _used()
        turn = Turn(seconds, user - self._used[0], system - self._used[1], peak_bytes(), loss)
        self._answer(asdict(turn))

    def _answer(self, said: Mapping[str, float]) -> None:
        self._answers.write(json.dumps(said) + "\n")
        self._answers.flush()
        if not sys.stdin.readline():
            # The other side is done with this process, and so is this process: there is nothing to save.
            os._exit(0)
        self._begun, self._used = time.perf_counter(), _used()


class Contestant:
    """The other side: one program, its process, and the turns that it had."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        root: Path,
        environment: Mapping[str, str],
        log: Path,
        patience: float,
    ) -> None:
        """Start `command` in `root`, where Python looks for modules first; what it prints goes to `log`.

        It may be silent for `patience` seconds in a turn.
        """
        self.name, self.log, self.patience = name, log, patience
        self.turns: list[Turn] = []
        self._started = time.perf_counter()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output
            )
        self._heard = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def wait_until_ready(self) -> None:
        """Wait until it is set up; `start_seconds` is then known."""
        self._answer()
        self.start_seconds = time.perf_counter() - self._started
        """From its start until it was ready for its first turn."""

    def take_turn(self) -> Turn:
        """Let it take one step."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._give_up("ended")
        turn = Turn(**json.loads(self._answer()))
        self.turns.append(turn)
        return turn

    def _answer(self) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + self.patience
        while b"\n" not in self._heard:
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self._give_up(f"said nothing for {self.patience:g} seconds")
            if not (more := os.read(self._process.stdout.fileno(), 65_536)):
                self._give_up("ended")
            self._heard += more
        line, self._heard = self._heard.split(b"\n", 1)
        return line

    def _give_up(self, how: str) -> None:
        last = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
        raise GivenUp(f"{self.name} {how}; it wrote:\n{last}")


def peak_bytes() -> int:
    """Most that this process has had resident."""
    try:
        # Unlike `ru_maxrss` it does not count what the parent had before this program was loaded.
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _used() -> tuple[float, float]:
    """Seconds of this process's threads in programs and in the kernel."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime
