"""Start the ranks of a command that answers once, on this host, and wait for them: rank 0 says what all found."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engine import launch


def run(command: Sequence[str], *, ranks: int, seconds: float | None = None) -> int:
    """`python -m engine COMMAND` on every rank, for so long at most; the exit code. No rank outlives one that fails."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as meeting, launch.Watch(None) as watch:
        rendezvous = Path(meeting) / "rendezvous"
        at_birth = launch.die_with(os.getpid())
        crew = [
            launch.Rank(
                number,
                subprocess.Popen(
                    [sys.executable, "-m", "engine", *command],
                    env=launch.environment_of(number, ranks=ranks, threads=None, rendezvous=rendezvous),
                    stdin=subprocess.DEVNULL,
                    preexec_fn=at_birth,
                ),
            )
            for number in range(ranks)
        ]
        try:
            if seconds is not None:
                watch.leave_within(seconds)
            while (codes := [rank.process.poll() for rank in crew]).count(None) and not any(codes):
                if watch.stopping:
                    break
                if not watch.wait():
                    sys.stderr.write(f"the ranks were not done within {seconds or 0:g} seconds\n")
                    break
        finally:
            launch.kill(crew)
    return next((code for code in codes if code), int(None in codes))
