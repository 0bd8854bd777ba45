"""A job that was placed on this host, in a database and storage of its own; without a broker, so each hint is lost."""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from core.models import new_id
from core.services import Services
from core.settings import Settings
from core.states import JobState
from engine.config import Training
from tests import make
from workers.launcher import LocalLauncher
from workers.node import Node
from workers.nodename import NodeName
from workers.orders import Orders

LINE = b"a line\n"
FAKE_ENGINE = Path(__file__).parents[1] / "fakes" / "engine.py"


@pytest.fixture
def services(tmp_path: Path, new_sqlite: Callable[[Path], str]) -> Iterator[Services]:
    settings = Settings(
        data_dir=tmp_path / "shed",
        redis_url=f"unix://{tmp_path}/nobody.sock",
        lease_seconds=2,
        stop_grace_seconds=5,
        cancel_grace_seconds=0.5,
        node_name="here",
    )
    settings.data_dir.mkdir()
    new_sqlite(settings.data_dir)
    with Services(settings) as services:
        with services.db.session() as session:
            make.node(session, "here", num_slots=2)
        yield services


def new_node(services: Services) -> Node:
    """This host's node, which nobody runs and nobody competes with."""
    return Node(services, Orders(), NodeName(io.BytesIO(), "this one"))


def fake_engine(*options: str) -> LocalLauncher:
    """A launcher of the fake engine, told to do something amiss by its options."""
    return LocalLauncher((sys.executable, str(FAKE_ENGINE), *options))


def place_job(services: Services, *, steps: int = 20, checkpoint_every: int | None = 5, **columns: Any) -> str:
    """A job with one training file, placed on this node and not yet claimed; its id."""
    file_id = new_id("file")
    services.storage.put_bytes(f"files/{file_id}", LINE)
    training = Training(steps=steps, checkpoint_every=checkpoint_every, global_batch=1, micro_batch=1, lr=0.1)
    asked: dict[str, Any] = {
        "state": JobState.STARTING,
        "attempt": 0,
        "holder": None,
        "node": "here",
        "spec": make.spec(data={"train": [file_id]}).model_dump(mode="json", by_alias=True, exclude_unset=True),
        "run_config": make.run_config(training=training).model_dump(mode="json"),
    }
    with services.db.session() as session:
        make.file(session, file_id, bytes=len(LINE), sha256=hashlib.sha256(LINE).hexdigest())
        return make.job(session, **asked | columns).id
