"""A client that means harm below HTTP is told so, costs nothing, and adds nothing to what a request says."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPResponse
from itertools import repeat

import pytest

from api import protocol
from tests.api import driving
from tests.api.conftest import DEADLINE_SECONDS

PIECE = 64 * 1024
MANY = 640
"""Pieces: 40 MiB, far more than is taken."""


@contextmanager
def connected(live) -> Iterator[socket.socket]:
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_SECONDS) as connection:
        yield connection


def answered(connection: socket.socket, method: str = "GET") -> tuple[HTTPResponse, bytes]:
    answer = HTTPResponse(connection, method=method)
    answer.begin()
    return answer, answer.read()


def begun(key: str, line: str, **headers: str) -> bytes:
    fields = {"host": "x", "authorization": f"Bearer {key}"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    return "\r\n".join([f"{line} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]).encode() + b"\r\n"


CHUNKED = {"content_type": "application/json", "transfer_encoding": "chunked"}
ENDLESS = [
    pytest.param(lambda key: b"GET /v1/nodes?", b"a" * PIECE, id="URL"),
    pytest.param(lambda key: begun(key, "GET /v1/nodes") + b"x: ", b"a" * PIECE, id="header"),
    pytest.param(lambda key: begun(key, "GET /v1/nodes"), b"x: y\r\n" * (PIECE // 6), id="headers"),
    pytest.param(lambda key: b"", b"\r\n" * (PIECE // 2), id="nothing"),
    pytest.param(lambda key: begun(key, "POST /v1/plans", **CHUNKED) + b"\r\n2;x=", b"a" * PIECE, id="chunk extension"),
    pytest.param(
        lambda key: begun(key, "POST /v1/plans", **CHUNKED) + b"\r\n2\r\n{}\r\n0\r\n",
        b"x: y\r\n" * (PIECE // 6),
        id="trailers",
    ),
]


@pytest.mark.parametrize(("beginning", "piece"), ENDLESS)
def test_what_never_ends_is_cut_off(live, key, beginning, piece):
    with connected(live) as connection:
        connection.sendall(beginning(key))
        # It is cut off amid that: nobody takes so much.
        with suppress(ConnectionError):
            for one in repeat(piece, MANY):
                connection.sendall(one)
            pytest.fail("all of it was taken")


@pytest.mark.parametrize(
    ("beginning", "rest"),
    [
        pytest.param(lambda key: b"GET /v1/nodes?" + b"a" * PIECE, b" HTTP/1.1\r\n\r\n", id="URL"),
        pytest.param(lambda key: begun(key, "GET /v1/nodes") + b"x: " + b"a" * PIECE, b"\r\n\r\n", id="header"),
        pytest.param(lambda key: begun(key, "GET /v1/nodes") + b"x: y\r\n" * (PIECE // 6), b"\r\n", id="headers"),
    ],
)
def test_a_head_that_is_too_large_is_told_how_large_one_may_be(live, key, beginning, rest):
    with connected(live) as connection:
        connection.sendall(beginning(key) + rest)
        answer, body = answered(connection)
    assert answer.status == 431
    assert answer.headers["x-request-id"].startswith("req-")
    assert str(protocol.HEAD_BYTES) in json.loads(body)["error"]["message"]


def test_a_head_that_does_not_come_is_not_waited_for(live, key, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 2.0)
    with connected(live) as silent, connected(live) as slow:
        slow.sendall(begun(key, "GET /v1/nodes"))
        for connection in (silent, slow):
            answer, body = answered(connection)
            assert answer.status == 408
            assert json.loads(body)["error"]["code"] == "request_timeout"
            assert connection.recv(1) == b""


def test_a_body_that_does_not_go_on_is_not_waited_for_and_one_that_was_refused_is_let_go(live, key, monkeypatch):
    form = {"content_type": "multipart/form-data; boundary=b", "content_length": "1000"}
    with connected(live) as slow, connected(live) as refused:
        refused.sendall(begun("nobody's", "POST /v1/files", **form) + b"\r\n--b\r\n")
        assert answered(refused, "POST")[0].status == 401
        monkeypatch.setattr(protocol, "BODY_SECONDS", 0.05)
        slow.sendall(begun(key, "POST /v1/files", **form) + b"\r\n--b\r\n")
        answer, body = answered(slow, "POST")
        assert answer.status == 408
        assert json.loads(body)["error"]["code"] == "request_timeout"
        refused.sendall(b"a")
        assert (slow.recv(1), refused.recv(1)) == (b"", b"")


def test_what_comes_after_a_chunked_body_is_no_header(live, key, http):
    body = json.dumps(driving.spec(driving.upload(http)["id"])).encode()
    chunks = b"\r\n%x\r\n%s\r\n0\r\n" % (len(body), body)
    with connected(live) as connection:
        head = begun("", "POST /v1/jobs", **CHUNKED).replace(
            b"authorization: Bearer \r\n", b"trailer: authorization\r\n"
        )
        connection.sendall(head + chunks + f"authorization: Bearer {key}\r\n\r\n".encode())
        answer, _ = answered(connection, "POST")
        assert answer.status == 401
        # The connection goes on, and two names that come too late are none.
        for _ in range(2):
            connection.sendall(begun(key, "POST /v1/jobs", **CHUNKED) + chunks + b"idempotency-key: k\r\n\r\n")
            assert answered(connection, "POST")[0].status == 201
    assert len(http.get("/v1/jobs").json()["data"]) == 2


@pytest.mark.parametrize("wanted", ["websocket", "h2c"])
def test_who_asks_for_another_protocol_is_answered_in_this_one(live, key, wanted):
    upgrade = {"connection": "Upgrade", "upgrade": wanted, "sec_websocket_version": "13",
               "sec_websocket_key": "dGhlIHNhbXBsZSBub25jZQ=="}  # fmt: skip
    with connected(live) as connection:
        for more in (upgrade, {}):
            connection.sendall(begun(key, "GET /v1/nodes", **more) + b"\r\n")
            answer, body = answered(connection)
            assert (answer.status, json.loads(body)["object"]) == (200, "list")


def test_a_body_that_says_that_it_is_too_large_is_refused_before_it_is_sent(live, key):
    with connected(live) as connection:
        connection.sendall(begun(key, "POST /v1/jobs", content_type="application/json", content_length="9" * 15)
                           + b"expect: 100-continue\r\n\r\n")  # fmt: skip
        answer, body = answered(connection, "POST")
    assert answer.status == 413
    assert "larger than" in json.loads(body)["error"]["message"]
