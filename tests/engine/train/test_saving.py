"""Saving while training goes on: what was, not what is; and a save that fails or hangs ends the run on every rank."""

import os
import resource
import shutil
import threading

import pytest
import torch

from engine import checkpoint, saving, tensorfile, trainer
from engine.checkpoint import Facts
from engine.failure import RunFailure, explain
from engine.mesh import alone
from engine.saving import Saver, Stage
from engine.stop import StopWish
from tests.engine.train import runs
from tests.engine.train.toy import backward, gradients, ours, train

CPU = torch.device("cpu")
PATIENCE = 30.0


@pytest.fixture
def disk(monkeypatch):
    """A disk that takes nothing before it is told to."""
    ready, write = threading.Event(), tensorfile.write

    def wait_and_write(*args, **options):
        assert ready.wait(PATIENCE)
        return write(*args, **options)

    monkeypatch.setattr(tensorfile, "write", wait_and_write)
    yield ready
    ready.set()


def one_more_step(parameters, optimizer):
    for part in range(2):
        backward(parameters, gradients(9, part))
    optimizer.update(lr=0.01, norm=optimizer.sum_gradients())


def states(optimizer):
    return [(piece.parameter, key, x.clone()) for piece in optimizer.pieces() for key, x in piece.tensors.items()]


def test_a_checkpoint_has_the_state_of_its_step_whatever_is_trained_meanwhile(tmp_path, disk):
    parameters, _, optimizer = train(alone(CPU), 2)
    before = states(optimizer)
    with Saver(tmp_path, optimizer, keep=1) as saver:
        saver.begin(Facts(2, 64, 8, 7))
        one_more_step(parameters, optimizer)
        assert saver.stage is Stage.WRITING
        disk.set()
        saver.wait()
    _, loaded = ours(alone(CPU))
    assert checkpoint.load(tmp_path / "step-00000002", loaded, base=None) == Facts(2, 64, 8, 7)
    assert loaded.steps == 2
    for (_, _, was), (name, key, now) in zip(before, states(loaded), strict=True):
        assert torch.equal(was, now), (name, key)


def test_a_save_is_published_before_the_next_one_begins(tmp_path, disk):
    _, _, optimizer = train(alone(CPU), 1)
    told = []
    with Saver(tmp_path, optimizer, keep=2, saved=told.append) as saver:
        saver.begin(Facts(1, 0, 0, 0))
        threading.Timer(0.05, disk.set).start()
        saver.begin(Facts(2, 0, 0, 0))
        assert [saved.facts.step for saved in told] == [1]
        assert 0 < told[0].blocked_seconds <= told[0].seconds
        assert (told[0].path / "manifest.json").is_file()
        saver.wait()
    assert [saved.facts.step for saved in told] == [1, 2]


def test_a_save_goes_from_writing_to_published_without_anybody_waiting(tmp_path):
    _, _, optimizer = train(alone(CPU), 1)
    told = []
    with Saver(tmp_path, optimizer, keep=1, saved=told.append) as saver:
        saver.begin(Facts(1, 0, 0, 0))
        saver.under_way.writing.result(PATIENCE)
        saver.advance([Stage.WRITTEN, Stage.WRITING])
        assert saver.under_way.publishing is None, "another rank is still writing"
        saver.advance([Stage.WRITTEN, Stage.WRITTEN])
        saver.under_way.publishing.result(PATIENCE)
        assert told == []
        saver.advance([saver.stage, Stage.WRITTEN])
        assert [saved.facts.step for saved in told] == [1]
        assert saver.under_way is None


def test_a_disk_that_hangs_fails_the_run_in_words(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(saving, "LEAST_SECONDS", 0.01)
    monkeypatch.setattr(saving, "LEAVE_SECONDS", 0.01)
    _, _, optimizer = train(alone(CPU), 1)
    with Saver(tmp_path, optimizer, keep=1) as saver:
        saver.begin(Facts(1, 0, 0, 0))
        with pytest.raises(RunFailure, match="not written within 0 seconds") as failed:
            saver.wait()
    assert failed.value.code == "stalled"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("when", ["as it is written", "before it is published"])
def test_a_folder_of_checkpoints_that_is_taken_away_fails_the_run_in_words(tmp_path, disk, when):
    _, _, optimizer = train(alone(CPU), 1)

    def beside(folder):
        (folder / "tokenizer").mkdir(parents=True)

    with Saver(tmp_path / "checkpoints", optimizer, keep=1, beside=beside) as saver:
        saver.begin(Facts(1, 0, 0, 0))
        if when == "before it is published":
            disk.set()
            saver.under_way.writing.result(PATIENCE)
        shutil.rmtree(tmp_path / "checkpoints")
        disk.set()
        with pytest.raises(RunFailure, match=r"something removed checkpoints/\.step-00000001\.unfinished"):
            saver.wait()
    assert not (tmp_path / "checkpoints").exists()


def test_a_rank_that_waits_for_a_slow_publisher_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "LOOK_SECONDS", 0.001)
    _, _, optimizer = train(alone(CPU), 1)
    prune, pruning, went_on = checkpoint.prune, threading.Event(), threading.Event()
    monkeypatch.setattr(optimizer.mesh.stopwatch.whereabouts, "go_on", lambda *_: pruning.is_set() and went_on.set())

    def slowly(*args, **options):
        pruning.set()
        assert went_on.wait(PATIENCE)
        prune(*args, **options)

    monkeypatch.setattr(checkpoint, "prune", slowly)
    with Saver(tmp_path, optimizer, keep=1) as saver:
        saver.begin(Facts(1, 0, 0, 0))
        saver.wait()
    assert went_on.is_set()


def test_a_long_file_is_synced_on_the_way(tmp_path, monkeypatch):
    happened = []
    monkeypatch.setattr(tensorfile, "SYNC_EVERY", 4096)
    monkeypatch.setattr(os, "fsync", lambda _: happened.append("synced"))
    half, whole = torch.zeros(512), torch.zeros(1024)
    tensors = [("a", whole), ("b", half), ("c", half)]
    tensorfile.write(tmp_path / "file", tensors, wrote=lambda: happened.append("wrote"))
    # The header, and then 4096, 2048 and 2048 bytes.
    assert happened == ["wrote", "synced", "wrote", "wrote", "synced", "wrote", "synced"]


def test_a_limit_on_the_size_of_files_is_named_as_what_it_is(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    _, _, optimizer = train(alone(CPU), 1)
    with Saver(tmp_path, optimizer, keep=1) as saver:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
        try:
            saver.begin(Facts(1, 0, 0, 0))
            with pytest.raises(OSError, match="too large") as failed:
                saver.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    said = explain(failed.value, rank=0)
    assert said.code == "disk_full"
    assert said.message.startswith("a file would grow beyond what a process may write on this host: ")
    assert "ulimit -f" in said.hint


FAILS = {"write": (tensorfile, "write"), "publish": (checkpoint, "publish")}


def fail_to_save(run_dir, run, rank, what):
    """What each rank raised, and how many steps it had done, when `rank` could not do one part of a save."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    module, name = FAILS[what]
    before = getattr(module, name)
    if int(os.environ["RANK"]) == rank:
        setattr(module, name, full)
    seen = []
    try:
        trainer.train(run, run_dir, seen.append, StopWish())
    except Exception as error:
        return type(error).__name__, len(runs.losses(seen))
    finally:
        setattr(module, name, before)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("every", [1, 3], ids=["each-step", "at-the-end"])
def test_when_one_rank_cannot_write_all_ranks_end_after_the_same_step(world2, tmp_path, rank, every):
    run = runs.config(parallel={"data": 2}, training={"steps": 3, "checkpoint_every": every})
    runs.write(tmp_path, run)
    ended = world2.run(fail_to_save, tmp_path, run, rank, "write")
    assert [name for name, _ in ended] == ["OSError", "LostContact"][:: 1 if rank == 0 else -1]
    assert len({steps for _, steps in ended}) == 1
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_when_rank_0_cannot_publish_all_ranks_end(world2, tmp_path):
    run = runs.config(parallel={"data": 2}, training={"steps": 3, "checkpoint_every": 1})
    runs.write(tmp_path, run)
    ended = world2.run(fail_to_save, tmp_path, run, 0, "publish")
    assert [name for name, _ in ended] == ["OSError", "LostContact"]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_stop_waits_for_the_save_under_way_and_publishes_the_last_step_too(tmp_path, disk):
    wish, seen = StopWish(), []

    def emit(event):
        seen.append(event)
        if event.type == "step" and event.step == 3:
            wish.wanted = True
            disk.set()

    run = runs.config(training={"checkpoint_every": 2})
    runs.write(tmp_path, run)
    trainer.train(run, tmp_path, emit, wish)
    told = [(event.type, event.step) for event in seen if event.type in ("checkpoint", "stopped")]
    assert told == [("checkpoint", 2), ("checkpoint", 3), ("stopped", 3)]
    assert wish.safe_step == 3


def test_what_is_written_when_the_run_fails_for_another_reason_does_not_stay_half_done(tmp_path, disk):
    wish = StopWish()

    def emit(event):
        if event.type == "step" and event.step == 2:
            disk.set()
            raise KeyError("a bug")

    run = runs.config(training={"checkpoint_every": 1})
    runs.write(tmp_path, run)
    with pytest.raises(KeyError):
        trainer.train(run, tmp_path, emit, wish)
    left = list((tmp_path / "checkpoints").iterdir())
    assert left == [] or [path.name for path in left] == ["step-00000001"]
    for path in left:
        checkpoint.verify(path)
