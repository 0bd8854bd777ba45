"""A way to a storage server that can be closed: answers of 503, or none at all."""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Thread
from typing import Literal

REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
BYTES = 1 << 16


class FlakyWay:
    """Passes on whatever comes, as long as `mode` says so; each connection is of the mode that it began in."""

    def __init__(self, host: str, port: int) -> None:
        self._behind = (host, port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._passing: set[socket.socket] = set()
        self.mode: Literal["pass", "refuse", "hang"] = "pass"
        self.harmed = 0
        """Requests that were refused or left without an answer."""
        Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def set(self, mode: Literal["pass", "refuse", "hang"]) -> None:
        """From now on; connections that pass things on are closed."""
        self.mode = mode
        for passing in list(self._passing):
            with suppress(OSError):
                passing.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.set("hang")
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            if self.mode != "pass":
                client.recv(BYTES)
                self.harmed += 1
                if self.mode == "refuse":
                    client.sendall(REFUSAL)
                    client.shutdown(socket.SHUT_WR)
                # Until the other side has enough of it.
                while client.recv(BYTES):
                    pass
                return
            with socket.create_connection(self._behind) as server:
                ends = {client, server}
                self._passing |= ends
                back = Thread(target=_pour, args=(server, client), daemon=True)
                back.start()
                _pour(client, server)
                back.join()
                self._passing -= ends


def _pour(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(BYTES):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
