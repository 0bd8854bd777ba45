"""Where a message may go that somebody else addressed: the public internet, and networks that the operator names."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path

import pytest

from core import posting
from core.errors import InvalidRequest
from core.reach import UnreachableError, may_reach
from tests.fakes.receiver import Receiver, receiving

HERE = (ip_network("127.0.0.0/8"), ip_network("::1/128"))


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1::1", True), ("::ffff:93.184.216.34", True),
        ("127.0.0.1", False), ("127.8.9.10", False), ("0.0.0.0", False), ("10.1.2.3", False), ("172.31.0.1", False),
        ("192.168.1.1", False), ("169.254.169.254", False), ("100.64.0.1", False), ("224.0.0.1", False),
        ("255.255.255.255", False), ("192.0.0.8", False), ("198.18.0.1", False),
        ("::1", False), ("::", False), ("fe80::1%eth0", False), ("fd00:ec2::254", False), ("ff02::1", False),
        ("fec0::1", False),
        ("::ffff:127.0.0.1", False), ("::ffff:169.254.169.254", False), ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False), ("2001:0:7f00:1::", False),
        # RFC 4291, section 2.5.5.1; RFC 2765, section 2.1; RFC 9780; what IANA has not assigned.
        ("::127.0.0.1", False), ("::10.0.0.1", False), ("::ffff:0:10.0.0.1", False), ("100:0:0:1::1", False),
        ("4000::1", False), ("5f00::1", False),
    ],
)  # fmt: skip
def test_an_address_is_reached_if_it_is_public(address: str, public: bool) -> None:
    assert may_reach(address, ()) is public


def test_a_network_that_the_operator_names_is_reached_too() -> None:
    networks = (ip_network("10.1.0.0/16"),)
    assert may_reach("10.1.255.255", networks)
    assert may_reach("::ffff:10.1.0.1", networks)
    assert not may_reach("10.2.0.0", networks)


@pytest.mark.parametrize(
    "url",
    [
        "", "hook", "//host/hook", "ftp://host/", "file:///etc/passwd", "https://", "https:///hook", "https://[::1",
        "https://host:0/", "https://host:99999/", "https://user:secret@host/", "https://host@other/", "https://host/#part",
        "https://host/a b", "https://host/\r\nx: y", "https://höst/", "https://host/" + "x" * 2048,
        "https://127.0.0.1/", "https://localhost:8642/", "https://a.localhost/", "https://[::1]/", "https://[::ffff:7f00:1]/",
        "https://169.254.169.254/latest/meta-data/",
    ],
)  # fmt: skip
def test_what_cannot_be_posted_to_is_refused_by_its_looks(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        posting.check_url(url, ())
    assert refused.value.param == "url"


@pytest.mark.parametrize(
    ("url", "networks", "is_taken"),
    [
        ("http://example.com/", "", False), ("http://93.184.216.34/", "", False),
        ("http://93.184.216.34/", "10.1.0.0/16", False), ("http://10.1.0.1/", "10.1.0.0/16", True),
        # Where the name leads to shows later.
        ("http://ci.example/", "10.1.0.0/16", True),
    ],
)  # fmt: skip
def test_what_anybody_could_read_on_its_way_stays_within_networks_that_the_operator_named(
    url: str, networks: str, is_taken: bool
) -> None:
    named = tuple(ip_network(network) for network in networks.split() if network)
    if is_taken:
        posting.check_url(url, named)
        return
    with pytest.raises(InvalidRequest, match="can be read"):
        posting.check_url(url, named)


def test_a_name_that_leads_to_the_public_internet_is_not_posted_to_in_the_clear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: real("93.184.216.34", *rest, **more))
    with pytest.raises(UnreachableError, match="can be read"):
        posting.post("http://ci.example/", body=b"{}", headers={}, networks=HERE, seconds=2)


@pytest.mark.parametrize("url", ["https://example.com/hook?a=b", "https://example.com:8080", "https://93.184.216.34/"])
def test_a_url_of_the_public_internet_is_taken(url: str) -> None:
    posting.check_url(url, ())


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def post(url: str, networks: tuple = HERE, seconds: float = 10) -> int:
    return posting.post(url, body=b'{"a":1}', headers={"webhook-id": "msg-1"}, networks=networks, seconds=seconds)


def test_a_message_arrives_as_it_was_and_the_status_is_told(receiver: Receiver) -> None:
    receiver.answers = [418]
    assert post(receiver.url + "?a=b") == 418
    message = receiver.next()
    assert (message.path, message.body) == ("/hook?a=b", b'{"a":1}')
    assert message.headers["webhook-id"] == "msg-1"
    assert message.headers["Host"] == receiver.url.split("/")[2]


@pytest.mark.parametrize("host", ["localhost", "127.1", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]"])
def test_a_name_is_checked_by_the_address_that_it_has_when_it_is_used(receiver: Receiver, host: str) -> None:
    url = receiver.url.replace("localhost", host)
    with pytest.raises(UnreachableError, match="TRAINSHED_WEBHOOK_NETWORKS"):
        post(url, networks=())
    assert receiver.came.empty()


def test_a_redirect_is_not_followed(receiver: Receiver) -> None:
    with receiving() as inside:
        receiver.answers, receiver.location = [307], inside.url
        assert post(receiver.url) == 307
        assert inside.came.empty()


def test_an_answer_that_comes_a_little_at_a_time_has_no_more_time_than_another(receiver: Receiver) -> None:
    receiver.silent = True
    with pytest.raises(UnreachableError, match=r"did not answer within 0\.3 s"):
        post(receiver.url, seconds=0.3)


def test_nobody_there_and_no_such_name_are_told(receiver: Receiver) -> None:
    with pytest.raises(UnreachableError, match="refused"):
        post("http://127.0.0.1:1/")
    with pytest.raises(UnreachableError, match="can't be resolved"):
        post("http://nothing.invalid/")


def test_tls_is_spoken_to_whom_the_url_names_and_to_nobody_else(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with receiving(context) as receiver:
        with pytest.raises(UnreachableError, match="certificate"):
            post(receiver.url)
        monkeypatch.setattr(posting, "ssl_context", lambda: ssl.create_default_context(cafile=str(certificate)))
        assert post(receiver.url) == 204
        assert receiver.next().body == b'{"a":1}'
        with pytest.raises(UnreachableError, match="certificate"):
            post(receiver.url.replace("localhost", "127.0.0.1"))
