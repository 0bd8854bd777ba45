"""Objects that are there whole or not at all, on disk and on S3."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from signal import SIGKILL
from subprocess import Popen

import pytest

from core.errors import NotFound
from core.storage import CHUNK_BYTES, Storage, open_storage

DEADLINE_SECONDS = 60
KILLED = """
import os, signal, sys
from core.storage import CHUNK_BYTES, open_storage

def chunks():
    yield from [bytes(CHUNK_BYTES)] * 6
    os.kill(os.getpid(), signal.SIGKILL)

open_storage(sys.argv[1]).put_stream(sys.argv[2], chunks())
"""
"""Puts some parts, and dies."""


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """URL of a bucket on a server of our own, over a real socket."""
    moto = pytest.importorskip("moto.server", reason="moto is not installed: `pip install moto[server,s3]`")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ALLOW_HTTP", "true")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_REGION", "us-east-1")
        import httpx

        assert httpx.put(f"http://{host}:{port}/trainshed-tests").status_code == 200
        yield "s3://trainshed-tests/some/prefix"
    server.stop()


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "file":
        return open_storage((tmp_path / "storage").as_uri())
    return open_storage(f"{request.getfixturevalue('s3')}/{tmp_path.name}")


def content(store: Storage, key: str, start: int | None = None, end: int | None = None) -> bytes:
    return b"".join(store.stream(key, start, end))


@pytest.mark.parametrize("size", [0, 1, 2 * CHUNK_BYTES + 17], ids=["empty", "a byte", "several parts"])
def test_what_was_put_comes_back(store: Storage, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "data").write_bytes(data)
    store.put_file("a/b", tmp_path / "data")
    assert store.size("a/b") == size
    assert content(store, "a/b") == data
    store.get_to("a/b", tmp_path / "deep" / "copy")
    assert (tmp_path / "deep" / "copy").read_bytes() == data
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["copy"]


def test_a_stream_of_unknown_length_is_put_in_parts(store: Storage) -> None:
    pieces = [bytes([number]) * (CHUNK_BYTES // 3) for number in range(10)]
    assert store.put_stream("big", iter(pieces)) == sum(map(len, pieces))
    assert content(store, "big") == b"".join(pieces)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(None, None, b"0123456789"), (3, None, b"3456789"), (3, 5, b"34"), (0, 1, b"0"), (9, 10, b"9"), (4, 4, b"")],
)
def test_a_range_is_read_alone(store: Storage, start: int | None, end: int | None, expected: bytes) -> None:
    store.put_bytes("digits", b"0123456789")
    assert content(store, "digits", start, end) == expected


def test_a_put_that_breaks_off_leaves_nothing(store: Storage) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x" * (2 * CHUNK_BYTES)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        store.put_stream("files/one", chunks())
    assert not store.exists("files/one")
    assert list(store.list("files")) == []


def test_a_put_that_breaks_off_leaves_what_was_there_before(store: Storage) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"new"
        raise RuntimeError("the client went away")

    store.put_bytes("files/one", b"old")
    with pytest.raises(RuntimeError, match="went away"):
        store.put_stream("files/one", chunks())
    assert content(store, "files/one") == b"old"


def test_what_a_killed_put_leaves_goes_with_its_tree_or_after_a_while(tmp_path: Path) -> None:
    store = open_storage((tmp_path / "storage").as_uri())
    for tree in ("some", "other"):
        with Popen([sys.executable, "-c", KILLED, (tmp_path / "storage").as_uri(), f"{tree}/big"]) as putting:
            assert putting.wait(DEADLINE_SECONDS) == -SIGKILL
    store.put_bytes("other/whole", b"x")

    def left() -> list[str]:
        return [path.relative_to(store.folder or tmp_path).as_posix() for path in tmp_path.rglob("*#*")]

    assert {name.partition("/")[0] for name in left()} == {"some", "other"}
    assert not list(store.list("some"))
    store.delete_tree("some")
    assert not (tmp_path / "storage" / "some").exists()
    assert store.remove_begun(timedelta(hours=1)) == [], "it may still come"
    there = left()
    assert sorted(store.remove_begun(timedelta(0))) == sorted(there)
    assert left() == []
    assert content(store, "other/whole") == b"x"


def test_what_is_not_there_is_not_found(store: Storage, tmp_path: Path) -> None:
    for look in (
        lambda: store.size("none"),
        lambda: store.stream("none"),
        lambda: store.stream("none", 0, 5),
        lambda: store.get_to("none", tmp_path / "copy"),
        lambda: store.get_tree("none", tmp_path / "copies"),
    ):
        with pytest.raises(NotFound):
            look()
    assert not (tmp_path / "copy").exists()
    store.delete("none")
    store.delete_tree("none")


def test_a_tree_goes_and_comes_back_and_its_neighbour_stays(store: Storage, tmp_path: Path) -> None:
    tree = {"manifest.json": b"{}", "model/config.json": b"c", "model/z.bin": b"z", "a.txt": b"a"}
    for name, data in tree.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(data)
    stored = store.put_tree("jobs/1", tmp_path / "tree")
    assert [one.key for one in stored][-1] == "jobs/1/manifest.json"
    store.put_bytes("jobs/10/other", b"o")
    assert {one.key: one.bytes for one in store.list("jobs/1")} == {f"jobs/1/{name}": len(tree[name]) for name in tree}
    store.get_tree("jobs/1", tmp_path / "copy")
    assert {name: (tmp_path / "copy" / name).read_bytes() for name in tree} == tree
    store.delete_tree("jobs/1")
    assert list(store.list("jobs/1")) == []
    assert store.exists("jobs/10/other")


@pytest.mark.parametrize(("most", "goes"), [(1, [1, 1, 1]), (2, [2, 1]), (3, [3]), (9, [3])])
def test_a_tree_goes_in_pieces_of_so_many_objects_and_the_last_one_says_so(
    store: Storage, most: int, goes: list[int]
) -> None:
    keys = {f"jobs/1/{name}" for name in ("a", "b/c", "b/d")}
    for key in keys | {"jobs/10/other"}:
        store.put_bytes(key, b"x")
    for number, some in enumerate(goes, start=1):
        before = len(list(store.list("jobs/1")))
        assert store.delete_some("jobs/1", most=most) == (number == len(goes))
        assert before - len(list(store.list("jobs/1"))) == some
    assert [one.key for one in store.list("jobs")] == ["jobs/10/other"]


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/./b", "a\x00b", "a b", "é", "a/"])
def test_only_keys_of_ours_become_paths(store: Storage, key: str) -> None:
    with pytest.raises(ValueError, match="not a storage key"):
        store.put_bytes(key, b"x")


@pytest.mark.parametrize("url", ["", "/srv/storage", "ftp://x/y"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="file://"):
        open_storage(url)


def test_a_full_disk_leaves_nothing_that_can_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource
    import signal

    store = open_storage(tmp_path.as_uri())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit on the size of files fails a write in the same place as a full disk does.
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK_BYTES, before[1]))
    try:
        with pytest.raises(Exception, match=r"(?i)file too large|os error 27"):
            store.put_stream("big", iter([b"x" * CHUNK_BYTES] * 3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not store.exists("big")
    assert list(store.list("big")) == []


def test_the_disk_is_asked_to_keep_an_object_and_each_folder_that_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, real = list[str](), os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    store = open_storage((tmp_path / "data" / "storage").as_uri())
    assert synced == [".", "data"]
    synced.clear()
    store.put_bytes("jobs/1/model/a", b"a")
    # A name is in the folder above it: that of `jobs` in the storage's, and so on down.
    top = "data/storage"
    assert synced == [top, f"{top}/jobs", f"{top}/jobs/1", f"{top}/jobs/1/model/a", f"{top}/jobs/1/model"]
    synced.clear()
    store.put_stream("jobs/1/model/b", iter([b"b"]))
    assert synced == [f"{top}/jobs/1/model/b", f"{top}/jobs/1/model"]
