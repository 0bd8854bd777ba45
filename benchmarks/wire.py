"""HTTP over sockets as they are: a client of a server that is measured takes as little of the machine as can be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """To a server on this machine, until the end of the block."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def request(method: str, path: str, body: bytes = b"", *, key: str | None = None, **headers: str) -> bytes:
    """A whole request. A header's underscores are hyphens; a body is JSON."""
    told = {"host": "bench", "content-length": str(len(body))}
    if body:
        told["content-type"] = "application/json"
    if key is not None:
        told["authorization"] = f"Bearer {key}"
    told |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in told.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> tuple[str, bytes]:
    """Status and body of the answer to a request."""
    writer.write(sent)
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    return head.split()[1].decode(), await reader.readexactly(length)
