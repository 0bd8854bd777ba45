"""Children are kept alive, and end when they are told to: with real processes."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Event, Thread
from time import monotonic

import psutil
import pytest

from core import children
from core.children import Child

DEADLINE_SECONDS = 30


def until_there(child: Child, path: Path) -> int:
    """Tend the child until it wrote its pid."""
    deadline, pause = monotonic() + DEADLINE_SECONDS, Event()
    while not (path.exists() and path.read_text()):
        child.tend()
        assert monotonic() < deadline
        pause.wait(0.02)
    pid = int(path.read_text())
    path.unlink()
    return pid


def test_a_child_that_dies_is_started_again_and_one_that_is_stopped_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "FIRST_PAUSE", 0.05)
    path = tmp_path / "pid"
    says_its_pid = f"import os, time; open({str(path)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    child = Child("sleeper", (sys.executable, "-c", says_its_pid))

    first = until_there(child, path)
    psutil.Process(first).kill()
    second = until_there(child, path)
    child.stop(DEADLINE_SECONDS)
    child.tend()

    assert second != first
    assert not psutil.pid_exists(second)
    assert not path.exists()


def test_a_child_that_does_not_end_is_killed_with_what_it_started(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    script = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(path)!r}, 'w').write(str(child.pid)); time.sleep(600)"
    )
    child = Child("stubborn", (sys.executable, "-c", script))
    grandchild = psutil.Process(until_there(child, path))

    child.stop(0.2)

    psutil.wait_procs([grandchild], timeout=DEADLINE_SECONDS)
    assert not grandchild.is_running()


def test_a_child_that_is_slow_to_end_is_asked_again_when_there_is_a_hurry(tmp_path: Path) -> None:
    path, asked = tmp_path / "pid", tmp_path / "asked"
    script = (
        "import os, signal, time\n"
        f"asked = open({str(asked)!r}, 'w', buffering=1)\n"
        "def on_term(*_):\n"
        "    print('asked', file=asked)\n"
        "    asked.tell() > len('asked\\n') and os._exit(0)\n"
        "signal.signal(signal.SIGTERM, on_term)\n"
        f"open({str(path)!r}, 'w').write(str(os.getpid()))\n"
        "while True: time.sleep(600)\n"
    )
    child = Child("slow", (sys.executable, "-c", script))
    until_there(child, path)
    hurry, pause = Event(), Event()

    def hurry_once_asked() -> None:
        deadline = monotonic() + DEADLINE_SECONDS
        while not asked.read_text() and monotonic() < deadline:
            pause.wait(0.02)
        hurry.set()

    waiting = Thread(target=hurry_once_asked)
    waiting.start()
    child.stop(DEADLINE_SECONDS, hurry=hurry, hurry_seconds=DEADLINE_SECONDS)
    waiting.join()

    # Killed, it would have been asked once.
    assert asked.read_text() == "asked\nasked\n"


def test_a_child_has_the_environment_the_file_and_the_descriptors_it_is_given(tmp_path: Path) -> None:
    path, output = tmp_path / "pid", tmp_path / "child.log"
    with (tmp_path / "open").open("w") as passed:
        script = (
            "import os, time; print(os.environ['GREETING'], flush=True);"
            f"os.write({passed.fileno()}, b'through');"
            f"open({str(path)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
        )
        child = Child(
            "given",
            (sys.executable, "-c", script),
            environment={"GREETING": "hello"},
            log_path=output,
            pass_fds=[passed.fileno()],
        )
        until_there(child, path)
        child.stop(DEADLINE_SECONDS)
    assert output.read_text() == "hello\n"
    assert (tmp_path / "open").read_text() == "through"
