"""A PostgreSQL server that drills may kill, restart and keep from writing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil


class Server:
    """The tests' own server, at the same URL whatever is done to it."""

    def __init__(self, server: Any, url: str, administer: Callable[..., None]) -> None:
        self._server, self.url, self._administer = server, url, administer

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def stop(self, how: int) -> None:
        """End it with the signal that says how, SIGINT for a fast shutdown, and wait until nothing of it is left."""
        first = psutil.Process(self._server.get_pid())
        others = first.children(recursive=True)
        first.send_signal(how)
        first.wait(60)
        psutil.wait_procs(others, timeout=60)

    def set_read_only(self, wanted: bool) -> None:
        """Take no writes from anybody, or take them again."""
        value = "on" if wanted else "off"
        self._administer(f"ALTER SYSTEM SET default_transaction_read_only = {value}", "SELECT pg_reload_conf()")
