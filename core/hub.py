"""A Hugging Face hub, or a mirror that speaks its routes: what a repository holds at a commit, and the bytes of a file.

Where the hub is, and the token, are the operator's to say. Wherever it redirects to, the token does not go along, and
nothing is reached that a stranger could not reach.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import httpcore

from core.reach import EVERYWHERE, Deadline, Guarded, UnreachableError, answered, ssl_context, target_of
from core.settings import Network, Settings

ASKING_SECONDS = 15.0
"""How long a question may take, such as what a repository holds."""
SILENCE_SECONDS = 30.0
"""How long the bytes of a file may stay away."""
ANSWER_BYTES = 32 * 1024**2
"""Of what is read into memory, at most."""
HOPS = 5
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_SOURCE = re.compile(
    rf"hf://(?P<name>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9](?:[A-Za-z0-9._/-]{{0,198}}[A-Za-z0-9_-])?))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOB = re.compile(r"[0-9a-f]{40}")
_URL = re.compile(r"[\x21-\x7e]+")
_RANGE = re.compile(rb"bytes (\d+)-\d+/(?:\d+|\*)")
_REDIRECTS = {301, 302, 303, 307, 308}
_BEYOND = 416
"""What is asked of a part that begins behind the end."""
_USUAL_PORTS = {"http": 80, "https": 443}


class Refused(Exception):
    """The hub has no such thing for us, and asking again will not change that; the text says why, without a stop."""


@dataclass(frozen=True)
class Wanted:
    """What `hf://org/name@revision` names."""

    name: str
    revision: str

    @classmethod
    def parse(cls, source: str) -> Self:
        """ValueError for what names no repository."""
        found = _SOURCE.fullmatch(source)
        if found is None or any(sign in source for sign in ("..", "--")) or "//" in source.removeprefix("hf://"):
            raise ValueError(
                "a source on a hub is hf://org/name or hf://org/name@revision: of letters, digits, dots, hyphens and "
                "underscores, and in a revision slashes"
            )
        return cls(found["name"], found["revision"] or "main")


@dataclass(frozen=True)
class HubFile:
    """A file as the hub describes it: where its size is known, one hash is, too."""

    path: str
    bytes: int | None
    """None where the hub describes too little to see whether the file is what it should be."""
    sha256: str | None = None
    blob: str | None = None
    """What git calls it: the SHA-1 of its content behind a header."""


@dataclass(frozen=True)
class Repo:
    """A repository at a commit."""

    name: str
    commit: str
    files: tuple[HubFile, ...]

    @property
    def source(self) -> str:
        return f"hf://{self.name}@{self.commit}"


@dataclass(frozen=True)
class Answer:
    """Bytes of a file, from `start` on."""

    start: int
    chunks: Iterator[bytes]


class Hub:
    """Nothing connects before it is asked."""

    def __init__(self, endpoint: str, *, token: str | None = None, networks: Sequence[Network] = ()) -> None:
        """`networks` are those that it may redirect to beside the public internet."""
        self._endpoint, self._token, self._networks = endpoint.rstrip("/"), token, networks
        self._home = urlsplit(self._endpoint)

    @classmethod
    def of(cls, settings: Settings, *, for_everyone: bool) -> Self:
        """The operator's. The token opens what is the operator's, so it goes along for bases of the organisation."""
        token = settings.hf_token if for_everyone else None
        return cls(settings.hf_endpoint, token=token, networks=settings.hub_reachable)

    @property
    def host(self) -> str:
        return self._home.netloc

    def repo(self, wanted: Wanted) -> Repo:
        """What the repository holds, at the commit that the revision is now. Raises Refused and UnreachableError."""
        path = f"/api/models/{wanted.name}/revision/{quote(wanted.revision, safe='')}?blobs=true"
        try:
            said = json.loads(self._read(path, about=f"hf://{wanted.name}@{wanted.revision}"))
            commit, files = str(said["sha"]), tuple(map(_file, said["siblings"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Refused(f"{self.host} does not answer as a hub does; look whether HF_ENDPOINT is right") from error
        if not _COMMIT.fullmatch(commit):
            raise Refused(f"{self.host} names no commit for hf://{wanted.name}@{wanted.revision}")
        return Repo(wanted.name, commit, files)

    def read(self, repo: Repo, file: HubFile) -> bytes:
        """A small file, whole. Whether it is what it should be is the caller's to see."""
        return self._read(_resolved(repo.name, repo.commit, file.path), about=f"{repo.source}/{file.path}")

    @contextmanager
    def opened(self, name: str, commit: str, path: str, *, start: int, seconds: float) -> Iterator[Answer]:
        """The bytes of a file from `start` on, or from its beginning where the hub does not go into it."""
        deadline, sent = Deadline(seconds, silence=SILENCE_SECONDS), {"range": f"bytes={start}-"} if start else {}
        with ExitStack() as stack:
            answer = stack.enter_context(self._get(_resolved(name, commit, path), deadline, SILENCE_SECONDS, sent))
            if answer.status == _BEYOND and sent:
                # Less lies there than has come; what that is, its hash will tell.
                stack.close()
                answer = stack.enter_context(self._get(_resolved(name, commit, path), deadline, SILENCE_SECONDS, {}))
            self._check(answer, about=f"hf://{name}@{commit}/{path}")
            found = _RANGE.fullmatch(_header(answer, b"content-range") or b"") if answer.status == 206 else None
            yield Answer(int(found[1]) if found else 0, answer.iter_stream())

    def _read(self, path: str, *, about: str) -> bytes:
        with self._get(path, Deadline(ASKING_SECONDS), ASKING_SECONDS, {}) as answer:
            self._check(answer, about=about)
            content = bytearray()
            for chunk in answer.iter_stream():
                content += chunk
                if len(content) > ANSWER_BYTES:
                    raise Refused(f"{about} is more than {ANSWER_BYTES:,} bytes, which nobody reads here")
            return bytes(content)

    @contextmanager
    def _get(
        self, path: str, deadline: Deadline, seconds: float, headers: dict[str, str]
    ) -> Iterator[httpcore.Response]:
        """What is answered in the end.

        The hub knows what is there, so where it leads nowhere it is Refused; another host's word is for now.
        """
        parts = self._home
        url, abroad = self._endpoint + path, False
        with answered(seconds), ExitStack() as stack:
            for _ in range(HOPS + 1):
                parts = self._checked(url, by=parts)
                abroad = abroad or not self._is_home(parts)
                networks = EVERYWHERE if parts.hostname == self._home.hostname else self._networks
                # Compressed, a part would not be a part of the file.
                sent = {"accept-encoding": "identity", "user-agent": "trainshed", **headers}
                if self._token is not None and self._is_home(parts):
                    sent["authorization"] = f"Bearer {self._token}"
                guard = Guarded(networks, deadline, setting="TRAINSHED_HUB_NETWORKS")
                pool = httpcore.ConnectionPool(ssl_context=ssl_context(), network_backend=guard, max_connections=1)
                answer = stack.enter_context(
                    stack.enter_context(pool).stream("GET", target_of(parts), headers=list(sent.items()))
                )
                location = _header(answer, b"location")
                if answer.status not in _REDIRECTS or location is None:
                    usable = {200, 206, _BEYOND} if "range" in headers else {200}
                    if answer.status not in usable and not self._is_home(parts):
                        raise UnreachableError(f"{parts.netloc}, where it leads, answered {answer.status}")
                    yield answer
                    return
                url = _joined(url, location)
                stack.close()
        words = f"redirects more than {HOPS} times"
        raise UnreachableError(f"it {words}") if abroad else self._astray(words, by=self._home)

    def _astray(self, words: str, *, by: SplitResult) -> Refused | UnreachableError:
        """What a redirect is that nobody follows, `by` whom."""
        if self._is_home(by):
            return Refused(f"{self.host} {words}; look whether HF_ENDPOINT is right")
        return UnreachableError(f"{by.netloc}, where it leads, {words}")

    def _checked(self, url: str, *, by: SplitResult) -> SplitResult:
        """The parts of a URL that may be asked for, to which `by` leads: the hub's own, or one under TLS."""
        try:
            parts = urlsplit(url)
            usable = _URL.fullmatch(url) and parts.hostname and parts.port != 0 and "@" not in parts.netloc
        except ValueError:
            usable = False
        if not usable:
            raise self._astray("redirects to what is no URL", by=by)
        if parts.scheme != "https" and not self._is_home(parts):
            # Its query may hold a signature, so no more of it is told than where it leads.
            raise self._astray(f"redirects to {parts.scheme}://{parts.netloc}, which is not https", by=by)
        return parts

    def _is_home(self, parts: SplitResult) -> bool:
        return _origin(parts) == _origin(self._home)

    def _check(self, answer: httpcore.Response, *, about: str) -> None:
        status = answer.status
        if status in {200, 206}:
            # No file that is asked for is a page, so this is whoever stands between, and may not stand there tomorrow.
            if (_header(answer, b"content-type") or b"").lower().startswith(b"text/html"):
                raise UnreachableError(
                    f"it answers with a web page where {about} should be: a proxy or a sign-in page may stand between, "
                    "or HF_ENDPOINT names no hub"
                )
            return
        if status in {401, 403}:
            raise Refused(
                f"{self.host} answers {status} for {about}: it is not there, or is private or gated. Whoever runs this "
                "server can set HF_TOKEN to the token of an account that may read it, and that has accepted its terms "
                "where it is gated; it is used for what an admin of the organisation registers"
            )
        if status in {404, 410}:
            raise Refused(f"{self.host} has no {about}; look at its name and revision there")
        if status in {408, 425, 429} or status >= 500:
            raise UnreachableError(f"it answered {status}")
        raise Refused(f"{self.host} answers {status} for {about}")


def _resolved(name: str, commit: str, path: str) -> str:
    return f"/{name}/resolve/{commit}/{quote(path)}"


def _file(said: Any) -> HubFile:
    large = said.get("lfs") or {}
    size, sha256, blob = large.get("size", said.get("size")), large.get("sha256"), said.get("blobId")
    # Of a large file git has the pointer alone.
    sha256 = sha256 if isinstance(sha256, str) and _SHA256.fullmatch(sha256) else None
    blob = blob if sha256 is None and isinstance(blob, str) and _BLOB.fullmatch(blob) else None
    known = type(size) is int and size >= 0 and (sha256 or (blob and not large))
    return HubFile(str(said["rfilename"]), size if known else None, sha256, blob)


def _joined(url: str, location: bytes) -> str:
    """Where a redirect leads; nothing where that is no URL."""
    try:
        return urljoin(url, location.decode("latin-1"))
    except ValueError:
        return ""


def _header(answer: httpcore.Response, name: bytes) -> bytes | None:
    return next((value for key, value in answer.headers if key.lower() == name), None)


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or _USUAL_PORTS.get(parts.scheme)
