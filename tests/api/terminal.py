"""A program at a pseudo-terminal, and a connection that can be cut: what a person at a keyboard has."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

DEADLINE_SECONDS = 60.0
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07")
"""What moves the cursor and chooses colours."""
LEADS = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Makes the terminal the program's own, so that Ctrl-C reaches it, also where the tests run in a shell's background."""


class Terminal:
    """A program that believes to be at a terminal of this size."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, columns: int = 80, lines: int = 24
    ) -> None:
        self.here, there = pty.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", LEADS, *command],
            stdin=there, stdout=there, stderr=there, cwd=cwd, start_new_session=True,
            env={"PATH": os.environ["PATH"], "HOME": str(cwd), "TERM": "xterm-256color", "LANG": "C.UTF-8", **env},
        )  # fmt: skip
        os.close(there)
        self.raw = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_SECONDS)
        os.close(self.here)

    @property
    def text(self) -> str:
        """All that was shown, without the codes."""
        return CODES.sub("", self.raw.decode(errors="replace"))

    def type(self, keys: str) -> None:
        os.write(self.here, keys.encode())

    def until(self, shown: str) -> None:
        """Wait until this has been shown."""
        self._read(lambda: shown in self.text, shown)

    def ended(self) -> int:
        """Wait until the program has ended; its exit code."""
        self._read(lambda: False, "its end")
        return self.process.wait(DEADLINE_SECONDS)

    def _read(self, enough, wanted: str) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not enough():
            ready, _, _ = select.select([self.here], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{wanted!r} did not come; there was {self.text!r}"
            try:
                data = os.read(self.here, 65536)
            except OSError:
                # The other side is closed: so Linux says that a program at a terminal has ended.
                data = b""
            if not data:
                assert wanted == "its end", f"it ended without {wanted!r}; there was {self.text!r}"
                return
            self.raw += data


class Bridge:
    """A way to a server that can be cut and mended; remembers what was sent over it."""

    def __init__(self, port: int) -> None:
        self.to = port
        self.sent = b""
        self.ends: list[socket.socket] = []
        self.port = 0
        self.mend()

    def mend(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._welcome, args=(self.listener,), daemon=True).start()

    def cut(self) -> None:
        for end in (self.listener, *self.ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.ends.clear()

    def _welcome(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                ours = listener.accept()[0]
                theirs = socket.create_connection(("127.0.0.1", self.to))
                self.ends += [ours, theirs]
                for one, other in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self._carry, args=(one, other, one is ours), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket, is_request: bool) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                if is_request:
                    self.sent += data
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
