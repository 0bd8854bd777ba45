"""HEAD: what GET answers, without its body (RFC 9110, section 9.3.2)."""

from __future__ import annotations

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Enough(OSError):
    """The headers are out, and nobody wants more; a streaming answer takes it for a client that left."""


def as_get(scope: Scope) -> Scope:
    """The request for what `scope` asks the headers of; any other request is itself."""
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


async def without_body(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Let `app` answer, and end at the first piece of the body, so that a stream which never ends does."""
    ended = False

    async def send_head(message: Message) -> None:
        nonlocal ended
        if message["type"] != "http.response.body":
            await send(message)
            return
        if not ended:
            ended = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        if message.get("more_body"):
            raise Enough

    try:
        await app(scope, receive, send_head)
    except (Enough, ClientDisconnect):
        if not ended:
            raise
