"""Where in the code a rank is: asked by a signal, it writes its stacks into its log, even from within a C library."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SIGNAL = signal.SIGUSR1
"""Asks a rank for its stacks."""
STDERR = 2
ANSWER_SECONDS = 5.0
"""How long processes may take to write their stacks. One that does not is frozen."""
LISTEN_SECONDS = 0.1
"""Between two looks at what they write; what is the same twice is whole."""
FRAMES_NAMED = 4
"""Of the innermost, in a sentence."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*:$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


@dataclass(frozen=True)
class Frame:
    """One call under way."""

    file: Path
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(self.file.parts[-2:])}:{self.line})"


def answer() -> None:
    """From here on this process answers `SIGNAL` with the stacks of all its threads, on stderr."""
    faulthandler.register(SIGNAL, file=STDERR, all_threads=True)


def ask(pids: Sequence[int | None], logs: Sequence[Path], listen: Callable[[float], object]) -> list[list[Frame]]:
    """Have processes write their stacks to their `logs`; each one's main stack, empty where it does not answer.

    `listen(seconds)` lets so much time pass. None is not asked.
    """
    begins = [log.stat().st_size for log in logs]
    for pid in pids:
        if pid is not None:
            os.kill(pid, SIGNAL)
    deadline = time.monotonic() + ANSWER_SECONDS
    before: list[bytes] = []
    said = [b""] * len(logs)
    while time.monotonic() < deadline and (said != before or not all(said)):
        listen(LISTEN_SECONDS)
        before, said = said, [log.read_bytes()[begin:] for log, begin in zip(logs, begins, strict=True)]
    return [main_stack(text.decode(errors="replace")) for text in said]


def state_of(pid: int) -> str:
    """The letter by which Linux says what a process does; empty elsewhere."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def main_stack(log: str) -> list[Frame]:
    """The main thread's frames, innermost first, in what a rank answered; none where it has not, or not in whole."""
    stacks: list[list[Frame]] = []
    for line in log.splitlines():
        if _THREAD.match(line):
            stacks.append([])
        elif stacks and (frame := _FRAME.match(line)):
            stacks[-1].append(Frame(Path(frame["file"]), int(frame["line"]), frame["function"]))
    # The oldest thread comes last.
    return stacks[-1] if stacks else []


def in_words(stack: list[Frame]) -> str:
    """The innermost frames as a part of a sentence."""
    return ", called from ".join(map(str, stack[:FRAMES_NAMED]))
