"""Somebody's webhook endpoint, over a real socket: answers as it is told to, and remembers what came."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from threading import Event, Thread

DEADLINE_SECONDS = 20


@dataclass(frozen=True)
class Message:
    """What came."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Receiver:
    """A running one."""

    url: str
    came: Queue[Message] = field(default_factory=Queue)
    answers: list[int] = field(default_factory=list)
    """The next statuses; 204 after those."""
    location: str | None = None
    """Where it redirects to."""
    silent: bool = False
    """Whether it begins an answer, a little at a time, and never ends that."""
    closing: Event = field(default_factory=Event)

    def next(self) -> Message:
        return self.came.get(timeout=DEADLINE_SECONDS)


@contextmanager
def receiving(context: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """A receiver on 127.0.0.1, under TLS where there is a context."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"] or 0))
            receiver.came.put(Message(self.path, dict(self.headers), body))
            if receiver.silent:
                self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                while not receiver.closing.wait(0.02):
                    try:
                        self.wfile.write(b"x: y\r\n")
                    except OSError:
                        return
                return
            self.send_response(receiver.answers.pop(0) if receiver.answers else 204)
            if receiver.location is not None:
                self.send_header("location", receiver.location)
            self.send_header("content-length", "0")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, format: str, *arguments: object) -> None:
            """Not to the standard error."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A client that hung up is none."""

    server = Server(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    scheme = "http" if context is None else "https"
    receiver = Receiver(f"{scheme}://localhost:{server.server_address[1]}/hook")
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(DEADLINE_SECONDS)
