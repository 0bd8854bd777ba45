"""Two nodes of one name: as processes, of one data directory and of two."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from time import monotonic

import pytest
from sqlalchemy import select

from core import nodes
from core.errors import InUse
from core.models import Node
from core.services import Services
from core.settings import Settings
from workers.nodename import held
from workers.orders import Orders
from workers.outcome import Wish

DEADLINE_SECONDS = 120


@contextmanager
def running(settings: Settings) -> Iterator[subprocess.Popen[str]]:
    """A node as `trainshed worker` runs it."""
    node = subprocess.Popen(
        [sys.executable, "-m", "workers.node"],
        env=os.environ | settings.environment() | {"OMP_NUM_THREADS": "1", "TRAINSHED_CALIBRATE": "false"},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield node
    finally:
        node.terminate()
        node.communicate(timeout=DEADLINE_SECONDS)


def until(condition: Callable[[], bool]) -> None:
    deadline, pause = monotonic() + DEADLINE_SECONDS, Event()
    while not condition():
        assert monotonic() < deadline
        pause.wait(0.1)


def row(services: Services) -> Node:
    with services.db.reading() as session:
        return session.scalars(select(Node).where(Node.name == "here")).one()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["one data directory", "two"])
def test_a_second_node_of_a_name_ends_with_a_reason_and_the_first_is_given_jobs_as_before(
    services: Services, tmp_path: Path, elsewhere: bool
) -> None:
    ours = services.settings.model_copy(update={"database_url": services.settings.database})
    second = ours.model_copy(update={"data_dir": tmp_path / "elsewhere"}) if elsewhere else ours
    with running(ours) as node:
        until(lambda: row(services).holder is not None)
        holder = row(services).holder
        with running(second) as other:
            _, said = other.communicate(timeout=DEADLINE_SECONDS)
        assert other.returncode == 2
        assert "TRAINSHED_NODE_NAME" in said
        assert "Traceback" not in said
        if not elsewhere:
            assert f"process {node.pid}" in said
        assert node.poll() is None
        with services.db.reading() as session:
            assert [living.name for living in nodes.alive(session)] == ["here"]
        assert row(services).holder == holder


def test_the_next_node_waits_for_one_that_goes_down_and_has_its_name_then(services: Services) -> None:
    got: list[str] = []

    def next_one() -> None:
        with held(services.settings, Orders()) as name:
            got.append(name.holder)

    with held(services.settings, Orders()) as name:
        name.goes_down()
        waiting = Thread(target=next_one)
        waiting.start()
        waiting.join(1)
        assert (waiting.is_alive(), got) == (True, [])
    waiting.join(DEADLINE_SECONDS)
    assert got == [name.holder]


def test_who_waits_for_a_name_ends_when_it_is_told_to(services: Services) -> None:
    orders = Orders()
    orders.give(Wish.DRAIN)
    with held(services.settings, Orders()) as name:
        name.goes_down()
        with pytest.raises(InUse), held(services.settings, orders):
            raise AssertionError("it has the name")


@pytest.mark.parametrize("left", [b"", b"\0" * 80, b'{"holder": "0123', b"[]", b'{"other": 1}'])
def test_a_name_whose_file_was_spoilt_by_a_power_cut_can_be_had(services: Services, left: bytes) -> None:
    (services.settings.data_dir / "node-here.lock").write_bytes(left)
    with held(services.settings, Orders()) as name:
        assert name.holder
    with held(services.settings, Orders()) as again:
        assert again.holder == name.holder


def test_a_name_may_have_any_letters(services: Services, tmp_path: Path) -> None:
    settings = services.settings.model_copy(update={"node_name": "../../a host/ä"})
    with held(settings, Orders()):
        assert not list(tmp_path.glob("*.lock"))
        assert len(list(settings.data_dir.glob("*.lock"))) == 1
