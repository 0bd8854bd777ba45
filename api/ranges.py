"""HTTP ranges and validators (RFC 9110, sections 13 and 14) over anything that can be streamed from an offset."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from urllib.parse import quote

from fastapi.responses import Response, StreamingResponse
from starlette.datastructures import Headers

from core.errors import DomainError

_ONE_RANGE = re.compile(r"(?i:bytes)=(\d{0,20})-(\d{0,20})")

BYTES = {"description": "The bytes.", "content": {"application/octet-stream": {}}}
"""For the OpenAPI page."""

Open = Callable[[int, int], Iterator[bytes]]
"""The bytes from a start to an end, the end left out."""


class RangeNotSatisfiable(DomainError):
    """The range begins beyond the end."""

    status, code = 416, "range_not_satisfiable"

    def __init__(self, size: int) -> None:
        super().__init__(f"The range begins beyond the end: there are {size} bytes.", param="range")
        # The class attribute is for all; the size is this answer's alone.
        self.headers = {"content-range": f"bytes */{size}", "accept-ranges": "bytes"}  # type: ignore[misc]


def span(header: str | None, *, size: int) -> tuple[int, int] | None:
    """Start and end (left out) that a `Range` header asks for; None is the whole. Raises RangeNotSatisfiable.

    Several ranges at once, and what can't be read, are answered with the whole, as the RFC allows.
    """
    match = _ONE_RANGE.fullmatch((header or "").replace(" ", ""))
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1 if last else size)
        if last and int(last) < start:
            return None
    if start >= size:
        raise RangeNotSatisfiable(size)
    return start, end


def answer(headers: Headers, *, size: int, etag: str, filename: str, open_: Open) -> Response:
    """The whole, the part that is asked for, or word that the caller's copy is still good."""
    tag = f'"{etag}"'
    about = {"etag": tag, "accept-ranges": "bytes", "content-disposition": attachment(filename)}
    known = [candidate.strip().removeprefix("W/") for candidate in headers.get("if-none-match", "").split(",")]
    if tag in known or known == ["*"]:
        return Response(status_code=304, headers={"etag": tag})
    current = headers.get("if-range", tag) == tag
    part = span(headers.get("range"), size=size) if current else None
    start, end = part or (0, size)
    about["content-length"] = str(end - start)
    if part:
        about["content-range"] = f"bytes {start}-{end - 1}/{size}"
    return StreamingResponse(
        open_(start, end) if end > start else iter(()),
        status_code=206 if part else 200,
        media_type="application/octet-stream",
        headers=about,
    )


def attachment(filename: str) -> str:
    """A `Content-Disposition` that no file name can break out of (RFC 6266)."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", filename)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}"
