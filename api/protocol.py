"""HTTP on the wire: uvicorn's, except that what is no HTTP is told so in the one envelope of all errors."""

from __future__ import annotations

import secrets

from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api import errors

NOT_HTTP = (
    "This is not a request of HTTP/1.1: check its method, its headers and its length, and write what is not ASCII in a"
    " path as %XX."
)


def request_id() -> str:
    """What a caller can report an answer by."""
    return f"req-{secrets.token_hex(12)}"


class Protocol(HttpToolsProtocol):
    """One connection."""

    def send_400_response(self, msg: str) -> None:
        answer = errors.http_error(HTTPException(400, NOT_HTTP))
        headers = [*answer.raw_headers, (b"x-request-id", request_id().encode()), (b"connection", b"close")]
        lines = [b"HTTP/1.1 400 Bad Request", *(name + b": " + value for name, value in headers)]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + bytes(answer.body))
        self.transport.close()
