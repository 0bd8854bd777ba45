"""A Hugging Face hub of our own over a real socket: its routes for models, and where it redirects to for large files.

What it gets wrong, it is told to.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "5" * 40
DEADLINE_SECONDS = 20
_REVISION = re.compile(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True)
class Asked:
    """What came."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass
class FakeHub:
    """A running one, of one repository."""

    url: str
    name: str
    files: dict[str, bytes]
    large: frozenset[str] = frozenset()
    """Files that lie apart, as Git LFS has them."""
    commit: str = COMMIT
    token: str | None = None
    """Without it, everything is 401."""
    location: str | None = None
    """Where large files are redirected to, instead of to a path of its own."""
    cut_after: int | None = None
    """After so many bytes of a large file the connection is gone, once."""
    halt_after: int | None = None
    """After so many bytes of a large file nothing more comes until `go_on`."""
    answers: list[int] = field(default_factory=list)
    """The next statuses of files, before it does what it should."""
    pages: int = 0
    """So many questions more are answered by a proxy, with its page."""
    whole_only: bool = False
    """Whether it ignores ranges."""
    damaged: str | None = None
    """A file of which another byte is sent than was described."""
    asked: list[Asked] = field(default_factory=list)
    halted: Event = field(default_factory=Event)
    go_on: Event = field(default_factory=Event)
    lock: Any = field(default_factory=Lock)

    def of(self, part: str) -> list[Asked]:
        """What came to paths with this in them."""
        with self.lock:
            return [one for one in self.asked if part in one.path]

    def described(self) -> dict[str, Any]:
        return {
            "id": self.name, "modelId": self.name, "sha": self.commit, "private": False, "gated": False, "tags": [],
            "siblings": [self._described(path) for path in sorted(self.files)],
        }  # fmt: skip

    def _described(self, path: str) -> dict[str, Any]:
        content = self.files[path]
        told: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": blob(content)}
        if path in self.large:
            sha256 = hashlib.sha256(content).hexdigest()
            told["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
            told["blobId"] = blob(b"version https://git-lfs.github.com/spec/v1\n")
        return told

    def tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": told["rfilename"], "size": told["size"], "oid": told["blobId"]}
            | (
                {"lfs": {"oid": told["lfs"]["sha256"], "size": told["size"], "pointerSize": 134}}
                if "lfs" in told
                else {}
            )
            for told in self.described()["siblings"]
        ]


def blob(content: bytes) -> str:
    """What git calls it."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def hub(name: str, files: Mapping[str, bytes], **options: Any) -> Iterator[FakeHub]:
    """A hub on 127.0.0.1 that has one repository."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            with fake.lock:
                fake.asked.append(Asked(self.command, self.path, dict(self.headers)))
                fake.pages -= (is_page := fake.pages > 0)
            if is_page:
                return self.answer(200, b"<html>Sign in</html>", **{"Content-Type": "text/html; charset=utf-8"})
            apart = path.startswith("/cdn/")
            if fake.token is not None and not apart and self.headers["authorization"] != f"Bearer {fake.token}":
                return self.answer(401)
            if found := _REVISION.fullmatch(path):
                known = found[1] == fake.name and found[2] in {"main", fake.commit, "v1.0"}
                return self.answer(200, json.dumps(fake.described()).encode()) if known else self.answer(404)
            if found := _TREE.fullmatch(path):
                return self.answer(200, json.dumps(fake.tree()).encode())
            if apart:
                return self.send(next(each for each in fake.large if path.endswith(f"/{each}")))
            if (found := _RESOLVE.fullmatch(path)) is None or found[3] not in fake.files:
                return self.answer(404)
            if fake.answers:
                return self.answer(fake.answers.pop(0))
            described = fake._described(found[3])
            told = {"X-Repo-Commit": fake.commit, "ETag": f'"{described["blobId"]}"'}
            if found[3] not in fake.large:
                return self.send(found[3], **told)
            told |= {"X-Linked-Etag": f'"{described["lfs"]["sha256"]}"', "X-Linked-Size": str(described["size"])}
            return self.answer(302, Location=fake.location or f"{fake.url}/cdn/{found[3]}?signature=secret", **told)

        do_HEAD = do_GET

        def send(self, path: str, **headers: str) -> None:
            content, total = fake.files[path], len(fake.files[path])
            asked = None if fake.whole_only else _RANGE.fullmatch(self.headers["range"] or "")
            first = int(asked[1]) if asked else 0
            if asked and first >= total:
                return self.answer(416)
            content = content[first : int(asked[2]) + 1 if asked and asked[2] else None]
            if path == fake.damaged:
                content = content[:-1] + bytes([content[-1] ^ 1])
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{first + len(content) - 1}/{total}")
            for key, value in (headers | {"Content-Length": str(len(content)), "Accept-Ranges": "bytes"}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if path in fake.large and fake.cut_after is not None:
                self.wfile.write(content[: fake.cut_after])
                fake.cut_after, self.close_connection = None, True
                return
            if path in fake.large and fake.halt_after is not None:
                self.wfile.write(content[: fake.halt_after])
                content, fake.halt_after = content[fake.halt_after :], None
                fake.halted.set()
                fake.go_on.wait(DEADLINE_SECONDS)
            try:
                self.wfile.write(content)
            except OSError:
                self.close_connection = True

        def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            """Not to the standard error."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that hung up is none."""

    server = Server(("127.0.0.1", 0), Handler)
    fake = FakeHub(f"http://127.0.0.1:{server.server_address[1]}", name, dict(files), **options)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join(DEADLINE_SECONDS)
