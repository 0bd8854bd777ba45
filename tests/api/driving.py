"""What workers would do to a job, done by hand: so that the API is tested without them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx

from core import artifacts, jobs, nodes
from core.services import Services
from core.states import JobState
from engine.events import Event, Failed, Finished, Log, Started, Step

TEXT = b"To be, or not to be, that is the question.\n" * 40
__all__ = ["Log"]

LEASE = timedelta(seconds=60)
NODE_SLOTS = 4


def upload(
    http: httpx.Client, content: bytes = TEXT, filename: str = "train.txt", purpose: str = "fine-tune"
) -> dict[str, Any]:
    answer = http.post("/v1/files", data={"purpose": purpose}, files={"file": (filename, content)})
    assert answer.status_code == 200, answer.text
    return answer.json()


def spec(file_id: str, **changes: Any) -> dict[str, Any]:
    """A small pretrain job."""
    return {
        "kind": "pretrain",
        "model": {
            "architecture": "llama", "num_layers": 1, "hidden_size": 16, "num_heads": 2, "ffn_hidden_size": 32,
            "max_seq_len": 64,
        },
        "tokenizer": {"type": "bytes"},
        "data": {"train": [file_id], "seq_len": 32},
        "training": {"steps": 4, "global_batch": 1, "precision": "fp32"},
        **changes,
    }  # fmt: skip


def submit(http: httpx.Client, **changes: Any) -> dict[str, Any]:
    answer = http.post("/v1/jobs", json=spec(upload(http)["id"], **changes))
    assert answer.status_code == 201, answer.text
    return answer.json()


def claim(services: Services, job_id: str) -> int:
    """Place the job on a node of its own and claim it; its fence."""
    node = f"node-{job_id}"
    with services.db.session() as session:
        nodes.register(session, node, device="cpu", num_slots=NODE_SLOTS)
        jobs.place(session, job_id, node, [0], claim_within=LEASE)
        job = jobs.claim(session, job_id, "test", LEASE, node=node)
        assert job is not None
        return job.attempt


def record(services: Services, job_id: str, fence: int, *events: Event) -> None:
    with services.db.session() as session:
        jobs.record(session, job_id, fence=fence, events=events)


def started(total_steps: int = 4) -> Started:
    return Started(
        total_steps=total_steps, start_step=0, ranks=1, parameters=10, trainable_parameters=10, train_rows=8,
        train_tokens=256, vocab_size=260, device="cpu",
    )  # fmt: skip


def step(number: int, loss: float | None = None) -> Step:
    return Step(
        step=number, loss=5.0 / number if loss is None else loss, lr=1e-3, grad_norm=1.0, tokens=32 * number,
        tokens_per_second=320.0, step_seconds=0.1,
    )  # fmt: skip


def run(services: Services, job_id: str, steps: int = 4) -> int:
    """Claim the job and take it through its steps; its fence."""
    fence = claim(services, job_id)
    record(services, job_id, fence, started(steps), *(step(number) for number in range(1, steps + 1)))
    return fence


def succeed(services: Services, job_id: str, fence: int) -> None:
    record(services, job_id, fence, Finished(step=4, tokens=128))
    with services.db.session() as session:
        jobs.move(session, job_id, JobState.SUCCEEDED, fence=fence)


def succeed_from_start(services: Services, job_id: str, fence: int) -> None:
    """For a job that has been claimed and said nothing that matters yet."""
    record(services, job_id, fence, started())
    succeed(services, job_id, fence)


def fail(services: Services, job_id: str, fence: int) -> None:
    record(services, job_id, fence, Failed(code="out_of_memory", message="rank 1 needs more memory", rank=1))
    error = {
        "code": "out_of_memory",
        "message": "rank 1 needs more memory",
        "param": None,
        "rank": 1,
        "hint": "smaller",
    }
    with services.db.session() as session:
        jobs.move(session, job_id, JobState.FAILED, fence=fence, error=error)


ADAPTER = {"adapter/adapter_config.json": b'{"r": 16}', "adapter/adapter_model.safetensors": bytes(range(256)) * 2000}


def publish(services: Services, job_id: str, folder: Path, files: Mapping[str, bytes] = ADAPTER) -> None:
    """The job's result: `files` and the manifest over them."""
    listed = []
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        listed.append({"path": path, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    (folder / "manifest.json").write_text(json.dumps({"files": listed, "seed": 1}))
    with services.db.reading() as session:
        job = session.get_one(jobs.Job, job_id)
    artifacts.publish(services, job, folder)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def finished(services: Services, http: httpx.Client, folder: Path, files: Mapping[str, bytes] = ADAPTER) -> str:
    """A job that has succeeded and left `files`; its id."""
    job_id: str = submit(http)["id"]
    fence = run(services, job_id)
    publish(services, job_id, folder, files)
    succeed(services, job_id, fence)
    return job_id
