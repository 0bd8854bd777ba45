"""`trainshed serve` as a person uses it: started, refused a second time, killed, stopped by Ctrl-C with a job."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import psutil
import pytest

from api.client import Client
from api.serve import _missing
from tests.api import driving
from tests.api.conftest import wait_for

START_SECONDS, STOP_SECONDS, STEP_SECONDS = 90.0, 60.0, 120.0
COMMAND = [sys.executable, "-m", "api.cli", "serve"]
QUICK = {"TRAINSHED_SLOTS": "2", "TRAINSHED_CALIBRATE": "0", "TRAINSHED_LEASE_SECONDS": "5"}
"""Measuring the host takes seconds of all its cores, and the job of a service that was killed waits for its lease."""


class Serving:
    """One `trainshed serve` and what it says."""

    def __init__(self, data_dir: Path, *arguments: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRAINSHED_")}
        self.process = subprocess.Popen(
            [*COMMAND, "--data-dir", str(data_dir), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=environment | QUICK | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        self.said = ""
        self._lines: Queue[str] = Queue()
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def until(self, pattern: str, seconds: float = START_SECONDS) -> re.Match[str]:
        """What it has said, once `pattern` is in it."""
        while not (match := re.search(pattern, self.said)):
            line = self._lines.get(timeout=seconds)
            assert line, f"it ended without saying {pattern!r}: {self.said}"
            self.said += line
        return match

    def stop(self) -> int:
        """Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(STOP_SECONDS)
        self._reading.join()
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()
        assert self.process.stdout
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")


@contextmanager
def serving(data_dir: Path, *arguments: str) -> Iterator[Serving]:
    made = Serving(data_dir, *arguments)
    try:
        yield made
    finally:
        made.close()


def left(data_dir: Path) -> list[str]:
    """Processes that have anything to do with this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            traces = [*process.cmdline(), process.cwd(), process.environ().get("TRAINSHED_DATA_DIR", "")]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(str(data_dir) in trace for trace in traces) and process.pid != os.getpid():
            found.append(f"{process.pid} {' '.join(process.cmdline())}")
    return found


def first_step_after(client: Client, job: str, after: int) -> tuple[int, str]:
    """The step that the job tells of next, and the id to go on from."""
    for event in client.follow(job, after=after):
        if event.data["type"] == "step":
            return event.data["data"]["step"], event.id
    raise AssertionError("it ended without a step")


def in_the_row(data_dir: Path, job: str) -> tuple[str, int]:
    """The state of a job and its losses, of which nobody else tells while nothing runs."""
    with closing(sqlite3.connect(data_dir / "trainshed.db")) as database:
        row: tuple[str, int] = database.execute("SELECT state, losses FROM jobs WHERE id = ?", [job]).fetchone()
    return row


def working_in(folder: Path) -> list[psutil.Process]:
    """The ranks that train there."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(process.info["cmdline"] or []) and "train" in process.info["cmdline"]
    ]


@pytest.fixture
def data_dir(tmp_path) -> Iterator[Path]:
    folder = tmp_path / "data"
    yield folder
    assert left(folder) == []


def uploaded_while_the_api_dies(service: Serving, url: str, key: str) -> str:
    """Id of a file whose parts came before and after."""
    reach: dict[str, Any] = {"base_url": url, "headers": {"authorization": f"Bearer {key}"}, "timeout": START_SECONDS}
    halves = driving.TEXT[:100], driving.TEXT[100:]
    (api,) = (
        child for child in psutil.Process(service.process.pid).children() if "api.server" in child.cmdline()
    )  # fmt: skip
    with httpx.Client(**reach) as http:
        upload = http.post(
            "/v1/uploads", json={"bytes": len(driving.TEXT), "filename": "a.txt", "purpose": "pretrain"}
        ).json()
        path = f"/v1/uploads/{upload['id']}"
        http.post(f"{path}/parts", files={"data": halves[0]})
        api.kill()
    # Connections wait in the socket, which outlives the process; so does each part that was answered.
    with httpx.Client(**reach) as http:
        http.post(f"{path}/parts", files={"data": halves[1]})
        parts = [part["id"] for part in http.get(f"{path}/parts").json()["data"]]
        completed = http.post(f"{path}/complete", json={"part_ids": parts}).json()
    assert completed["status"] == "completed"
    return completed["file"]["id"]


def test_a_part_that_dies_is_started_again_a_serve_that_is_killed_takes_all_with_it_and_ctrl_c_saves_a_running_job(
    data_dir,
):
    with serving(data_dir, "--port", "0") as first:
        url = first.until(r"at (http://127\.0\.0\.1:\d+) ").group(1)
        key = first.until(r"(ts_\S{20,})").group(1)
        first.until("Ready")
        assert key not in "".join(path.read_text(errors="replace") for path in (data_dir / "logs").iterdir())
        with serving(data_dir, "--port", "0") as second:
            second.until(rf"process {first.process.pid}\) works in .*; stop it first")
            assert second.process.wait(STOP_SECONDS) == 2
        with Client(url, key) as client:
            assert client.ready() == {
                "status": "ready", "checks": {"database": "ok", "broker": "ok", "worker": "ok"},
            }  # fmt: skip
        file = uploaded_while_the_api_dies(first, url, key)
        first.until("api ended with -9; it starts again")
        first.process.kill()
        wait_for(lambda: left(data_dir) == [], STOP_SECONDS)
    port = url.rpartition(":")[2]
    with serving(data_dir, "--port", port) as after_that:
        after_that.until("Ready")
        assert "ts_" not in after_that.said
        with Client(url, key) as client:
            job = client.submit(driving.spec(file, training={"steps": 100_000, "global_batch": 1, "precision": "fp32"}))
            step, last = first_step_after(client, job["id"], 0)
        assert after_that.stop() == 0
        assert left(data_dir) == []
        assert in_the_row(data_dir, job["id"]) == ("queued", 0)
    with serving(data_dir, "--port", port) as again:
        again.until("Ready")
        with Client(url, key) as client:
            following, _ = first_step_after(client, job["id"], int(last))
            assert following == step + 1
            states = [event["data"]["state"] for event in client.events(job["id"], type="state")]
            assert "queued" in states[3:]
        # A second Ctrl-C waits for nothing, and here would be something to wait for, for as long as it may take.
        for rank in working_in(data_dir / "runs" / job["id"]):
            rank.suspend()
        again.process.send_signal(signal.SIGINT)
        again.until("once more ends them at once")
        assert again.stop() == 0
        wait_for(lambda: left(data_dir) == [])


def test_a_port_that_is_taken_is_said_in_words(data_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with serving(data_dir, "--port", str(taken.getsockname()[1])) as service:
            service.until("choose another --port")
            assert service.process.wait(STOP_SECONDS) == 2


@pytest.mark.parametrize("command", ["serve", "migrate"])
def test_a_database_that_is_not_there_is_said_in_words(tmp_path, command):
    environment = os.environ | {"TRAINSHED_DATA_DIR": str(tmp_path), "TRAINSHED_PORT": "0"}
    answer = subprocess.run(
        [*COMMAND[:-1], command],
        env=environment | {"DATABASE_URL": "postgresql://somebody:hush@127.0.0.1:1/nothing"},
        capture_output=True, text=True, timeout=STOP_SECONDS,
    )  # fmt: skip
    assert answer.returncode == 2
    assert "is DATABASE_URL right" in answer.stderr
    assert "hush" not in answer.stdout + answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("command", ["worker", "api"])
def test_a_part_that_finds_no_tables_says_what_to_run_and_does_not_begin(tmp_path, command):
    def run(**variables):
        environment = os.environ | {"TRAINSHED_DATA_DIR": str(tmp_path)} | variables
        answer = subprocess.run(
            [*COMMAND[:-1], command], env=environment, capture_output=True, text=True, timeout=STOP_SECONDS
        )
        return answer.returncode, answer.stderr

    code, said = run()
    assert (code, "There is no service here" in said, "Traceback" in said) == (2, True, False)
    assert not list(tmp_path.iterdir())
    empty = tmp_path / "empty.db"
    empty.touch()
    code, said = run(DATABASE_URL=f"sqlite:///{empty}")
    assert (code, "trainshed migrate" in said, "Traceback" in said) == (2, True, False)


@pytest.mark.parametrize(
    ("checks", "missing"),
    [
        ({"database": "ok", "broker": "ok", "worker": "ok"}, None),
        (
            {"database": "ok", "broker": "can't be reached: ConnectionError", "worker": "no worker is online"},
            "broker: can't be reached: ConnectionError; worker: no worker is online",
        ),
    ],
    ids=["nothing", "two-parts"],
)
def test_a_service_that_is_not_ready_says_what_is_missing(checks, missing):
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(503)
            self.end_headers()
            self.wfile.write(json.dumps({"status": "not ready", "checks": checks}).encode())

        def log_message(self, *_):
            """Quietly."""

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert _missing(f"http://127.0.0.1:{server.server_port}") == missing
        thread.join()


def test_a_service_without_an_api_says_so():
    assert _missing("http://127.0.0.1:1") == "the API does not answer"
