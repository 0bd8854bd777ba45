"""Saving while training goes on: what was, not what is; and a save that fails or hangs ends the run on every rank."""

import os
import threading

import pytest
import torch

from engine import checkpoint, saving, tensorfile, trainer
from engine.checkpoint import Facts
from engine.failure import RunFailure
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
    assert [(event.type, event.step) for event in seen[-3:]] == [("checkpoint", 2), ("checkpoint", 3), ("stopped", 3)]
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
