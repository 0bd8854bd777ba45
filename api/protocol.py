"""HTTP on the wire: uvicorn's, except that what is no HTTP, or too much of it, is told so in our envelope of errors.

Uvicorn gathers a URL and headers for as long as they come, before anybody looks at the request or at a key; and what
comes after a chunked body as if it were a header, it adds to the headers (RFC 9110, section 6.5.1, forbids it).
"""

from __future__ import annotations

import asyncio
import secrets
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api import errors

NOT_HTTP = (
    "This is not a request of HTTP/1.1: check its method, its headers and its length, and write what is not ASCII in a"
    " path as %XX."
)
HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 60.0
"""How long a connection may take until the head of its first request is there, or of a later one that it has begun."""
BODY_SECONDS = 60.0
"""How long nothing may come of a body that is awaited."""
TOO_LARGE = f"URL and headers of a request may have {HEAD_BYTES} bytes; what is longer belongs into the body."
TOO_SLOW = (
    f"Nothing came for too long: URL and headers of a request must be there within {HEAD_SECONDS:.0f} seconds, and some"
    f" of its body every {BODY_SECONDS:.0f}."
)


def request_id() -> str:
    """What a caller can report an answer by."""
    return f"req-{secrets.token_hex(12)}"


class HeadTooLarge(Exception):
    """Raised while it is parsed."""


class Protocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._is_head = True
        """Whether URL and headers are still to come; what looks like them later comes after a body."""
        self._head_bytes = 0
        """Of URL and headers, as far as they are there whole, and of what came after the body like headers."""
        self._unread_bytes = 0
        """Since the last thing was there whole: nothing is known of them."""
        self._deadline: asyncio.TimerHandle | None = None
        """When the head must be there, or more of the body; None while none is awaited."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unread_bytes > HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, TOO_LARGE)
        elif not self._is_head:
            self._stop_waiting()
            self._wait(BODY_SECONDS)
        elif self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._wait(HEAD_SECONDS)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._take(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._take(len(name) + len(value) + len(": \r\n"))
        if self._is_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_head, self._unread_bytes = True, 0
        self._stop_waiting()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, TOO_LARGE)
        else:
            self._refuse(HTTPStatus.BAD_REQUEST, NOT_HTTP)

    def _unsupported_upgrade_warning(self) -> None:
        """Whoever asks for another protocol is answered in this one, as RFC 9110, section 7.8, allows."""

    def _take(self, count: int) -> None:
        self._unread_bytes = 0
        self._head_bytes += count
        if self._head_bytes > HEAD_BYTES:
            raise HeadTooLarge

    def _wait(self, seconds: float) -> None:
        self._deadline = self.loop.call_later(seconds, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        if self.flow.read_paused:
            # It is us who read nothing.
            self._wait(BODY_SECONDS)
        elif not self._is_head and self.cycle.response_started:
            self.transport.close()
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, TOO_SLOW)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        """Say it, and listen to nothing more."""
        answer = errors.http_error(HTTPException(status, why))
        headers = [*answer.raw_headers, (b"x-request-id", request_id().encode()), (b"connection", b"close")]
        lines = [
            f"HTTP/1.1 {status.value} {status.phrase}".encode(),
            *(name + b": " + value for name, value in headers),
        ]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + bytes(answer.body))
        self.transport.close()
