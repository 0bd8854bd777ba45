"""A job that was placed on this host, in a database and storage of its own; without a broker, so each hint is lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core import nodes, schema
from core.models import File, Job, Project, Slot, new_id
from core.services import Services
from core.settings import Settings
from core.states import JobState
from engine.config import Data, ModelShape, RunConfig, TokenizerSource, Training
from workers.launcher import LocalLauncher

FAKE_ENGINE = Path(__file__).parents[1] / "fakes" / "engine.py"

SHAPE = ModelShape(
    num_layers=1, hidden_size=8, num_heads=2, num_kv_heads=2, head_dim=4, ffn_hidden_size=16, max_seq_len=16,
    vocab_size=260,
)  # fmt: skip


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    settings = Settings(
        data_dir=tmp_path / "shed",
        redis_url=f"unix://{tmp_path}/nobody.sock",
        lease_seconds=2,
        stop_grace_seconds=5,
        cancel_grace_seconds=0.5,
        node_name="here",
    )
    settings.data_dir.mkdir()
    schema.upgrade(settings.database)
    with Services(settings) as services:
        with services.db.session() as session:
            session.add(Project(id="proj-1", name="tests"))
            nodes.register(session, "here", device="cpu", num_slots=2)
        yield services


def fake_engine(*options: str) -> LocalLauncher:
    """A launcher of the fake engine, told to do something amiss by its options."""
    return LocalLauncher((sys.executable, str(FAKE_ENGINE), *options))


def place_job(services: Services, *, steps: int = 20, checkpoint_every: int | None = 5, **values: Any) -> str:
    """A job with one training file, placed on this node and not yet claimed; its id."""
    file_id, job_id = new_id("file"), new_id("job")
    services.storage.put_bytes(f"files/{file_id}", b'{"text": "a line"}\n')
    run = RunConfig(
        model=SHAPE,
        tokenizer=TokenizerSource(type="bytes"),
        objective="pretrain",
        data=Data(train=(Path("data/train-0.jsonl"),), format="text", seq_len=16),
        training=Training(steps=steps, checkpoint_every=checkpoint_every, global_batch=1, micro_batch=1, lr=0.1),
    )
    spec = {"kind": "pretrain", "model": {"preset": "llama-15m"}, "data": {"train": [file_id]}}
    with services.db.session() as session:
        session.add(
            File(
                id=file_id, project_id="proj-1", filename="text.jsonl", purpose="fine-tune", bytes=19, sha256="0" * 64,
                storage_key=f"files/{file_id}", report={},
            )
        )  # fmt: skip
        session.add(
            Job(
                **{
                    "id": job_id, "project_id": "proj-1", "kind": "pretrain", "spec": spec, "plan": {}, "slots": 1,
                    "run_config": run.model_dump(mode="json"), "state": JobState.STARTING, "node": "here", **values,
                }
            )
        )  # fmt: skip
        session.flush()
        slot = session.get(Slot, ("here", 0))
        assert slot is not None
        slot.job_id = job_id
    return job_id
