"""Running services for drills, one after another and each for all drills of its kind, as a start takes long."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.drills import DATABASES
from tests.faults.flaky import FlakyWay
from tests.faults.harm import CLOCK
from tests.servers import Server
from tests.stack import PARTS, Stack

SLOTS = 4
"""So many that one job can be harmed beside another that is left alone."""
LEASE_SECONDS = 5.0
"""So long that on a crowded host none ends by itself."""


class Standing:
    """One running service at a time, as those that nobody looks at take their share of the host all the same."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self._stacks = ExitStack()
        self._kind: str | None = None
        self._stack: Stack | None = None

    def on(self, kind: str) -> Stack:
        """That of this kind, the same as before where it stands; a test that nobody can run here is skipped."""
        if self._stack is None or self._kind != kind:
            self.end()
            # Not pytest's folder: with its name, the broker's socket would not fit beneath it.
            folder = Path(self._stacks.enter_context(tempfile.TemporaryDirectory(prefix="drill-")))
            self._stack, self._kind = started(kind, folder / "shed", self._stacks, self._request), kind
        return self._stack

    def end(self) -> None:
        self._stack = self._kind = None
        self._stacks.close()


@pytest.fixture(scope="module")
def standing(request: pytest.FixtureRequest) -> Iterator[Standing]:
    standing = Standing(request)
    yield standing
    standing.end()


@pytest.fixture
def stack_on(request: pytest.FixtureRequest, standing: Standing) -> Iterator[Callable[[str], Stack]]:
    """The service of this kind. What a test leaves that has failed is not the next one's."""
    failed = request.session.testsfailed
    yield standing.on
    if request.session.testsfailed > failed:
        standing.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those on one kind of service follow one another, so that each kind is started once."""

    def place(item: pytest.Item) -> int:
        kind = getattr(item, "callspec", None) and item.callspec.params.get("kind")  # type: ignore[attr-defined]
        return KINDS.index(kind) if kind in KINDS else -1

    ours = [index for index, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    for index, item in zip(ours, sorted((items[index] for index in ours), key=place), strict=True):
        items[index] = item


def started(kind: str, data_dir: Path, stacks: ExitStack, request: pytest.FixtureRequest) -> Stack:
    beneath, database = kind.split("-")
    settings = BENEATH[beneath](data_dir, stacks)
    server: Server | None = None
    if database == "postgresql":
        settings["database_url"] = request.getfixturevalue("new_postgresql")(data_dir.parent)
        server = request.getfixturevalue("postgresql")
    way = settings.pop("way", None)
    usual: dict[str, Any] = {"slots": SLOTS, "lease_seconds": LEASE_SECONDS}
    stack = stacks.enter_context(Stack(data_dir, parts=tuple(PARTS), **usual | settings))
    stack.postgresql, stack.way = server, way
    return stack


def plain(data_dir: Path, stacks: ExitStack) -> dict[str, Any]:
    return {}


def small_disks(data_dir: Path, stacks: ExitStack) -> dict[str, Any]:
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
    return {}


def another_clock(data_dir: Path, stacks: ExitStack) -> dict[str, Any]:
    """The wall clock of all processes but ours, the broker's, a server's and the ranks' is one that can be set."""
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
    return {"environ": environ, "lease_seconds": 2 * LEASE_SECONDS}


def s3(data_dir: Path, stacks: ExitStack) -> dict[str, Any]:
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
    return {"storage_url": "s3://drills/shed", "way": way}


BENEATH: dict[str, Callable[[Path, ExitStack], dict[str, Any]]] = {
    "plain": plain,
    "disks": small_disks,
    "clock": another_clock,
    "s3": s3,
}
"""What a drill may need beneath the service: makes it, and says what settings and what else go with it."""
KINDS = [f"{beneath}-{database}" for beneath in BENEATH for database in DATABASES]
"""Of services, in the order in which they are started."""


@pytest.fixture
def stack(stack_on: Callable[[str], Stack]) -> Stack:
    return stack_on("plain-sqlite")
