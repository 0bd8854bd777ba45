"""Talk to a Trainshed server from Python, over its public routes alone.

    client = Client("http://127.0.0.1:8642", key)
    job = client.submit({"kind": "finetune", "model": {"base": "…"}, "data": {"train": [client.upload(path)["id"]]}})
    for event in client.follow(job["id"]):
        print(event)
    client.download(job["id"], Path("result"))

What the server answers is returned as it stands, as dicts.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, BinaryIO, Self
from urllib.parse import quote

import httpx

Json = dict[str, Any]

QUIET_SECONDS = 45.0
"""A stream that says nothing for this long, not even a heartbeat, is dead."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds between attempts; doubled from the first to the longest."""


class ApiError(Exception):
    """The server's answer to a request that it can't fulfil."""

    def __init__(self, status: int, error: Mapping[str, Any], request_id: str | None) -> None:
        super().__init__(error.get("message") or f"HTTP {status}")
        self.status = status
        self.error = dict(error)
        self.code: str | None = error.get("code")
        self.param: str | None = error.get("param")
        self.request_id = request_id


class Unreachable(Exception):
    """No server answers at the URL."""


class Damaged(Exception):
    """What was downloaded is not what the manifest says."""


@dataclass(frozen=True)
class Event:
    """One frame of a job's stream."""

    name: str
    """`state`, `metrics`, `log`, `checkpoint`, `warning` or `done`."""
    id: str
    data: Json


class Client:
    """One server and one key. Safe to use from several threads; close it, or use it as a context."""

    def __init__(
        self, url: str, key: str, *, patience: float = 30.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.patience = patience
        """How long, in seconds, reads are tried again while the server is away."""
        self.http = httpx.Client(
            base_url=url.rstrip("/") + "/",
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(60.0, connect=5.0),
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.http.close()

    # Files

    def upload(self, file: Path | BinaryIO, *, purpose: str = "fine-tune", filename: str | None = None) -> Json:
        """Send a training file; the answer has its `id`."""
        if isinstance(file, Path):
            with file.open("rb") as opened:
                return self.upload(opened, purpose=purpose, filename=filename or file.name)
        label = filename or os.path.basename(str(getattr(file, "name", "upload")))
        return self._json("POST", "v1/files", data={"purpose": purpose}, files={"file": (label, file)}, timeout=None)

    def files(self, **query: Any) -> Iterator[Json]:
        return self._pages("v1/files", query)

    def file_report(self, file_id: str, **under: Any) -> Json:
        """What validation found; with `base=…`, also what becomes of each example under that model."""
        return self._json("GET", f"v1/files/{_part(file_id)}/report", params=under)

    def preview(self, file_id: str, base: str, **which: Any) -> Json:
        """Some examples in ids and text, as `base` reads them, and what of them is learned."""
        return self._json("POST", f"v1/files/{_part(file_id)}/preview", json={"base": base, **which})

    def delete_file(self, file_id: str) -> Json:
        return self._json("DELETE", f"v1/files/{_part(file_id)}")

    # Jobs

    def submit(self, spec: Mapping[str, Any], *, idempotency_key: str | None = None) -> Json:
        """Queue a job. Trying again is safe: each call carries a key that the server remembers."""
        key = idempotency_key or uuid.uuid4().hex
        return self._retried(lambda: self._json("POST", "v1/jobs", json=spec, headers={"idempotency-key": key}))

    def job(self, job_id: str) -> Json:
        return self._retried(lambda: self._json("GET", f"v1/jobs/{_part(job_id)}"))

    def jobs(self, **query: Any) -> Iterator[Json]:
        """Newest first. Filters: `state`, `kind`, and `label[name]` through a dict."""
        return self._pages("v1/jobs", query)

    def cancel(self, job_id: str) -> Json:
        return self._json("POST", f"v1/jobs/{_part(job_id)}/cancel")

    def pause(self, job_id: str) -> Json:
        return self._json("POST", f"v1/jobs/{_part(job_id)}/pause")

    def resume(self, job_id: str) -> Json:
        return self._json("POST", f"v1/jobs/{_part(job_id)}/resume")

    def events(self, job_id: str, **query: Any) -> Iterator[Json]:
        return self._pages(f"v1/jobs/{_part(job_id)}/events", query)

    def metrics(self, job_id: str, **query: Any) -> Json:
        return self._json("GET", f"v1/jobs/{_part(job_id)}/metrics", params=query)

    def logs(self, job_id: str, **query: Any) -> str:
        return self._send("GET", f"v1/jobs/{_part(job_id)}/logs", params=query).text

    def checkpoints(self, job_id: str, **query: Any) -> Iterator[Json]:
        return self._pages(f"v1/jobs/{_part(job_id)}/checkpoints", query)

    def follow(self, job_id: str, *, after: str | int = 0) -> Iterator[Event]:
        """Every event of the job from `after` on, each once and in order; ends after `done`.

        A broken connection is taken up again where it broke. Raises Unreachable when the server stays away.
        """
        last = str(after)
        pauses = _Pauses(self.patience)
        while True:
            try:
                for event in self._stream(job_id, last):
                    last, pauses = event.id, _Pauses(self.patience)
                    yield event
                    if event.name == "done":
                        return
            except httpx.TransportError as error:
                pauses.take(error)
            except ApiError as error:
                if error.status < 500:
                    raise
                pauses.take(error)
            else:
                # The server said good-bye without `done`: it is going down, and another comes.
                pauses.take(Unreachable("the stream ended before the job did"))

    def wait(self, job_id: str) -> Json:
        """The job, once it has ended."""
        for event in self.follow(job_id):
            if event.name == "done":
                job: Json = event.data["job"]
                return job
        raise AssertionError("a stream ends with `done`")

    # Artifacts

    def artifacts(self, job_id: str) -> Json:
        return self._retried(lambda: self._json("GET", f"v1/jobs/{_part(job_id)}/artifacts"))

    def download(
        self, job_id: str, into: Path, *, report: Callable[[str, int, int], None] = lambda path, done, total: None
    ) -> list[Path]:
        """Bring the job's artifacts into a folder, each verified by its sha256; goes on where an earlier call stopped.

        `report` hears the path, the bytes that are here, and the bytes there are. Raises Damaged.
        """
        paths = []
        for artifact in self.artifacts(job_id)["data"]:
            target = into / _beneath(artifact["path"])
            if not (target.exists() and _sha256(target) == artifact["sha256"]):
                self._fetch(job_id, artifact, target, report)
            report(artifact["path"], artifact["bytes"], artifact["bytes"])
            paths.append(target)
        return paths

    # Models, keys, nodes

    def models(self) -> list[Json]:
        data: list[Json] = self._json("GET", "v1/models")["data"]
        return data

    def register_model(self, model_id: str, source: str | Mapping[str, Any]) -> Json:
        return self._json("POST", "v1/models", json={"id": model_id, "source": source})

    def complete(self, model: str, prompt: str, **options: Any) -> Json:
        """A continuation of `prompt`. Options as in OpenAI's `/completions`, such as max_tokens, temperature, seed."""
        return self._json("POST", "v1/completions", json={"model": model, "prompt": prompt, **options}, timeout=None)

    def chat(self, model: str, messages: list[Json], **options: Any) -> Json:
        body = {"model": model, "messages": messages, **options}
        return self._json("POST", "v1/chat/completions", json=body, timeout=None)

    def chat_stream(self, model: str, messages: list[Json], **options: Any) -> Iterator[str]:
        """The answer, piece by piece as it is made. Raises ApiError where it breaks off."""
        body = {"model": model, "messages": messages, **options, "stream": True}
        try:
            with self.http.stream("POST", "v1/chat/completions", json=body, timeout=None) as response:
                _raise_for(response)
                for line in response.iter_lines():
                    data = line.removeprefix("data: ")
                    if not data or data == "[DONE]":
                        continue
                    chunk: Json = json.loads(data)
                    if "error" in chunk:
                        raise ApiError(response.status_code, chunk["error"], response.headers.get("x-request-id"))
                    yield from (text for choice in chunk["choices"] if (text := choice["delta"].get("content")))
        except httpx.ConnectError as error:
            raise Unreachable(f"no server answers at {self.http.base_url}: {error}") from error
        except httpx.TransportError as error:
            raise Unreachable(f"the answer broke off: {error}") from error

    def keys(self) -> list[Json]:
        return list(self._pages("v1/keys", {}))

    def create_key(self, name: str, scopes: list[str], *, expires_at: int | None = None) -> Json:
        """A new key; the answer is the only place where its secret ever stands."""
        return self._json("POST", "v1/keys", json={"name": name, "scopes": scopes, "expires_at": expires_at})

    def revoke_key(self, key_id: str) -> Json:
        return self._json("DELETE", f"v1/keys/{_part(key_id)}")

    def nodes(self) -> list[Json]:
        data: list[Json] = self._json("GET", "v1/nodes")["data"]
        return data

    def ready(self) -> Json:
        """What `/readyz` says, whether it is ready or not."""
        answer: Json = self.http.get("readyz").json()
        return answer

    # How

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self.http.request(method, path, **options)
        except httpx.ConnectError as error:
            raise Unreachable(f"no server answers at {self.http.base_url}: {error}") from error
        _raise_for(response)
        return response

    def _json(self, method: str, path: str, **options: Any) -> Json:
        answer: Json = self._send(method, path, **options).json()
        return answer

    def _retried(self, call: Callable[[], Json]) -> Json:
        """For what may be asked twice."""
        pauses = _Pauses(self.patience)
        while True:
            try:
                return call()
            except (httpx.TransportError, Unreachable) as error:
                pauses.take(error)
            except ApiError as error:
                if error.status not in {502, 503, 504}:
                    raise
                pauses.take(error)

    def _pages(self, path: str, query: Mapping[str, Any]) -> Iterator[Json]:
        params = _brackets(query)
        while True:
            page = self._retried(partial(self._json, "GET", path, params=dict(params)))
            yield from page["data"]
            if not page["has_more"] or not page["data"]:
                return
            params["after"] = page["data"][-1]["id"]

    def _stream(self, job_id: str, last: str) -> Iterator[Event]:
        headers = {"last-event-id": last, "accept": "text/event-stream"}
        timeout = httpx.Timeout(QUIET_SECONDS, connect=5.0)
        with self.http.stream("GET", f"v1/jobs/{_part(job_id)}/stream", headers=headers, timeout=timeout) as response:
            _raise_for(response)
            yield from _frames(_lines(response.iter_bytes()))

    def _fetch(
        self, job_id: str, artifact: Json, target: Path, report: Callable[[str, int, int], None]
    ) -> None:  # fmt: skip
        part = target.with_name(target.name + ".part")
        target.parent.mkdir(parents=True, exist_ok=True)
        pauses, done = _Pauses(self.patience), part.stat().st_size if part.exists() else 0
        while done < artifact["bytes"] or not part.exists():
            before, error = done, Unreachable("the connection broke")
            try:
                self._append(job_id, artifact, part, done, report)
            except httpx.TransportError as broken:
                error = Unreachable(f"the connection broke: {broken}")
            done = part.stat().st_size if part.exists() else 0
            if done > before:
                pauses = _Pauses(self.patience)
            if done < artifact["bytes"]:
                pauses.take(error)
        if _sha256(part) != artifact["sha256"]:
            part.unlink()
            raise Damaged(f"{artifact['path']} is not what the manifest says; it was removed, download it again")
        os.replace(part, target)

    def _append(
        self, job_id: str, artifact: Json, part: Path, done: int, report: Callable[[str, int, int], None]
    ) -> None:  # fmt: skip
        headers = {"range": f"bytes={done}-", "if-range": f'"{artifact["sha256"]}"'} if done else {}
        url = f"v1/jobs/{_part(job_id)}/artifacts/{quote(artifact['path'])}"
        with self.http.stream("GET", url, headers=headers) as response:
            _raise_for(response)
            with part.open("ab" if response.status_code == 206 else "wb") as file:
                # As it arrives: pieces of a chosen size are held back until they are full, and lost when it breaks off.
                for chunk in response.iter_bytes():
                    file.write(chunk)
                    report(artifact["path"], file.tell(), artifact["bytes"])


class _Pauses:
    """Waits that grow, until patience ends."""

    def __init__(self, patience: float) -> None:
        self.deadline = time.monotonic() + patience
        self.next = FIRST_PAUSE

    def take(self, error: Exception) -> None:
        """Wait a while, or raise what is wrong when it lasts too long."""
        if time.monotonic() + self.next > self.deadline:
            if isinstance(error, ApiError | Unreachable):
                raise error
            raise Unreachable(f"the server stays away: {error}") from error
        time.sleep(self.next)
        self.next = min(2 * self.next, LONGEST_PAUSE)


def _raise_for(response: httpx.Response) -> None:
    if response.is_success:
        return
    response.read()
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        error = {"message": f"HTTP {response.status_code} from something that is not Trainshed; is the URL right?"}
    raise ApiError(response.status_code, error, response.headers.get("x-request-id"))


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Whole lines. `iter_lines` of httpx would also split at U+2028 and the like, which may stand inside JSON."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def _frames(lines: Iterator[bytes]) -> Iterator[Event]:
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.decode().rstrip("\r").partition(":")
        if name:
            fields[name] = value.removeprefix(" ")
        elif not line.strip() and "data" in fields:
            yield Event(fields.get("event", "message"), fields.get("id", ""), json.loads(fields["data"]))
            fields = {}


def _part(name: str) -> str:
    return quote(name, safe=":")


def _beneath(path: str) -> Path:
    """A relative path that stays where it is put, whatever the server says."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or any("\\" in part or ":" in part for part in parts):
        raise Damaged(f"the server names a file {path!r}, which does not stay in its folder")
    return Path(*parts)


def _brackets(query: Mapping[str, Any]) -> Json:
    """`{"label": {"team": "a"}}` as `label[team]=a`."""
    flat: Json = {}
    for name, value in query.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}[{key}]": inner for key, inner in value.items()}
        elif value is not None:
            flat[name] = value
    return flat


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
