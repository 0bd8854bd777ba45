"""Talk to a Trainshed server from Python, over its public routes alone. Users import it as `trainshed`.

    client = Client("http://127.0.0.1:8642", key)
    job = client.submit({"kind": "finetune", "model": {"base": "…"}, "data": {"train": [client.upload(path)["id"]]}})
    for event in client.follow(job["id"]):
        print(event)
    client.download(job["id"], Path("result"))

What the server answers is returned as it stands, as dicts. What may be asked twice is tried again for as long as
`patience` says, and so is everything that did not reach the server or that it put off; nothing else is.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar
from urllib.parse import quote

import httpx

Json = dict[str, Any]
Answer = TypeVar("Answer")
Prompt = str | list[str] | list[int] | list[list[int]]
"""One or several, as text or as token ids."""

QUIET_SECONDS = 45.0
"""A stream that says nothing for this long, not even a heartbeat, is dead."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds between attempts; doubled from the first to the longest."""


STEADY_SECONDS = 5.0
"""A stream that broke off sooner than this is still the same outage."""
ANSWER_SECONDS = 300.0
"""How long nothing may come of what takes its time on the server: judging a file, waiting for a sampler."""
PIECE = 1024 * 1024
PART_BYTES = 16 * 1024 * 1024
"""A larger file is sent in parts of this size."""
MANIFEST = "manifest.json"
"""Of the artifacts, the one that names all others."""
PUT_OFF = 429
OVERTAKEN = frozenset({404, 409})
"""Statuses of an upload that somebody else has ended meanwhile."""
LATER = frozenset({502, 503, 504})
"""Statuses of a server, or of what stands before it, that may pass by themselves."""

Report = Callable[[str, int, int], None]
"""Hears of a transfer: the name, the bytes that are over, and the bytes there are."""
Waiting = Callable[[Exception, float], None]
"""Hears that something is tried again: what went wrong, and for how many seconds more it is tried."""


class TrainshedError(Exception):
    """Whatever goes wrong between this client and a server."""


class ApiError(TrainshedError):
    """The server's answer to a request that it can't fulfil."""

    def __init__(
        self, status: int, error: Mapping[str, Any], request_id: str | None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(error.get("message") or f"HTTP {status}")
        self.status = status
        self.error = dict(error)
        """All that the server said."""
        self.code: str | None = error.get("code")
        """Stable name of the error."""
        self.param: str | None = error.get("param")
        """Path of the field to blame, such as `training.lr`."""
        self.request_id = request_id
        """Under which the server's log has it."""
        self.retry_after = _seconds((headers or {}).get("retry-after"))
        """Seconds that the server asks to wait, if it does."""
        self.is_final = (headers or {}).get("x-should-retry") == "false"
        """The server says that asking again is in vain."""


class Unreachable(TrainshedError):
    """No server answers at the URL, or the connection broke."""


class Damaged(TrainshedError):
    """What was downloaded is not what the manifest says."""


class Occupied(TrainshedError):
    """The folder that a download is to go to has something else."""


@dataclass(frozen=True)
class Event:
    """One frame of a job's stream."""

    name: str
    """`state`, `metrics`, `log`, `checkpoint`, `warning` or `done`."""
    id: str
    data: Json


@dataclass(frozen=True)
class Log:
    """What a rank wrote."""

    rank: int
    text: str


class Client:
    """One server and one key. Safe to use from several threads; close it, or use it as a context."""

    def __init__(
        self,
        url: str,
        key: str,
        *,
        patience: float = 30.0,
        timeout: float = 60.0,
        waiting: Waiting = lambda error, seconds: None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.patience = patience
        """How long, in seconds, something is tried again while the server is away; 0 does not try again."""
        self.timeout = timeout
        """How long, in seconds, one request may go on without a byte coming or going."""
        self.waiting = waiting
        """Hears each time before it is waited."""
        self.http = httpx.Client(
            base_url=url.rstrip("/") + "/",
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(timeout, connect=min(5.0, timeout)),
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.http.close()

    # Files

    def upload(
        self,
        file: Path | BinaryIO,
        *,
        purpose: str = "fine-tune",
        filename: str | None = None,
        reuse: bool = False,
        report: Report = lambda name, done, total: None,
    ) -> Json:
        """Send a training file, a large one in parts; the answer has its `id`.

        With `reuse`, a file that is there already, by name, content and purpose, is returned instead, and parts that an
        earlier call has sent are not sent again, also if its process was killed; trying again after a broken connection
        is then safe, and is done.
        """
        if isinstance(file, Path):
            with file.open("rb") as opened:
                return self.upload(opened, purpose=purpose, filename=filename or file.name, reuse=reuse, report=report)
        label = filename or os.path.basename(str(getattr(file, "name", "upload")))
        sent = _Counted(file, lambda done, total: report(label, done, total))

        def send() -> Json:
            if reuse and (there := self.uploaded(sha256=sent.sha256(), filename=label, purpose=purpose)):
                return there
            if sent.total > PART_BYTES:
                return self._in_parts(sent, label, purpose, resume=reuse)
            answer: Json = self._once(
                "POST", "v1/files", data={"purpose": purpose}, files={"file": (label, sent)},
                timeout=self._patient,
            ).json()  # fmt: skip
            return answer

        return self._tried(send, again=reuse)

    def _in_parts(self, sent: _Counted, label: str, purpose: str, *, resume: bool) -> Json:
        """A large file, of which a broken connection costs a part. With `resume`, what an earlier call has sent stays,
        however that ended."""
        new = {"bytes": sent.total, "filename": label, "purpose": purpose}
        if resume:
            listed = self._pages("v1/uploads", {"status": "pending", "limit": 100})
            if open_ := next((upload for upload in listed if new.items() <= upload.items()), None):
                try:
                    return self._filled(open_["id"], sent, resume=True)
                except ApiError as error:
                    if error.status not in OVERTAKEN:
                        raise
                    if there := self.uploaded(sha256=sent.sha256(), filename=label, purpose=purpose):
                        return there
        begun = self._json("POST", "v1/uploads", json={**new, "mime_type": "application/octet-stream"})
        return self._filled(begun["id"], sent, resume=resume)

    def _filled(self, upload_id: str, sent: _Counted, *, resume: bool) -> Json:
        """The file of an open upload, once the parts that it has not yet were sent."""
        upload, parts = f"v1/uploads/{_part(upload_id)}", []
        there: dict[str, str] = {}
        if resume:
            there = {part["md5"]: part["id"] for part in self._pages(f"{upload}/parts", {})}
        sent.seek(0)
        try:
            while piece := sent.read(PART_BYTES):
                # One is a part of the file once, also where it says twice the same.
                part = there.pop(hashlib.md5(piece, usedforsecurity=False).hexdigest(), None)
                if part is None:
                    form = {"data": ("part", piece, "application/octet-stream")}
                    part = self._json("POST", f"{upload}/parts", again=True, files=form)["id"]
                parts.append(part)
            whole = {"part_ids": parts}
            file: Json = self._json("POST", f"{upload}/complete", again=True, json=whole, timeout=self._patient)["file"]
        except BaseException as error:
            # It would stay open for an hour, and its bytes count against the project's.
            if not resume or (isinstance(error, ApiError) and error.status not in OVERTAKEN | LATER | {PUT_OFF}):
                with suppress(TrainshedError):
                    self._json("POST", f"{upload}/cancel")
            raise
        return file

    def uploaded(self, *, sha256: str, filename: str, purpose: str) -> Json | None:
        """The newest file with this content, name and purpose."""
        same = {"sha256": sha256, "filename": filename}
        found = (file for file in self.files(purpose=purpose) if same.items() <= file.items())
        return next(found, None)

    def files(self, **query: Any) -> Iterator[Json]:
        """Newest first. Filter: `purpose`."""
        return self._pages("v1/files", query)

    def file(self, file_id: str) -> Json:
        return self._json("GET", f"v1/files/{_part(file_id)}")

    def file_report(self, file_id: str, **under: Any) -> Json:
        """What validation found; with `base=…`, also what becomes of each example under that model."""
        return self._json("GET", f"v1/files/{_part(file_id)}/report", params=_brackets(under), timeout=self._patient)

    def preview(self, file_id: str, base: str, **which: Any) -> Json:
        """Some examples in ids and text, as `base` reads them, and what of them is learned."""
        body = {"base": base, **which}
        path = f"v1/files/{_part(file_id)}/preview"
        return self._json("POST", path, again=True, json=body, timeout=self._patient)

    def delete_file(self, file_id: str) -> Json:
        return self._json("DELETE", f"v1/files/{_part(file_id)}")

    # Jobs

    def submit(self, spec: Mapping[str, Any], *, idempotency_key: str | None = None) -> Json:
        """Queue a job. Trying again is safe: each call carries a key that the server remembers."""
        key = idempotency_key or uuid.uuid4().hex
        return self._json("POST", "v1/jobs", again=True, json=spec, headers={"idempotency-key": key})

    def plan(self, spec: Mapping[str, Any]) -> Json:
        """What a job would be and need; nothing is queued."""
        return self._json("POST", "v1/plans", again=True, json=spec)

    def job(self, job_id: str) -> Json:
        return self._json("GET", f"v1/jobs/{_part(job_id)}")

    def jobs(self, **query: Any) -> Iterator[Json]:
        """Newest first. Filters: `state`, `kind`, and `label[name]` through a dict."""
        return self._pages("v1/jobs", query)

    def cancel(self, job_id: str) -> Json:
        """End it. Like the next two it may be asked twice."""
        return self._json("POST", f"v1/jobs/{_part(job_id)}/cancel", again=True)

    def pause(self, job_id: str) -> Json:
        return self._json("POST", f"v1/jobs/{_part(job_id)}/pause", again=True)

    def resume(self, job_id: str, **layout: Any) -> Json:
        """Queue a paused job again, in another layout where `parallel`, `recompute` or `resources` say so."""
        return self._json("POST", f"v1/jobs/{_part(job_id)}/resume", again=True, json=layout or None)

    def retry(self, job_id: str) -> Json:
        """Queue a job again that failed or was cancelled; it goes on from its newest checkpoint."""
        return self._json("POST", f"v1/jobs/{_part(job_id)}/retry", again=True)

    def delete(self, job_id: str, *, force: bool = False) -> Json:
        """Delete a job that has ended with all that it left; with `force` also checkpoints that others may use."""
        return self._json("DELETE", f"v1/jobs/{_part(job_id)}", params={"force": True} if force else {})

    def edit(self, job_id: str, **changes: Any) -> Json:
        """Change `name`, `labels` or `priority`. What isn't said stays; None takes a name or a label away."""
        return self._json("PATCH", f"v1/jobs/{_part(job_id)}", again=True, json=changes)

    def events(self, job_id: str, **query: Any) -> Iterator[Json]:
        """Oldest first, unless `order` is `desc`. Filter: `type`."""
        return self._pages(f"v1/jobs/{_part(job_id)}/events", query)

    def metrics(self, job_id: str, **query: Any) -> Json:
        """Numbers over steps, thinned: `names`, `from_step`, `to_step`, `max_points`."""
        return self._json("GET", f"v1/jobs/{_part(job_id)}/metrics", params=_brackets(query))

    def logs(self, job_id: str, **query: Any) -> str:
        """What a rank wrote: `rank`, else that of the rank that the job failed by, or 0; the last `tail` lines."""
        return self.log(job_id, **query).text

    def log(self, job_id: str, **query: Any) -> Log:
        """`logs`, and whose it is."""
        answer = self._send("GET", f"v1/jobs/{_part(job_id)}/logs", again=True, params=_brackets(query))
        return Log(int(answer.headers["x-log-rank"]), answer.text)

    def checkpoints(self, job_id: str, **query: Any) -> Iterator[Json]:
        """Newest first; of those that are `abandoned` the run went back, and no attempt goes on from them."""
        return self._pages(f"v1/jobs/{_part(job_id)}/checkpoints", query)

    def follow(self, job_id: str, *, after: str | int = 0) -> Iterator[Event]:
        """Every event of the job from `after` on, each once and in order; ends after `done`.

        A broken connection is taken up again where it broke. Raises Unreachable when the server stays away.
        """
        last = str(after)
        pauses = _Pauses(self)
        while True:
            began = time.monotonic()
            # The server may say good-bye without `done`: it is going down, and another comes.
            error: Exception = Unreachable("the stream ended before the job did")
            try:
                for event in self._stream(job_id, last):
                    last, began = event.id, -STEADY_SECONDS
                    yield event
                    if event.name == "done":
                        return
            except httpx.TransportError as broken:
                error = broken
            except ApiError as refused:
                if refused.status not in LATER | {PUT_OFF}:
                    raise
                error = refused
            if time.monotonic() - began >= STEADY_SECONDS:
                pauses = _Pauses(self)
            pauses.take(error)

    def wait(self, job_id: str) -> Json:
        """The job, once it has ended."""
        for event in self.follow(job_id):
            if event.name == "done":
                job: Json = event.data["job"]
                return job
        raise AssertionError("a stream ends with `done`")

    # Artifacts

    def artifacts(self, job_id: str) -> Json:
        """The files of the job's result, and the manifest."""
        return self._json("GET", f"v1/jobs/{_part(job_id)}/artifacts")

    def download(
        self, job_id: str, into: Path, *, report: Report = lambda path, done, total: None
    ) -> list[Path]:  # fmt: skip
        """Bring the job's artifacts into a folder, each verified by its sha256; goes on where an earlier call stopped,
        however that ended.

        `report` hears the path, the bytes that are here, and the bytes there are. Raises Damaged, and Occupied where
        the folder has another job's artifacts.
        """
        paths = []
        # The manifest first: with it the folder is this job's, however far the rest comes.
        for artifact in sorted(self.artifacts(job_id)["data"], key=lambda each: each["path"] != MANIFEST):
            target = into / _beneath(artifact["path"])
            if artifact["path"] == MANIFEST and _is_anothers(target, artifact["sha256"]):
                raise Occupied(f"{into} has another job's artifacts, which would stay beside these")
            if not (target.exists() and _sha256(target) == artifact["sha256"]):
                self._fetch(job_id, artifact, target, report)
            report(artifact["path"], artifact["bytes"], artifact["bytes"])
            paths.append(target)
        return paths

    # Models, keys, projects, nodes

    def models(self) -> list[Json]:
        data: list[Json] = self._json("GET", "v1/models")["data"]
        return data

    def model(self, model_id: str) -> Json:
        return self._json("GET", f"v1/models/{_part(model_id)}")

    def delete_model(self, model_id: str, *, force: bool = False) -> Json:
        """Let go of a model's name; with `force` also where checkpoints are adapters on it, and of no use then."""
        return self._json("DELETE", f"v1/models/{_part(model_id)}", params={"force": True} if force else {})

    def register_model(self, model_id: str, source: str | Mapping[str, Any]) -> Json:
        return self._json("POST", "v1/models", json={"id": model_id, "source": source})

    def complete(self, model: str, prompt: Prompt, **options: Any) -> Json:
        """A continuation of each prompt. Options as in OpenAI's `/completions`: max_tokens, temperature, seed."""
        body = {"model": model, "prompt": prompt, **options}
        return self._json("POST", "v1/completions", json=body, timeout=self._patient)

    def chat(self, model: str, messages: list[Json], **options: Any) -> Json:
        """An answer, whole. Options as in OpenAI's `/chat/completions`."""
        body = {"model": model, "messages": messages, **options}
        return self._json("POST", "v1/chat/completions", json=body, timeout=self._patient)

    def chat_stream(self, model: str, messages: list[Json], **options: Any) -> Iterator[str]:
        """The answer, piece by piece as it is made. Raises ApiError where it breaks off."""
        body = {"model": model, "messages": messages, **options, "stream": True}
        try:
            with self.http.stream("POST", "v1/chat/completions", json=body, timeout=self._patient) as response:
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

    def keys(self, **query: Any) -> list[Json]:
        """Newest first. For an admin of the organisation also those of another `project`."""
        return list(self._pages("v1/keys", query))

    def create_key(
        self,
        name: str,
        scopes: list[str],
        *,
        expires_at: int | None = None,
        expires_in: str | float | None = None,
        project: str | None = None,
    ) -> Json:
        """A new key; the answer is the only place where its secret ever stands. It ends at `expires_at` (unix seconds)
        or after `expires_in` (`30d`, or seconds), if either is said."""
        asked = {"name": name, "scopes": scopes, "expires_at": expires_at, "expires_in": expires_in, "project": project}
        return self._json("POST", "v1/keys", json=asked)

    def revoke_key(self, key_id: str) -> Json:
        """End a key; it may be asked twice."""
        return self._json("DELETE", f"v1/keys/{_part(key_id)}", again=True)

    def projects(self, **query: Any) -> Iterator[Json]:
        """Newest first; also closed ones with `include_archived`."""
        return self._pages("v1/projects", query)

    def project(self, project_id: str) -> Json:
        """What it may use, and what it uses."""
        return self._json("GET", f"v1/projects/{_part(project_id)}")

    def create_project(self, name: str, *, preemption: str = "never", **quotas: float | int | None) -> Json:
        """Quotas: `gpu_hours`, `concurrent_jobs`, `storage_bytes`; None, or one that isn't said, has no limit.

        `preemption`: whose jobs of higher priority may stop its jobs: `never`, its `own`, or `any`.
        """
        return self._json("POST", "v1/projects", json={"name": name, "quotas": quotas, "preemption": preemption})

    def edit_project(self, project_id: str, **changes: Any) -> Json:
        """Change `name`, `preemption` or `quotas` (a dict); what isn't said stays, None takes a quota away."""
        return self._json("PATCH", f"v1/projects/{_part(project_id)}", again=True, json=changes)

    def archive_project(self, project_id: str) -> Json:
        """Close it for good; it may be asked twice."""
        return self._json("POST", f"v1/projects/{_part(project_id)}/archive", again=True)

    def nodes(self) -> list[Json]:
        data: list[Json] = self._json("GET", "v1/nodes")["data"]
        return data

    def ready(self) -> Json:
        """What `/readyz` says, whether it is ready or not."""
        try:
            answer: Json = self.http.get("readyz").json()
        except httpx.TransportError as error:
            raise Unreachable(f"no server answers at {self.http.base_url}: {error}") from error
        return answer

    # How

    @property
    def _patient(self) -> httpx.Timeout:
        """For what takes its time on the server."""
        return httpx.Timeout(self.timeout, connect=min(5.0, self.timeout), read=max(ANSWER_SECONDS, self.timeout))

    def _once(self, method: str, path: str, **options: Any) -> httpx.Response:
        response = self.http.request(method, path, **options)
        _raise_for(response)
        return response

    def _send(self, method: str, path: str, *, again: bool, **options: Any) -> httpx.Response:
        return self._tried(lambda: self._once(method, path, **options), again=again)

    def _json(self, method: str, path: str, *, again: bool = False, **options: Any) -> Json:
        answer: Json = self._send(method, path, again=again or method == "GET", **options).json()
        return answer

    def _tried(self, call: Callable[[], Answer], *, again: bool) -> Answer:
        """Ask, and ask again where that can help and, as `again` says or since nothing was done, does no harm."""
        pauses = _Pauses(self)
        while True:
            try:
                return call()
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                pauses.take(Unreachable(f"no server answers at {self.http.base_url}: {error}"))
            except httpx.TransportError as error:
                broken = Unreachable(f"the connection to {self.http.base_url} broke: {error or type(error).__name__}")
                if not again:
                    raise broken from error
                pauses.take(broken)
            except ApiError as error:
                if error.is_final or not (error.status == PUT_OFF or (again and error.status in LATER)):
                    raise
                pauses.take(error)

    def _pages(self, path: str, query: Mapping[str, Any]) -> Iterator[Json]:
        params = _brackets(query)
        while True:
            page = self._json("GET", path, params=dict(params))
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

    def _fetch(self, job_id: str, artifact: Json, target: Path, report: Report) -> None:
        part = target.with_name(target.name + ".part")
        target.parent.mkdir(parents=True, exist_ok=True)
        found = part.exists()
        self._complete(job_id, artifact, part, report)
        if found and _sha256(part) != artifact["sha256"]:
            # What lay here was the beginning of something else, or was spoiled: once more, from the first byte.
            part.unlink()
            self._complete(job_id, artifact, part, report)
        if _sha256(part) != artifact["sha256"]:
            part.unlink()
            raise Damaged(f"{artifact['path']} is not what the manifest says; it was removed, download it again")
        os.replace(part, target)

    def _complete(self, job_id: str, artifact: Json, part: Path, report: Report) -> None:
        """Bring what is missing of a file, over as many connections as it takes."""
        pauses, done = _Pauses(self), part.stat().st_size if part.exists() else 0
        while done < artifact["bytes"] or not part.exists():
            before, error = done, Unreachable("the connection broke")
            try:
                self._append(job_id, artifact, part, done, report)
            except httpx.TransportError as broken:
                error = Unreachable(f"the connection broke: {broken or type(broken).__name__}")
            done = part.stat().st_size if part.exists() else 0
            if done > before:
                pauses = _Pauses(self)
            if done < artifact["bytes"]:
                pauses.take(error)

    def _append(self, job_id: str, artifact: Json, part: Path, done: int, report: Report) -> None:
        headers = {"range": f"bytes={done}-", "if-range": f'"{artifact["sha256"]}"'} if done else {}
        url = f"v1/jobs/{_part(job_id)}/artifacts/{quote(artifact['path'])}"
        with self.http.stream("GET", url, headers=headers) as response:
            _raise_for(response)
            with part.open("ab" if response.status_code == 206 else "wb") as file:
                # As it arrives: pieces of a chosen size are held back until they are full, and lost when it breaks off.
                for chunk in response.iter_bytes():
                    file.write(chunk)
                    report(artifact["path"], file.tell(), artifact["bytes"])


def _is_anothers(manifest: Path, sha256: str) -> bool:
    """Whether a whole manifest lies here that is not this one; one that a power cut has spoilt is nobody's."""
    if not manifest.exists() or _sha256(manifest) == sha256:
        return False
    try:
        json.loads(manifest.read_bytes())
    except ValueError:
        return False
    return True


class _Pauses:
    """Waits that grow, until patience ends. It begins with the first of them."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.deadline: float | None = None
        self.next = FIRST_PAUSE

    def take(self, error: Exception) -> None:
        """Wait a while, or raise what is wrong when it lasts too long."""
        now = time.monotonic()
        self.deadline = self.deadline or now + self.client.patience
        # The last one ends with the patience, unless the server has said that it is in vain to come so soon.
        at_least = getattr(error, "retry_after", None) or 0.0
        pause = max(at_least, min(self.next, self.deadline - now))
        if now >= self.deadline or now + at_least > self.deadline:
            if isinstance(error, TrainshedError):
                raise error
            raise Unreachable(f"the server stays away: {error}") from error
        self.client.waiting(error, self.deadline - now)
        time.sleep(pause)
        self.next = min(2 * self.next, LONGEST_PAUSE)


class _Counted:
    """A file, all of it, that says how much of it was read, and can be read anew."""

    def __init__(self, file: BinaryIO, report: Callable[[int, int], None]) -> None:
        self.file = file
        self.report = report
        self.total = file.seek(0, os.SEEK_END)
        self._sha256: str | None = None
        file.seek(0)

    def sha256(self) -> str:
        """Leaves the file at its beginning."""
        if self._sha256 is None:
            digest = hashlib.sha256()
            self.file.seek(0)
            while piece := self.file.read(PIECE):
                digest.update(piece)
            self.file.seek(0)
            self._sha256 = digest.hexdigest()
        return self._sha256

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        self.report(self.file.tell(), self.total)
        return data

    def tell(self) -> int:
        return self.file.tell()

    def seek(self, to: int, whence: int = os.SEEK_SET) -> int:
        return self.file.seek(to, whence)


def _raise_for(response: httpx.Response) -> None:
    if response.is_success:
        return
    response.read()
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        error = {"message": f"HTTP {response.status_code} from something that is not Trainshed; is the URL right?"}
    raise ApiError(response.status_code, error, response.headers.get("x-request-id"), response.headers)


def _seconds(value: str | None) -> float | None:
    """What `Retry-After` says as a number; its form as a date is for days, and nobody waits that long here."""
    try:
        return max(0.0, float(value or ""))
    except ValueError:
        return None


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
