"""The page's way to back up and restore, word for word: from a service with a running job, to one that had nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.client import Client
from tests.api import driving
from tests.api.test_serve import Serving, first_step_after, left, serving
from tests.core.test_catalog import folder

OPERATIONS = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()
SECONDS = 100.0
BACKUP, RESTORE = re.findall(
    r"^```console\n(.*?)^```", OPERATIONS.split("\n## Backup\n")[1].split("\n## ")[0], re.MULTILINE | re.DOTALL
)


def run(block: str, home: Path) -> str:
    """What a block of the page says when it is typed there."""
    typed = "\n".join(line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ "))
    # As an installation has it, in a shell that knows nothing of another service.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRAINSHED_")}
    root = str(Path(__file__).resolve().parents[2])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", typed], cwd=home, env=inherited | {"PATH": path, "PYTHONPATH": root},
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def stopped_at_once(service: Serving) -> int:
    """By a second Ctrl-C, which waits for no run to be saved."""
    service.process.send_signal(signal.SIGINT)
    service.until("once more ends them at once")
    return service.stop()


@pytest.fixture
def home() -> Iterator[Path]:
    """Where somebody works; short, as the broker's socket lies beneath it."""
    with tempfile.TemporaryDirectory(prefix="drill-") as made:
        yield Path(made)
        assert left(Path(made)) == []


def everything(client: Client) -> dict[str, Any]:
    """What the API tells of all that there is, but for what a running job adds by itself."""
    jobs = [client.job(job["id"]) for job in client.jobs()]
    return {
        "files": sorted(client.files(), key=lambda each: each["id"]),
        "keys": client.http.get("/v1/keys").json()["data"],
        "models": client.models(),
        "jobs": {job["id"]: {name: job[name] for name in ("kind", "name", "created_at", "spec")} for job in jobs},
        "done": {job["id"]: job for job in jobs if job["state"] == "succeeded"},
    }


def test_a_service_that_was_backed_up_while_it_ran_is_there_again_with_its_jobs_files_and_models(home: Path) -> None:
    folder(home / "trainshed-data" / "models", "base")
    with serving(home / "trainshed-data", "--port", "0") as first:
        url = first.until(r"at (http://127\.0\.0\.1:\d+) ").group(1)
        key = first.until(r"(ts_\S{20,})").group(1)
        first.until("Ready")
        with Client(url, key) as client:
            file = driving.upload(client.http)["id"]
            # Side by side, as to start one takes longest.
            done = client.submit(driving.spec(file))["id"]
            training = {"steps": 100_000, "checkpoint_every": 20, "global_batch": 1, "precision": "fp32"}
            running = client.submit(driving.spec(file, training=training))["id"]
            assert client.wait(done)["state"] == "succeeded"
            checkpoint = next(event for event in client.follow(running) if event.name == "checkpoint")
            assert "each verified" in run(BACKUP, home)
            before = everything(client)
            before_files = client.download(done, home / "before")
        assert stopped_at_once(first) == 0
    assert set(before["done"]) == {done}

    run(RESTORE, home)

    with serving(home / "restored", "--port", "0") as second:
        url = second.until(r"at (http://127\.0\.0\.1:\d+) ").group(1)
        second.until("Ready")
        assert "ts_" not in second.said, "the keys are there"
        with Client(url, key) as client:
            assert everything(client) == before
            assert {model["id"] for model in before["models"]} >= {"base", before["done"][done]["model"]}
            assert client.http.get(f"/v1/files/{file}/content").content == driving.TEXT
            after_files = client.download(done, home / "after")
            assert [path.read_bytes() for path in after_files] == [path.read_bytes() for path in before_files]
            # The job that ran goes on from a checkpoint, and each step is there once.
            heard = client.http.get(f"/v1/jobs/{running}/events", params={"order": "desc", "limit": 1, "type": "step"})
            last = heard.json()["data"][0]
            step, _ = first_step_after(client, running, last["seq"])
            assert step == last["data"]["step"] + 1 > checkpoint.data["data"]["step"]
        assert stopped_at_once(second) == 0


def test_a_retention_can_be_tried_at_a_terminal(home: Path) -> None:
    said = run("$ trainshed migrate\n$ trainshed retention --dry-run --rules logs.age=1d --json", home)
    told = json.loads(said[said.index("{") :])
    nothing = {"things": 0, "objects": 0, "bytes": 0}
    assert told == {"dry_run": True, "kinds": {"logs": nothing, "leftovers": nothing}}
