"""A `trainshed serve` of an example's own: started on a folder, and gone, with all its processes, in the end."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from api.client import Client, Unreachable

START_SECONDS, STOP_SECONDS = 90, 40
LOG = "serve.log"
"""Beneath the folder, beside `data`."""


class Failed(Exception):
    """The example did not show what it is meant to show."""


@contextmanager
def service(folder: Path, **environment: str) -> Iterator[Client]:
    """The service on `folder`, with a key of our choice; nothing of it runs afterwards."""
    key = f"example-{secrets.token_urlsafe(24)}"
    port = free_port()
    data = folder / "data"
    trainshed = str(Path(sys.executable).with_name("trainshed"))
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            [trainshed, "serve", "--data-dir", str(data), "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**_environment(), **environment, "TRAINSHED_ADMIN_KEY": key},
            start_new_session=True,
        )
    try:
        with Client(f"http://127.0.0.1:{port}", key) as client:
            wait_until_ready(client, process)
            yield client
        process.send_signal(signal.SIGINT)
        code = process.wait(STOP_SECONDS)
        if code:
            raise Failed(f"the service ended with exit code {code}")
        if left := ours(data):
            raise Failed(f"processes were left behind: {[describe(process) for process in left]}")
    except Exception as error:
        error.add_note(f"The end of {folder / LOG}:\n{(folder / LOG).read_text(errors='replace')[-3000:]}")
        raise
    finally:
        process.kill()
        process.wait()
        for left_behind in ours(data):
            left_behind.kill()


def wait_until_ready(client: Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    missing: Any = "no answer"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Failed(f"the service ended at once, with exit code {process.returncode}")
        try:
            missing = client.ready()
        except Unreachable:
            time.sleep(0.1)
            continue
        if missing["status"] == "ready":
            return
        time.sleep(0.1)
    raise Failed(f"the service was not ready after {START_SECONDS} s: {missing}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ours(data: Path) -> list[psutil.Process]:
    """Processes that work in the folder or were told of it, whoever their parent is; not this one."""
    found = []
    for process in psutil.process_iter():
        try:
            traces = (process.cwd(), process.environ().get("TRAINSHED_DATA_DIR", ""), *process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if process.pid != os.getpid() and any(trace.startswith(str(data)) for trace in traces):
            found.append(process)
    return found


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return str(process.pid)


def _environment() -> Mapping[str, str]:
    """Ours, without what would make it another service: it is to be whole beneath its folder."""
    foreign = ("TRAINSHED_", "DATABASE_URL", "REDIS_URL", "STORAGE_URL")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
