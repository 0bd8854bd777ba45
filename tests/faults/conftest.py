"""Running services for drills, one of each kind for all of them: starting it takes longer than most drills."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.flaky import FlakyWay
from tests.faults.harm import CLOCK
from tests.stack import PARTS, Stack

SLOTS = 4
LEASE_SECONDS = 5.0
"""So long that on a crowded host none ends by itself."""


@pytest.fixture(scope="module")
def stack_on(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Stack]]:
    """The service of this kind, started when it is first asked for; a test that nobody can run here is skipped."""
    with ExitStack() as stacks:

        @cache
        def on(kind: str) -> Stack:
            # Not pytest's folder: with its name, the broker's socket would not fit beneath it.
            folder = Path(stacks.enter_context(tempfile.TemporaryDirectory(prefix="drill-")))
            return KINDS[kind](folder / "shed", stacks, request)

        yield on


def on_sqlite(data_dir: Path, stacks: ExitStack, request: pytest.FixtureRequest, **settings: Any) -> Stack:
    usual: dict[str, Any] = {"slots": SLOTS, "lease_seconds": LEASE_SECONDS}
    return stacks.enter_context(Stack(data_dir, parts=tuple(PARTS), **usual | settings))


def on_postgresql(data_dir: Path, stacks: ExitStack, request: pytest.FixtureRequest) -> Stack:
    url = request.getfixturevalue("new_postgresql")(data_dir.parent)
    stack = on_sqlite(data_dir, stacks, request, database_url=url)
    stack.postgresql = request.getfixturevalue("postgresql")
    return stack


def on_small_disks(data_dir: Path, stacks: ExitStack, request: pytest.FixtureRequest) -> Stack:
    """The database, the runs and the storage each on a disk of their own that is soon full."""
    for place, size in (("", "96m"), ("runs", "64m"), ("storage", "64m")):
        path = data_dir / place
        path.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "drill", str(path)]
        try:
            subprocess.run(mount, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("needs leave to mount a file system")
        stacks.callback(subprocess.run, ["umount", "-l", str(path)], check=True)
    return on_sqlite(data_dir, stacks, request)


def on_another_clock(data_dir: Path, stacks: ExitStack, request: pytest.FixtureRequest) -> Stack:
    """The wall clock of all processes but ours, the broker's and the ranks' is one that can be set."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
    if library is None:
        pytest.skip("libfaketime is not installed: `apt-get install libfaketime`")
    data_dir.mkdir()
    (data_dir / CLOCK).write_text("+0")
    environ = {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(data_dir / CLOCK),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    # All that they do takes longer so.
    return on_sqlite(data_dir, stacks, request, environ=environ, lease_seconds=2 * LEASE_SECONDS)


def on_s3(data_dir: Path, stacks: ExitStack, request: pytest.FixtureRequest) -> Stack:
    """Storage is a server, at the other end of a way that can be closed."""
    moto = pytest.importorskip("moto.server", reason="moto is not installed: `pip install moto[server,s3]`")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    stacks.callback(server.stop)
    host, port = server.get_host_and_port()
    assert httpx.put(f"http://{host}:{port}/drills").status_code == 200
    way = FlakyWay(host, port)
    stacks.callback(way.close)
    patch = stacks.enter_context(pytest.MonkeyPatch.context())
    for name, value in {
        "ENDPOINT_URL": way.url, "ALLOW_HTTP": "true", "ACCESS_KEY_ID": "drill", "SECRET_ACCESS_KEY": "drill",
        "REGION": "us-east-1",
    }.items():  # fmt: skip
        patch.setenv(f"AWS_{name}", value)
    stack = on_sqlite(data_dir, stacks, request, storage_url="s3://drills/shed")
    stack.way = way
    return stack


KINDS: dict[str, Callable[[Path, ExitStack, pytest.FixtureRequest], Stack]] = {
    "sqlite": on_sqlite,
    "postgresql": on_postgresql,
    "disks": on_small_disks,
    "clock": on_another_clock,
    "s3": on_s3,
}
"""What a drill may need beneath it."""


@pytest.fixture
def stack(stack_on: Callable[[str], Stack]) -> Stack:
    return stack_on("sqlite")


@pytest.fixture(params=["sqlite", "postgresql"])
def each_stack(request: pytest.FixtureRequest, stack_on: Callable[[str], Stack]) -> Stack:
    """For the drills that depend on what a database promises."""
    return stack_on(request.param)
