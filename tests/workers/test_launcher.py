"""Gangs on this host: they live by beats, end when asked, and leave nobody behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from threading import Event
from time import monotonic

import psutil
import pytest

from workers.launcher import GangSpec, Handle, LocalLauncher, Status

FAKE = (sys.executable, str(Path(__file__).parents[1] / "fakes" / "engine.py"))
DEADLINE_SECONDS = 20
LONG = timedelta(hours=1)
FOREVER = 100_000


def gang(run_dir: Path, *, steps: int = FOREVER, heartbeat_timeout: timedelta = LONG) -> GangSpec:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "run.json").write_text(json.dumps({"training": {"steps": steps, "checkpoint_every": None}}))
    return GangSpec("job-1", 1, 2, run_dir, {"PATH": "/usr/bin:/bin"}, heartbeat_timeout)


def ended(launcher: LocalLauncher, handle: Handle) -> Status:
    """The status once nothing is left, polled as a supervisor does."""
    deadline, pause = monotonic() + DEADLINE_SECONDS, Event()
    while not (status := launcher.poll(handle)).ended:
        assert monotonic() < deadline
        pause.wait(0.02)
    return status


def processes(run_dir: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if any(str(run_dir) in word for word in process.info["cmdline"] or [])
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def steps_appear(run_dir: Path) -> None:
    deadline, pause = monotonic() + DEADLINE_SECONDS, Event()
    events = run_dir / "events.jsonl"
    while not (events.exists() and '"step"' in events.read_text()):
        assert monotonic() < deadline
        pause.wait(0.02)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    left = processes(tmp_path / "run")
    for process in left:
        process.kill()
    assert not left, "the test left processes"


def test_a_gang_that_finishes_leaves_its_exit_code_and_nobody(run_dir: Path) -> None:
    launcher = LocalLauncher(FAKE)

    status = ended(launcher, launcher.submit(gang(run_dir, steps=2)))

    assert status.exit_code == 0
    assert not processes(run_dir), "not even the child that the launch forgot"


def test_submitting_again_is_the_same_gang(run_dir: Path) -> None:
    launcher = LocalLauncher(FAKE)
    spec = gang(run_dir, steps=2)

    handle = launcher.submit(spec)

    assert launcher.submit(spec) == handle
    assert ended(launcher, handle).exit_code == 0
    assert (run_dir / "events.jsonl").read_text().count('"started"') == 1


def test_a_gang_that_is_cancelled_saves_and_ends(run_dir: Path) -> None:
    launcher = LocalLauncher(FAKE)
    handle = launcher.submit(gang(run_dir))
    steps_appear(run_dir)

    launcher.cancel(handle, LONG)

    assert ended(launcher, handle).exit_code == 0
    assert '"stopped"' in (run_dir / "events.jsonl").read_text()


def test_a_gang_that_does_not_listen_is_killed_when_its_grace_is_over(run_dir: Path) -> None:
    launcher = LocalLauncher((*FAKE, "--ignore-term"))
    handle = launcher.submit(gang(run_dir))
    steps_appear(run_dir)

    launcher.cancel(handle, LONG)
    launcher.cancel(handle, timedelta(seconds=0.2))

    assert ended(launcher, handle).exit_code == -9
    assert not processes(run_dir)


def test_a_later_cancel_does_not_lengthen_the_grace(run_dir: Path) -> None:
    launcher = LocalLauncher((*FAKE, "--ignore-term"))
    handle = launcher.submit(gang(run_dir))

    launcher.cancel(handle, timedelta(0))
    launcher.cancel(handle, LONG)

    assert ended(launcher, handle).exit_code == -9


def test_a_gang_without_beats_dies_by_itself(run_dir: Path) -> None:
    launcher = LocalLauncher(FAKE)
    handle = launcher.submit(gang(run_dir, heartbeat_timeout=timedelta(seconds=0.5)))

    assert ended(launcher, handle).exit_code == -9


def test_beats_keep_a_gang_alive_and_are_harmless_afterwards(run_dir: Path) -> None:
    launcher = LocalLauncher(FAKE)
    handle = launcher.submit(gang(run_dir, heartbeat_timeout=timedelta(seconds=2)))
    steps_appear(run_dir)
    until, pause = monotonic() + 3, Event()
    while monotonic() < until:
        launcher.beat(handle)
        assert not launcher.poll(handle).ended
        pause.wait(0.1)

    launcher.cancel(handle, timedelta(0))

    assert ended(launcher, handle).exit_code == -9
    launcher.beat(handle)
