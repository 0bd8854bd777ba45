"""Text of others that would be something else where it arrives: a header, a line of a log, a formula, a command."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import structlog
from typer.testing import CliRunner

from api.cli import app, printable
from api.ranges import attachment
from core import log, result_files
from tests.api import driving
from tests.api.conftest import Live
from tests.api.test_files import PURPOSE, part

# Headers

NAMES = [
    b'a"; filename="evil.sh', b"a\r\nset-cookie: session=evil", b"a\nx-evil: 1", b"a\\\r\n\r\n<script>x</script>",
    b"a%0d%0aset-cookie: x", "a\u2028set-cookie: x".encode(), "a\u0085x: y".encode(), b"a;b=c", b"'; rm -rf /; '",
    b"=cmd|' /C calc'!A0.csv", b"..\\..\\evil", b"con", b"<img src=x onerror=alert(1)>.jsonl", b"a\x1b[2Jb", b"a\x00b",
    "\u202egnp.exe".encode(), b"\xff\xfe", b"a" * 5000,
]  # fmt: skip


def get(path: str, key: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nconnection: close\r\n\r\n".encode()


def raw(live: Live, request: bytes) -> bytes:
    """What the server answers, to the last byte, as no client library has tidied it."""
    with socket.create_connection((urlsplit(live.url).hostname, urlsplit(live.url).port), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_file_name_adds_nothing_to_the_head_of_an_answer(live: Live, http, key: str, name: bytes) -> None:
    body = PURPOSE.replace(b"fine-tune", b"user_data") + part("file", b"x", name) + b"--b--\r\n"
    sent = http.post("/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=b"})
    if sent.status_code == 400:
        return
    file = sent.json()
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", file["filename"])
    answer = raw(
        live,
        get(f"/v1/files/{file['id']}/content", key),
    )
    head, _, content = answer.partition(b"\r\n\r\n")
    assert content.endswith(b"x")
    lines = head.split(b"\r\n")
    names = [line.partition(b":")[0].lower() for line in lines[1:]]
    assert set(names) <= {
        b"date", b"etag", b"accept-ranges", b"content-disposition", b"content-length", b"content-type", b"x-request-id",
        b"x-ratelimit-limit-requests", b"x-ratelimit-remaining-requests", b"x-ratelimit-reset-requests", b"connection",
        b"x-content-type-options",
        b"server",
    }  # fmt: skip
    (said,) = [line for line in lines if line.lower().startswith(b"content-disposition")]
    # One plain name, and one in per cents (RFC 6266, RFC 5987); a browser saves it, and never shows it.
    assert re.fullmatch(
        rb"content-disposition: attachment; filename=\"[A-Za-z0-9._-]*\"; filename\*=UTF-8''[A-Za-z0-9._~%-]*",
        said,
        re.IGNORECASE,
    )
    assert b"\n" not in head.replace(b"\r\n", b"")


@pytest.mark.parametrize("name", ['a"\r\nb', "\r", "\n", "\x00", '"', ";", "'", "%", "\u2028", "a/b\\c"])
def test_a_name_in_a_header_is_letters_and_per_cents(name: str) -> None:
    assert re.fullmatch(
        r"attachment; filename=\"[A-Za-z0-9._-]*\"; filename\*=UTF-8''[A-Za-z0-9._~%-]*", attachment(name)
    )


@pytest.mark.parametrize("evil", ["x\r\nset-cookie: a=b", "x\nset-cookie: a=b", "x\r\n\r\nHTTP/1.1 200 OK"])
def test_what_a_request_says_is_in_no_header_of_its_answer(live: Live, http, key: str, evil: str) -> None:
    escaped = evil.replace("\r", "%0d").replace("\n", "%0a").replace(" ", "%20")
    for path in (f"/v1/jobs/{escaped}", f"/v1/jobs?after={escaped}", f"/{escaped}", f"/v1/files/{escaped}/content"):
        answer = raw(
            live,
            get(path, key),
        )
        head, _, content = answer.partition(b"\r\n\r\n")
        assert b"set-cookie" not in head.lower()
        assert b"\nHTTP/1.1 " not in answer
        assert json.loads(content)["error"]


# Logs

EVIL_LINES = [
    'x\n{"event": "job placed", "level": "info"}', "x\r\nforged", "x\u2028forged", "x\x1b[2K\rforged",
    '", "level": "critical', "x\x85forged", "\x1b]0;title\x07",
]  # fmt: skip


class Written(io.StringIO):
    """The standard error, at a terminal or not."""

    at_a_terminal = False

    def isatty(self) -> bool:
        return self.at_a_terminal


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    names = (None, *logging.getLogger().manager.loggerDict)
    handlers, levels = logging.getLogger().handlers, [logging.getLogger(name).level for name in names]
    configured = structlog.get_config()
    yield
    logging.getLogger().handlers = handlers
    for name, level in zip(names, levels, strict=True):
        logging.getLogger(name).setLevel(level)
    structlog.configure(**configured)


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize("evil", EVIL_LINES)
def test_a_value_in_a_log_is_one_value_of_one_line(evil: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", written := Written())
    log.setup("INFO")
    structlog.get_logger("a").info("file expired", file=evil)
    logging.getLogger("b").warning("of a library: %s", evil)
    first, second = written.getvalue().splitlines()
    assert json.loads(first)["file"] == evil
    assert json.loads(first)["level"] == "info"
    assert json.loads(second)["event"] == f"of a library: {evil}"
    assert all(line.isascii() and line.isprintable() for line in (first, second))


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize("evil", EVIL_LINES)
def test_nor_does_a_value_command_the_terminal_that_shows_the_log(evil: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", written := Written())
    written.at_a_terminal = True
    log.setup("INFO")
    structlog.get_logger("a").info("file expired", file=evil)
    logging.getLogger("b").warning("of a library: %s", evil)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", written.getvalue())
    assert "file expired" in shown
    assert "of a library" in shown
    assert len(shown.splitlines()) == 2
    assert all(line.isprintable() for line in shown.splitlines())


# Tables

FORMULAS = ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "=HYPERLINK(\"http://evil\")"]  # fmt: skip


def test_a_table_of_losses_has_a_number_or_nothing_in_each_cell() -> None:
    """So that no program for tables takes one for a formula: names of metrics and all else are ours."""
    odd: dict[int, dict[str, float]] = {
        1: {"loss": -1e300}, 2: {"loss": 5e-324, "token_accuracy": 1.0}, 3: {"validation_loss": 2.0, "=1+1": 1.0},
    }  # fmt: skip
    rows = list(csv.reader(io.StringIO(b"".join(result_files.table(odd.items())).decode())))
    assert rows[0] == ["step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy"]
    number = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?")
    assert all(cell == "" or number.fullmatch(cell) for row in rows[1:] for cell in row)
    assert len(rows) == 4


@pytest.mark.parametrize("formula", FORMULAS)
def test_no_metric_can_be_given_a_name_or_a_value_of_text(formula: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        driving.step(1, loss=formula)  # type: ignore[arg-type]


# Terminals

EVIL_NAMES = ["\x1b]0;owned\x07", "\x1b[2J\x1b[H", "a\x9b31m", "a\rb", "a\x08\x08", "a\x00b", "a\x7f"]


@pytest.mark.parametrize("evil", EVIL_NAMES)
def test_what_the_command_line_shows_of_others_does_not_command_the_terminal(live: Live, key: str, evil: str) -> None:
    with live.http(key) as http:
        named = http.post(
            "/v1/webhook_endpoints",
            json={"name": evil, "url": "https://example.com/", "event_types": ["job.failed"]},
        )
        labels = {"team": evil.replace("\0", "")}
        job = driving.submit(http, labels=labels)
        made = http.post("/v1/keys", json={"name": evil.replace("\0", "0"), "scopes": ["read"]})
    assert named.status_code in {200, 400}
    assert made.status_code in {201, 200, 400}
    for words in (["show", job["id"]], ["list"], ["keys", "list"], ["events", job["id"]], ["show", f"job{evil}"]):
        answer: Any = CliRunner().invoke(app, ["--url", live.url, "--key", key, *words])
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", answer.output), (words, answer.output)


@pytest.mark.parametrize("evil", EVIL_NAMES)
def test_printable_text_has_no_commands_and_keeps_its_lines(evil: str) -> None:
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", printable.text(f"one\n\ttwo {evil}"))
    assert printable.text("one\r\n\ttwo é 😀\n") == "one\n\ttwo é 😀\n"
    assert printable.line(f"a\nb\u2028c{evil}").isprintable() or "\ufffd" in printable.line(evil)
    assert "\n" not in printable.line("a\nb")
