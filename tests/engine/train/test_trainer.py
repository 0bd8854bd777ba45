"""Whole runs of the trainer: the same losses in every layout, exact resume, stops, and reasons for failure."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from engine import makings, rank, tensorfile, trainer
from engine.checkpoint import BadCheckpoint
from engine.emit import last_event
from engine.model import Decoder
from engine.stop import StopWish
from tests.engine.train import runs

LAYOUTS = {
    "tensor": {"tensor": 2},
    "tensor-sequence": {"tensor": 2, "sequence": True},
    "data": {"data": 2},
    "data-not-sharded": {"data": 2, "shard_optimizer": False},
    "pipeline": {"pipeline": 2},
}


def on_ranks(run_dir, run):
    """What each rank of a world does in a case: the losses it saw."""
    return runs.losses(runs.events_of(run_dir, run))


def alone(tmp_path, name, run):
    folder = tmp_path / name
    folder.mkdir()
    return runs.losses(runs.events_of(folder, run))


def together(world, tmp_path, name, run):
    folder = tmp_path / name
    folder.mkdir()
    runs.write(folder, run)
    first, *others = world.run(on_ranks, folder, run)
    assert all(other == first for other in others)
    return first


DATA = {"text": {}, "ragged-labels": runs.COMPLETION}


@pytest.fixture(scope="module")
def losses_of_one(tmp_path_factory):
    """The losses of one rank on each of `DATA`."""
    return {name: alone(tmp_path_factory.mktemp(name), "one", runs.config(**data)) for name, data in DATA.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("data", [pytest.param("text", marks=pytest.mark.slow), "ragged-labels"])
def test_two_ranks_give_the_losses_of_one(world2, tmp_path, losses_of_one, layout, data):
    one = losses_of_one[data]
    two = together(world2, tmp_path, "two", runs.config(**DATA[data], parallel=LAYOUTS[layout]))
    assert len(one) == 10
    assert two == pytest.approx(one, rel=2e-6)


def what_is_said(run_dir, run):
    """What rank 0 says of the model and of its validation."""
    events = runs.events_of(run_dir, run)
    (started,) = [event for event in events if event.type == "started"]
    return started.parameters, started.trainable_parameters, [e for e in events if e.type == "evaluated"]


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_a_pipeline_says_of_the_model_what_one_rank_says_and_exports_it(world2, tmp_path, adapted):
    from transformers import AutoModelForCausalLM

    (tmp_path / "base").mkdir()
    runs.events_of(tmp_path / "base", runs.config(training={"steps": 1}))
    base = {"model": None, "base": str(tmp_path / "base" / "export" / "model"), "tokenizer": {"type": "base"}}
    changes = {"data": {"validation": 0.1}, "training": {"steps": 3}} | base
    if adapted:
        changes |= {"lora": {"rank": 4}}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        runs.write(tmp_path / name, runs.config(**changes))
    *counts, (one,) = what_is_said(tmp_path / "one", runs.config(**changes))
    said = world2.run(what_is_said, tmp_path / "two", runs.config(**changes, parallel={"pipeline": 2}))
    for *staged, (two,) in said:
        assert staged == counts
        assert (two.loss, two.tokens) == (pytest.approx(one.loss, rel=2e-6), one.tokens)
        assert two.token_accuracy == one.token_accuracy
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "export" / "model") for name in ("one", "two")]
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(models[1](ids).logits, models[0](ids).logits, rtol=1e-4, atol=1e-4)


def test_the_loss_is_the_same_however_a_batch_is_cut(tmp_path):
    small = alone(tmp_path, "small", runs.config(**runs.COMPLETION))
    large = alone(tmp_path, "large", runs.config(**runs.COMPLETION, training={"micro_batch": 4}))
    assert large == pytest.approx(small, rel=2e-6)


def one_example(run_dir, run):
    runs.write(run_dir, run)
    line = {"prompt": "a", "completion": " yes"}
    (run_dir / "data" / "train.jsonl").write_text(json.dumps(line) + "\n")


def test_a_rank_without_a_row_takes_part(world2, tmp_path):
    run = runs.config(**runs.COMPLETION, training={"global_batch": 2, "steps": 3})
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        one_example(tmp_path / name, run)
    one = runs.losses(runs.events_of(tmp_path / "one", run))
    spread = run.model_copy(update={"parallel": runs.config(parallel={"data": 2}).parallel})
    two, _ = world2.run(on_ranks, tmp_path / "two", spread)
    assert two == pytest.approx(one, rel=2e-6)


def test_events_tell_the_run_in_order(tmp_path):
    run = runs.config(
        training={"steps": 5, "checkpoint_every": 2, "eval_every": 3, "keep_checkpoints": 2},
        data={"validation": 0.2},
        peak_flops_per_rank=1e12,
    )
    events = runs.events_of(tmp_path, run)
    told = [(event.type, event.step) for event in events if hasattr(event, "step")]
    assert [entry for entry in told if entry[0] != "checkpoint"] == [
        ("step", 1), ("step", 2), ("step", 3), ("evaluated", 3), ("step", 4), ("step", 5), ("evaluated", 5),
        ("finished", 5),
    ]  # fmt: skip
    # Training goes on while one is written, until the next is begun or all steps are done.
    for step, before in ((2, ("checkpoint", 4)), (4, ("checkpoint", 5)), (5, ("finished", 5))):
        assert told.index(("step", step)) < told.index(("checkpoint", step)) < told.index(before)
    assert {event.phase for event in events if event.type == "progress"} == {"data", "model", "export"}
    started = next(event for event in events if event.type == "started")
    # 261 x 32 embedding; a layer has q, o 32x32, k, v 32x16, three of 32x48 and two norms; one norm at the end.
    assert started.parameters == 261 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32
    assert (started.total_steps, started.start_step, started.ranks) == (5, 0, 1)
    last = next(event for event in reversed(events) if event.type == "step")
    assert last.tokens == 5 * 4 * 32
    assert last.mfu is not None
    assert last.mfu > 0
    assert last.memory_bytes > 10**7
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000004", "step-00000005"]


def test_epochs_become_steps(tmp_path):
    run = runs.config(**runs.COMPLETION, training={"steps": None, "epochs": 2.0, "global_batch": 2})
    events = runs.events_of(tmp_path, run)
    rows = next(event.train_rows for event in events if event.type == "started")
    assert len(runs.losses(events)) == -(-2 * rows // 2)


RESUME = """
import sys, torch
from pathlib import Path
from tests.engine.train import runs
torch.set_num_threads(1)
from engine.config import RunConfig
for folder in map(Path, sys.argv[1:]):
    print(runs.losses(runs.events_of(folder, RunConfig.model_validate_json((folder / "run.json").read_text()))))
"""


def test_steps_before_and_after_a_save_are_bitwise_those_of_an_unbroken_run(tmp_path):
    folders, expected = [], []
    for precision in ("fp32", "bf16"):
        whole = runs.config(training={"steps": 8, "precision": precision, "checkpoint_every": 4})
        folder = tmp_path / precision
        folder.mkdir()
        straight = runs.losses(runs.events_of(folder, whole))
        again = tmp_path / f"{precision}-resumed"
        again.mkdir()
        runs.write(again, whole.model_copy(update={"resume": folder / "checkpoints" / "step-00000004"}))
        folders.append(again)
        expected.append(straight[4:])
    done = subprocess.run(
        [sys.executable, "-c", RESUME, *map(str, folders)], capture_output=True, text=True, check=True, timeout=120
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected
    for folder in folders:
        name = "export/model/model.safetensors"
        straight = tmp_path / folder.name.removesuffix("-resumed") / name
        assert (folder / name).read_bytes() == straight.read_bytes()


# What is read is what was written, in any layout: the test of the grid looks at that.
@pytest.mark.parametrize(
    "saved", ["tensor-sequence", *(pytest.param(name, marks=pytest.mark.slow) for name in ("data", "pipeline"))]
)
def test_another_layout_goes_on_from_a_checkpoint(world2, tmp_path, losses_of_one, saved):
    straight = losses_of_one["text"]
    (tmp_path / "begun").mkdir()
    begun = runs.config(training={"checkpoint_every": 5}, parallel=LAYOUTS[saved])
    runs.write(tmp_path / "begun", begun)
    world2.run(on_ranks, tmp_path / "begun", begun)
    resume = tmp_path / "begun" / "checkpoints" / "step-00000005"
    assert alone(tmp_path, "one", runs.config(resume=resume)) == pytest.approx(straight[5:], rel=5e-6)
    for name in ("tensor", "data-not-sharded", "pipeline"):
        run = runs.config(resume=resume, parallel=LAYOUTS[name])
        assert together(world2, tmp_path, name, run) == pytest.approx(straight[5:], rel=5e-6)


def test_with_another_batch_the_rows_that_are_left_are_trained_on_once(tmp_path):
    runs.events_of(tmp_path, runs.config(training={"steps": 4, "global_batch": 4}))
    run = runs.config(training={"steps": None, "epochs": 1.0, "global_batch": 2}, resume="checkpoints/step-00000004")
    events = runs.events_of(tmp_path, run)
    started = next(event for event in events if event.type == "started")
    last = next(event for event in reversed(events) if event.type == "step")
    assert started.train_rows % 2 == 0
    assert last.step == started.total_steps == 4 + (started.train_rows - 16) / 2
    assert last.tokens == started.train_tokens


def test_a_resumed_run_with_nothing_left_to_do_exports(tmp_path):
    runs.events_of(tmp_path, runs.config(training={"steps": 2}))
    run = runs.config(training={"steps": 2}, resume="checkpoints/step-00000002")
    events = runs.events_of(tmp_path, run)
    assert [event.type for event in events if event.type != "progress"] == ["started", "finished"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    runs.events_of(tmp_path, runs.config(training={"steps": 1}))
    run = runs.config(model=runs.SHAPE | {"num_layers": 1}, resume="checkpoints/step-00000001")
    with pytest.raises(BadCheckpoint, match=r"model\.layers\.1\."):
        runs.events_of(tmp_path, run)


def test_a_checkpoint_with_a_damaged_index_is_refused_by_its_manifest(tmp_path, signals):
    runs.events_of(tmp_path, runs.config(training={"steps": 1}))
    runs.write(tmp_path, runs.config(training={"steps": 2}, resume="checkpoints/step-00000001"))
    index = tmp_path / "checkpoints" / "step-00000001" / "index.json"
    index.write_bytes(index.read_bytes()[:100])
    assert failed(tmp_path).message.startswith("checkpoint step-00000001: index.json has 100 bytes where")


# ---- Told to stop ----


def stop_on_rank_1(run_dir, run):
    wish = StopWish()
    seen = []

    def emit(event):
        seen.append(event)
        if event.type == "step" and event.step == 3 and int(os.environ["RANK"]) == 1:
            wish.wanted = True

    trainer.train(run, run_dir, emit, wish)
    told = [event for event in seen if event.type in ("checkpoint", "stopped")]
    return [(event.type, event.step) for event in told][-2:]


def test_when_one_rank_is_told_to_stop_all_end_after_the_same_step(world2, tmp_path):
    run = runs.config(parallel={"tensor": 2})
    runs.write(tmp_path, run)
    ended = [("checkpoint", 3), ("stopped", 3)]
    assert world2.run(stop_on_rank_1, tmp_path, run) == [ended, ended]
    assert not (tmp_path / "export").exists()


@pytest.fixture
def signals():
    """Handlers as they were, after a test that let the trainer set its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("module", "where"),
    [(makings, "tokenizer_for"), (makings, "prepare"), (trainer, "ready_model"), (trainer, "export")],
    ids=lambda where: where if isinstance(where, str) else "",
)
def test_sigterm_outside_the_steps_ends_the_run_at_once(tmp_path, monkeypatch, signals, module, where):
    runs.write(tmp_path, runs.config(training={"steps": 2}))
    monkeypatch.setattr(module, where, lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    assert rank.main(tmp_path / "run.json") == 0
    step = 2 if where == "export" else 0
    assert (last_event(tmp_path / "events.jsonl").type, last_event(tmp_path / "events.jsonl").step) == ("stopped", step)
    assert (tmp_path / "checkpoints").exists() == (step > 0)


def test_a_resumed_run_stopped_early_names_the_step_it_can_go_on_from(tmp_path, monkeypatch, signals):
    runs.events_of(tmp_path, runs.config(training={"steps": 2}))
    runs.write(tmp_path, runs.config(training={"steps": 4}, resume="checkpoints/step-00000002"))
    monkeypatch.setattr(makings, "prepare", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    assert rank.main(tmp_path / "run.json") == 0
    assert last_event(tmp_path / "events.jsonl").step == 2


def test_a_rank_told_to_stop_again_while_it_says_so_ends_all_the_same(tmp_path, monkeypatch, signals):
    in_words = rank.in_words

    def told_again(event):
        if event.type == "stopped":
            os.kill(os.getpid(), signal.SIGINT)
        return in_words(event)

    runs.write(tmp_path, runs.config(training={"steps": 2}))
    monkeypatch.setattr(makings, "prepare", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(rank, "in_words", told_again)
    assert rank.main(tmp_path / "run.json") == 0
    assert last_event(tmp_path / "events.jsonl").type == "stopped"


# ---- Failures ----


def failed(run_dir):
    assert rank.main(run_dir / "run.json") == 1
    return last_event(run_dir / "events.jsonl")


def test_a_loss_that_is_not_finite_fails_naming_the_step(tmp_path, signals):
    runs.write(tmp_path, runs.config(training={"lr": 1e30, "warmup": 0, "clip": None, "weight_decay": 0}))
    event = failed(tmp_path)
    assert event.code == "non_finite_loss"
    assert event.message.endswith(
        " is nan at step 2; each of its 4 rows gives it, so it is the weights and not the data"
    )
    assert "training.lr" in event.hint


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_weights_that_a_validation_finds_broken_fail_the_run_naming_them(tmp_path, signals, policy):
    broken = {"steps": 1, "lr": 1e38, "warmup": 0, "clip": None, "non_finite": policy}
    runs.write(tmp_path, runs.config(training=broken, data={"validation": 0.2}))
    event = failed(tmp_path)
    assert event.code == "non_finite_loss"
    said = r"the validation loss is nan at step 1; each of its \d+ rows gives it, so it is the weights and not the data"
    assert re.fullmatch(said, event.message)
    assert "training.lr" in event.hint


def test_a_data_file_that_is_not_there_fails_naming_it(tmp_path, signals):
    runs.write(tmp_path, runs.config())
    (tmp_path / "data" / "train.txt").unlink()
    event = failed(tmp_path)
    assert (event.code, event.message) == ("invalid_data", "there is no file data/train.txt")


def test_bad_data_fails_with_its_line(tmp_path, signals):
    runs.write(tmp_path, runs.config(**runs.COMPLETION))
    with (tmp_path / "data" / "train.jsonl").open("a") as file:
        file.write('{"prompt": "a"\n')
    event = failed(tmp_path)
    assert event.code == "invalid_data"
    assert "line 10" in event.message


def test_a_vocabulary_smaller_than_the_tokenizers_fails_with_what_would_fit(tmp_path, signals):
    runs.write(tmp_path, runs.config(model=runs.SHAPE | {"vocab_size": 200}))
    event = failed(tmp_path)
    assert event.code == "invalid_model"
    assert "260 entries" in event.message


def test_a_run_file_that_says_something_unknown_fails_naming_it(tmp_path, signals):
    (tmp_path / "run.json").write_text('{"modell": 1}')
    event = failed(tmp_path)
    assert event.code == "invalid_model"
    assert "modell" in event.message


@pytest.mark.parametrize("fraction", [-0.1, 0, 1, 5])
def test_a_fraction_that_holds_out_nothing_or_everything_is_refused(fraction):
    with pytest.raises(ValueError, match=r"data\.validation\n.*must lie between 0 and 1"):
        runs.config(data={"validation": fraction})


@pytest.mark.parametrize(
    ("error", "code"),
    [
        pytest.param(OSError(28, "No space left on device"), "disk_full", id="disk"),
        pytest.param(RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out_of_memory", id="host-memory"),
        pytest.param(torch.OutOfMemoryError("CUDA out of memory."), "out_of_memory", id="device-memory"),
        pytest.param(KeyError("x"), "internal", id="a-bug"),
    ],
)
def test_what_goes_wrong_in_a_step_has_its_code(tmp_path, monkeypatch, signals, error, code):
    def fails(*_, **__):
        raise error

    runs.write(tmp_path, runs.config(training={"checkpoint_every": 1}))
    monkeypatch.setattr(*((tensorfile, "write") if code == "disk_full" else (Decoder, "run")), fails)
    assert failed(tmp_path).code == code
    assert list((tmp_path / "checkpoints").glob("*") if code == "disk_full" else []) == []
