"""Rows and values for tests, complete and unremarkable; a test says only what it is about: `make.job(session)`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from core import jobs, labelling, nodes, webhooks
from core.keys import DEFAULT_PROJECT, Account
from core.models import (
    Checkpoint,
    File,
    Job,
    JobEvent,
    Model,
    Node,
    Project,
    Slot,
    Upload,
    UploadPart,
    WebhookEndpoint,
    database_now,
    new_id,
)
from core.spec import JobSpec
from core.states import HELD, TERMINAL, JobState
from engine.config import Data, ModelShape, RunConfig, TokenizerSource, Training
from engine.events import Step

FILE_ID = "file-0123456789abcdef01234567"
LEASE_SECONDS = 60.0


def shape(**sizes: Any) -> ModelShape:
    """A tiny model."""
    values: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "ffn_hidden_size": 32,
        "max_seq_len": 64, "vocab_size": 260,
    }  # fmt: skip
    return ModelShape.model_validate(values | sizes)


def run_config(**parts: Any) -> RunConfig:
    """Ten steps of a tiny model on bytes."""
    values: dict[str, Any] = {
        "model": shape(),
        "tokenizer": TokenizerSource(type="bytes"),
        "objective": "pretrain",
        "data": Data(train=("data/train-0.txt",), format="text", seq_len=32),  # type: ignore[arg-type]
        "training": Training(steps=10, global_batch=4, micro_batch=4, lr=1e-3, precision="fp32"),
    }
    return RunConfig.model_validate(values | parts)


def submitted(session: Session, owner: Account, spec: JobSpec, **more: Any) -> Job:
    """The job of `jobs.submit`, for those who ask for no more."""
    return jobs.submit(session, owner, spec, **more).job


def spec(**parts: Any) -> JobSpec:
    """A pretrain of a tiny model on `FILE_ID`."""
    values: dict[str, Any] = {
        "kind": "pretrain",
        "model": {"architecture": "llama", "num_layers": 2, "hidden_size": 16, "num_heads": 4, "max_seq_len": 64},
        "data": {"train": [FILE_ID]},
        "training": {"steps": 10},
    }
    return JobSpec.model_validate(values | parts)


def project(session: Session, id: str = "proj-other") -> Project:
    row = Project(id=id, name=id)
    session.add(row)
    session.flush()
    return row


def file(session: Session, id: str = FILE_ID, **columns: Any) -> File:
    """An upload of plain text; nothing lies in storage."""
    values: dict[str, Any] = {
        "project_id": DEFAULT_PROJECT, "filename": "train.txt", "purpose": "pretrain", "bytes": 1000,
        "sha256": "0" * 64, "storage_key": f"files/{id}",
        "report": {"format": "text", "examples": 1, "characters": 1000, "plain_text": True},
    }  # fmt: skip
    row = File(id=id, **values | columns)
    session.add(row)
    session.flush()
    return row


def upload(session: Session, **columns: Any) -> Upload:
    """An upload with one part; nothing lies in storage."""
    values: dict[str, Any] = {
        "project_id": DEFAULT_PROJECT, "filename": "train.txt", "purpose": "pretrain", "bytes": 1000,
        "expires_at": database_now() + LEASE_SECONDS,
    }  # fmt: skip
    row = Upload(id=new_id("upload"), **values | columns)
    session.add(row)
    session.flush()
    session.add(UploadPart(id=new_id("part"), upload_id=row.id, bytes=1000, md5="0" * 32))
    session.flush()
    return row


def webhook(session: Session, **columns: Any) -> WebhookEndpoint:
    """An endpoint that is told everything; nobody is there."""
    values: dict[str, Any] = {
        "project_id": DEFAULT_PROJECT, "name": "ci", "url": "http://127.0.0.1:9/hook", "secret": "whsec_AAAA",
        "event_types": list(webhooks.EVENT_TYPES),
    }  # fmt: skip
    row = WebhookEndpoint(id=new_id("whe"), **values | columns)
    session.add(row)
    session.flush()
    return row


def node(session: Session, name: str = "node-1", *, num_slots: int = 2, device: str = "cpu", **offer: Any) -> Node:
    """A living host."""
    return nodes.register(session, name, device=device, num_slots=num_slots, **offer)


def job(session: Session, *, state: JobState = JobState.QUEUED, **columns: Any) -> Job:
    """A job in any state, with what belongs to it: holder and lease while it is held, slots where its node has some.

    `holder=None` beside STARTING is a job that was placed and not claimed.
    """
    is_held = state in HELD
    values: dict[str, Any] = {
        "id": new_id("job"), "project_id": DEFAULT_PROJECT, "kind": "pretrain", "labels": {}, "priority": 0,
        "spec": spec().model_dump(mode="json", by_alias=True, exclude_unset=True),
        "run_config": run_config().model_dump(mode="json"), "plan": {}, "slots": 1, "progress": {}, "last_event": 1,
        "attempt": 1 if is_held else 0, "node": "node-1" if is_held else None,
        "holder": "supervisor-1" if is_held else None,
        "lease_expires_at": database_now() + LEASE_SECONDS if is_held else None,
        "finished_at": database_now() if state in TERMINAL else None,
    }  # fmt: skip
    row = Job(state=state, **values | columns)
    session.add(row)
    session.flush()
    labelling.add(session, row)
    session.add(JobEvent(job_id=row.id, seq=1, attempt=0, type="state", message="queued", data={"state": "queued"}))
    if is_held:
        _take_slots(session, row)
    session.flush()
    return row


def step(number: int, **fields: Any) -> Step:
    """An engine event of one step, whose `seq` is its number."""
    values: dict[str, Any] = {
        "seq": number, "time": 1_700_000_000.0 + number, "step": number, "loss": 1 / number, "lr": 1e-3,
        "grad_norm": 1.0, "tokens": 128 * number, "tokens_per_second": 1280.0, "step_seconds": 0.1,
    }  # fmt: skip
    return Step.model_validate(values | fields)


def checkpoint(session: Session, job: Job, step: int, **columns: Any) -> Checkpoint:
    """A published checkpoint; nothing lies in storage."""
    values: dict[str, Any] = {
        "id": new_id("ftckpt"), "attempt": job.attempt, "bytes": 10, "metrics": {},
        "storage_prefix": f"jobs/{job.id}/{job.attempt}/checkpoints/step-{step:08d}",
    }  # fmt: skip
    row = Checkpoint(job_id=job.id, step=step, **values | columns)
    session.add(row)
    session.flush()
    return row


def model(session: Session, id: str = "tiny", **columns: Any) -> Model:
    """A base for everyone."""
    values: dict[str, Any] = {"source": f"dir:{id}", "shape": shape().model_dump(mode="json")}
    row = Model(id=id, **values | columns)
    session.add(row)
    session.flush()
    return row


def tokenizer(size: int, *added: str) -> bytes:
    """As much of a tokenizer.json as tells how many entries it has."""
    tokens = [{"id": size + number, "content": text} for number, text in enumerate(added)]
    return json.dumps({"model": {"vocab": {str(id): id for id in range(size)}}, "added_tokens": tokens}).encode()


WIDTHS = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I32": 4, "U8": 1, "F8_E4M3": 1}
"""Bytes of a number, by what safetensors calls its type."""


def weights(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """A safetensors file of zeros, given type and shape of each tensor: length of the header, header, data."""
    said: dict[str, Any] = {}
    end = 0
    for name, (dtype, sizes) in tensors.items():
        start, end = end, end + WIDTHS[dtype] * prod(sizes)
        said[name] = {"dtype": dtype, "shape": sizes, "data_offsets": [start, end]}
    described = json.dumps(said).encode()
    return len(described).to_bytes(8, "little") + described + bytes(end)


def _take_slots(session: Session, job: Job) -> None:
    free = session.scalars(
        select(Slot.index).where(Slot.node == job.node, Slot.job_id.is_(None)).order_by(Slot.index).limit(job.slots)
    ).all()
    session.execute(update(Slot).where(Slot.node == job.node, Slot.index.in_(free)).values(job_id=job.id))
