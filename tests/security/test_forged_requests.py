"""What the service asks for others must not lead it to what only its host reaches: webhooks, and sources of models."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from ipaddress import ip_network
from typing import Any
from urllib.parse import urlsplit

import pytest

from core import posting
from core.hub import Hub, Refused
from core.reach import UnreachableError
from tests.api import driving
from tests.api.test_requests import envelope
from tests.fakes.hub import COMMIT, FakeHub, hub
from tests.fakes.receiver import Receiver, receiving

PUBLIC = (ip_network("127.0.0.2/32"),)
"""Stands for the public internet: an address that may be reached, beside this host's own that may not."""
INSIDE = "127.0.0.1"


@pytest.fixture
def inside() -> Iterator[Receiver]:
    """What only this host reaches."""
    with receiving() as receiver:
        yield receiver


class Rebinding:
    """A name server that answers what it is told, one answer after another; the last one stays."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers, self.asked = [*answers], 0
        self.real = socket.getaddrinfo

    def getaddrinfo(self, host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        if host != "evil.example":
            return self.real(host, port, *arguments, **options)
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [found for address in answer for found in self.real(address, port, *arguments, **options)]


def post(port: int) -> int:
    return posting.post(f"http://evil.example:{port}/", body=b"{}", headers={}, networks=PUBLIC, seconds=2)


def test_a_name_that_changes_its_address_after_it_was_checked_gains_nothing(
    inside: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Rebinding(["127.0.0.2"], [INSIDE])
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    # On 127.0.0.2 nobody listens at that port. Whoever asked for the name again would get inside.
    with pytest.raises(UnreachableError, match="refused"):
        post(urlsplit(inside.url).port or 0)
    assert names.asked == 1
    assert inside.came.empty()


def test_the_next_message_asks_anew_and_is_refused(inside: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Rebinding([INSIDE]).getaddrinfo)
    with pytest.raises(UnreachableError, match="not on the public internet"):
        post(urlsplit(inside.url).port or 0)
    assert inside.came.empty()


@pytest.mark.parametrize("answer", [["127.0.0.2", INSIDE], [INSIDE, "127.0.0.2"], ["127.0.0.2", "::1"]], ids=str)
def test_a_name_with_an_address_inside_among_others_is_refused_whole(
    inside: Receiver, monkeypatch: pytest.MonkeyPatch, answer: list[str]
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Rebinding(answer).getaddrinfo)
    with pytest.raises(UnreachableError, match="not on the public internet"):
        post(urlsplit(inside.url).port or 0)
    assert inside.came.empty()


def test_no_proxy_of_the_environment_sees_a_message(inside: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, inside.url.removesuffix("/hook"))
    monkeypatch.setattr(socket, "getaddrinfo", Rebinding(["127.0.0.2"]).getaddrinfo)
    with pytest.raises(UnreachableError):
        post(1)
    assert inside.came.empty()


@pytest.mark.parametrize(
    "url",
    ["http://[::ffff:10.0.0.1]/", "http://0x0a000001/", "http://10.1/", "http://167772161/", "http://0/"],
)
def test_an_address_inside_is_refused_however_it_is_written(url: str) -> None:
    with pytest.raises(UnreachableError, match=r"not on the public internet|resolved"):
        posting.post(url, body=b"", headers={}, networks=(), seconds=2)


@pytest.mark.parametrize(
    "source",
    [
        "hf://{inside}/model@main", "hf://{inside}", "hf://x@{inside}/model", "hf://org/model@../../{inside}",
        "hf://org/model@main?endpoint=http://{inside}", "http://{inside}/model",
        "https://{inside}/model", "file:///etc", "s3://{inside}/model",
        "dir:http://{inside}", "dir:../..", "dir:/etc", "dir:", "checkpoint:x", "storage:files", "adapter:x:y", "dir:.",
        "//{inside}/share",
    ],
)  # fmt: skip
def test_no_source_of_a_model_is_fetched_from_where_it_says(organization, inside: Receiver, source: str) -> None:
    source = source.format(inside=urlsplit(inside.url).netloc)
    answer = organization.post("/v1/models", json={"id": "evil", "source": source})
    assert answer.status_code in {400, 404}
    envelope(answer, answer.status_code)
    assert inside.came.empty()


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    """The operator's hub, which somebody has taken over."""
    with hub("org/tiny", {"w": b"0123456789"}, large=frozenset({"w"})) as fake:
        yield fake


def fetch(fake: FakeHub) -> None:
    with Hub(fake.url, networks=PUBLIC).opened("org/tiny", COMMIT, "w", start=0, seconds=2):
        pass


@pytest.mark.parametrize(
    "location",
    [
        "https://10.0.0.1/",
        "https://169.254.169.254/latest/",
        "https://[::1]/",
        "https://0x0a000001/",
        "https://localhost/",
    ],
)
def test_a_hub_leads_nobody_inside(fake: FakeHub, location: str) -> None:
    fake.location = location
    with pytest.raises(UnreachableError, match=r"not on the public internet|resolved"):
        fetch(fake)


def test_a_name_that_a_hub_redirects_to_gains_nothing_by_changing_its_address(
    fake: FakeHub, inside: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.location = f"https://evil.example:{urlsplit(inside.url).port}/"
    names = Rebinding(["127.0.0.2"], [INSIDE])
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    with pytest.raises(UnreachableError, match="refused"):
        fetch(fake)
    assert names.asked == 1
    with pytest.raises(UnreachableError, match="not on the public internet"):
        fetch(fake)
    assert inside.came.empty()


def test_a_hub_leads_nobody_to_http(fake: FakeHub, inside: Receiver) -> None:
    fake.location = inside.url
    with pytest.raises(Refused, match="not https"):
        fetch(fake)
    assert inside.came.empty()


@pytest.mark.parametrize("base", ["http://{inside}/model", "hf://evil/model", "file:///etc", "../../etc", "dir:/etc"])
def test_no_base_of_a_job_is_fetched_from_anywhere(http, inside: Receiver, base: str) -> None:
    asked = {"base": base.format(inside=urlsplit(inside.url).netloc)}
    body = {"kind": "finetune", "model": asked, "data": {"train": [driving.upload(http)["id"]]}}
    answer = http.post("/v1/jobs", json=body)
    assert answer.status_code in {400, 404}, answer.text
    assert inside.came.empty()
