"""The seam between an attempt and the processes that train it. What they report is the follower's business."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import NewType, Protocol

import structlog

log = structlog.get_logger(__name__)

Handle = NewType("Handle", str)
"""A launcher's word for a gang; the same for a repeated submit."""


@dataclass(frozen=True)
class GangSpec:
    """Ranks that start together, or not at all."""

    job_id: str
    attempt: int
    ranks: int
    run_dir: Path
    """Holds `run.json`; becomes the working directory."""
    environment: Mapping[str, str]
    """All that the ranks see of ours."""
    heartbeat_timeout: timedelta
    """The gang kills itself after so long without a beat."""
    nice: int = 0
    """How much its ranks give way to other processes, as the command `nice` means it."""


@dataclass(frozen=True)
class Status:
    """How a gang is doing."""

    ended: bool
    """No process of it is left."""
    exit_code: int | None = None
    """Of the launch as a whole, negative for a signal; None until it ended."""


class Launcher(Protocol):
    """Starts gangs and ends them. No call waits for the gang."""

    def submit(self, gang: GangSpec) -> Handle:
        """Start the gang. Doing so again for the same job and attempt changes nothing."""

    def poll(self, handle: Handle) -> Status:
        """Where the gang stands. Also what carries a `cancel` through, so call it until it says `ended`."""

    def beat(self, handle: Handle) -> None:
        """Tell the gang that its lease was renewed. Any thread may."""

    def cancel(self, handle: Handle, grace: timedelta) -> None:
        """Ask the gang to save and end; past `grace` it is killed. A later call can only shorten the grace."""


@dataclass
class _Local:
    process: subprocess.Popen[bytes]
    kill_at: float | None = None
    """On the monotonic clock; None until it was cancelled."""
    stdin: Lock = field(default_factory=Lock)
    """Held while the pipe is written or closed."""


class LocalLauncher:
    """Gangs on this host: `python -m engine launch`, each in a session and so in a process group of its own."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "engine", "launch")) -> None:
        self._command = tuple(command)
        self._gangs: dict[Handle, _Local] = {}

    def submit(self, gang: GangSpec) -> Handle:
        handle = Handle(f"{gang.job_id}/{gang.attempt}")
        if handle in self._gangs:
            return handle
        logs = gang.run_dir / "logs"
        logs.mkdir(exist_ok=True)
        silence = gang.heartbeat_timeout.total_seconds()
        # The launch writes launch.log itself; this catches what goes wrong before it can.
        with (logs / "launch-output.log").open("ab") as output:
            process = subprocess.Popen(
                [*self._command, "--ranks", str(gang.ranks), "--heartbeat-timeout", f"{silence:g}",
                 "--nice", str(gang.nice), str(gang.run_dir / "run.json")],
                cwd=gang.run_dir, env=dict(gang.environment), start_new_session=True, bufsize=0,
                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        assert process.stdin is not None
        # A launch that stands still does not read; the lease must not stand still with it.
        os.set_blocking(process.stdin.fileno(), False)
        self._gangs[handle] = _Local(process)
        log.info("gang started", pid=process.pid, ranks=gang.ranks)
        return handle

    def poll(self, handle: Handle) -> Status:
        local = self._gangs[handle]
        exit_code = local.process.poll()
        if exit_code is None:
            if local.kill_at is not None and monotonic() >= local.kill_at:
                _signal_group(local.process.pid, signal.SIGKILL)
            return Status(ended=False)
        # The launch takes its ranks along; where it could not, this does.
        _signal_group(local.process.pid, signal.SIGKILL)
        if not _group_is_gone(local.process.pid):
            return Status(ended=False)
        with local.stdin:
            assert local.process.stdin is not None
            local.process.stdin.close()
        return Status(ended=True, exit_code=exit_code)

    def beat(self, handle: Handle) -> None:
        local = self._gangs[handle]
        # A full pipe: the launch does not read. A broken one: it is gone. `poll` has the last word on both.
        with local.stdin, suppress(BlockingIOError, BrokenPipeError):
            pipe = local.process.stdin
            assert pipe is not None
            if not pipe.closed:
                pipe.write(b".")

    def cancel(self, handle: Handle, grace: timedelta) -> None:
        local = self._gangs[handle]
        kill_at = monotonic() + grace.total_seconds()
        if local.kill_at is None and grace:
            local.process.send_signal(signal.SIGTERM)
        local.kill_at = kill_at if local.kill_at is None else min(kill_at, local.kill_at)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies, so that it can see them gone (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


_PR_SET_CHILD_SUBREAPER = 36


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _group_is_gone(group: int) -> bool:
    with suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False
