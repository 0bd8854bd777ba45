"""Checkpoints on their way to storage while the engine goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from workers.publisher import Publisher, Saved

DEADLINE_SECONDS = 20


class Storage:
    """Takes one checkpoint after another, each when it is let through."""

    def __init__(self) -> None:
        self.got: list[tuple[int, str]] = []
        self.failed: list[tuple[int, str]] = []
        self.refuses: set[int] = set()
        self.begun, self.open = Event(), Event()
        self.open.set()

    def publish(self, saved: Saved) -> None:
        self.begun.set()
        assert self.open.wait(DEADLINE_SECONDS)
        if saved.step in self.refuses:
            raise OSError("no")
        self.got.append((saved.step, (saved.folder / "weights").read_text()))

    def fail(self, saved: Saved, error: Exception) -> None:
        self.failed.append((saved.step, str(error)))


@pytest.fixture
def storage() -> Storage:
    return Storage()


@pytest.fixture
def publisher(tmp_path: Path, storage: Storage) -> Iterator[Publisher]:
    publisher = Publisher(tmp_path / "outbox", keep=2, publish=storage.publish, failed=storage.fail)
    yield publisher
    storage.open.set()
    publisher.close()


def saved(tmp_path: Path, step: int) -> Path:
    folder = tmp_path / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "weights").write_text(f"of step {step}")
    return folder


def test_what_the_engine_removes_meanwhile_is_uploaded_all_the_same(
    tmp_path: Path, storage: Storage, publisher: Publisher
) -> None:
    storage.open.clear()
    folder = saved(tmp_path, 1)
    publisher.add(1, folder, {})
    shutil.rmtree(folder)
    storage.open.set()
    publisher.flush()

    assert storage.got == [(1, "of step 1")]
    assert not list((tmp_path / "outbox").iterdir())


def test_one_that_is_gone_before_it_is_noticed_is_passed_over(
    tmp_path: Path, storage: Storage, publisher: Publisher
) -> None:
    publisher.add(1, tmp_path / "checkpoints" / "step-1", {})
    publisher.add(2, saved(tmp_path, 2), {})
    publisher.flush()

    assert storage.got == [(2, "of step 2")]


def test_where_uploads_fall_behind_the_oldest_that_wait_are_left_out(
    tmp_path: Path, storage: Storage, publisher: Publisher
) -> None:
    storage.open.clear()
    publisher.add(1, saved(tmp_path, 1), {})
    assert storage.begun.wait(DEADLINE_SECONDS)
    for step in (2, 3, 4):
        publisher.add(step, saved(tmp_path, step), {})
    storage.open.set()
    publisher.flush()

    assert [step for step, _ in storage.got] == [1, 3, 4]


def test_where_uploads_fall_behind_the_best_is_not_left_out(
    tmp_path: Path, storage: Storage, publisher: Publisher
) -> None:
    storage.open.clear()
    publisher.add(1, saved(tmp_path, 1), {}, best_step=1)
    assert storage.begun.wait(DEADLINE_SECONDS)
    for step in (2, 3, 4, 5):
        publisher.add(step, saved(tmp_path, step), {}, best_step=2)
    storage.open.set()
    publisher.flush()

    assert [step for step, _ in storage.got] == [1, 2, 4, 5]


def test_where_uploads_fall_behind_no_published_one_names_a_best_that_was_left_out(
    tmp_path: Path, storage: Storage
) -> None:
    published: list[tuple[int, int | None]] = []

    def publish(saved: Saved) -> None:
        storage.publish(saved)
        published.append((saved.step, saved.best_step))

    publisher = Publisher(tmp_path / "outbox", keep=1, publish=publish, failed=storage.fail)
    storage.open.clear()
    publisher.add(4, saved(tmp_path, 4), {}, best_step=4)
    assert storage.begun.wait(DEADLINE_SECONDS)
    for step, best_step in ((6, 6), (8, 6), (10, 10)):
        publisher.add(step, saved(tmp_path, step), {}, best_step=best_step)
    storage.open.set()
    publisher.flush()
    publisher.close()

    assert published == [(4, 4), (6, 6), (8, 6), (10, 10)]


def test_where_uploads_fall_behind_a_loss_that_falls_all_the_time_does_not_fill_the_disk(
    tmp_path: Path, storage: Storage, publisher: Publisher
) -> None:
    storage.open.clear()
    publisher.add(1, saved(tmp_path, 1), {}, best_step=1)
    assert storage.begun.wait(DEADLINE_SECONDS)
    for step in range(2, 10):
        publisher.add(step, saved(tmp_path, step), {}, best_step=step)
    storage.open.set()
    publisher.flush()

    # The best, which is the newest, and the two before it.
    assert [step for step, _ in storage.got] == [1, 7, 8, 9]


def test_one_that_fails_is_told_and_does_not_stop_the_next(
    tmp_path: Path, storage: Storage, publisher: Publisher
) -> None:
    storage.refuses = {1}
    publisher.add(1, saved(tmp_path, 1), {})
    publisher.add(2, saved(tmp_path, 2), {})
    publisher.flush()

    assert storage.failed == [(1, "no")]
    assert storage.got == [(2, "of step 2")]


def test_a_disk_without_second_names_gets_copies(
    tmp_path: Path, storage: Storage, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted", source)

    monkeypatch.setattr("os.link", refuse)
    publisher.add(1, saved(tmp_path, 1), {})
    publisher.flush()

    assert storage.got == [(1, "of step 1")]
