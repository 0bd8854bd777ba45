"""The step with the lowest validation loss: kept, exported where asked; and runs that end once the loss rests."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load_file

from engine.config import RunConfig
from engine.course import Course
from tests.engine.train import runs

BEST = 6
"""After so many steps the loss on answers that training never gives is lowest; from then on it rises."""
PATIENCE = 3
"""Validations, which are two steps apart."""
PATIENCE_SECONDS = 120.0


def config(**changes: Any) -> RunConfig:
    # A larger epsilon, so that layouts do not differ in the last digit of gradients that all but cancel.
    training = {
        "lr": 0.01,
        "eps": 1e-6,
        "warmup": 0,
        "schedule": "constant",
        "steps": 20,
        "eval_every": 2,
        "keep_checkpoints": 1,
    }
    data = runs.COMPLETION["data"] | {"validation": "data/held-out.jsonl"}
    return runs.config(**runs.COMPLETION | {"data": data}, training=training | changes.pop("training", {}), **changes)


def ready(folder: Path, run: RunConfig) -> Path:
    folder.mkdir()
    runs.write(folder, run)
    lines = [{"prompt": f"{n} and {n}?", "completion": " no" * (n % 4 + 1)} for n in range(9)]
    (folder / "data" / "held-out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def events(folder: Path, run: RunConfig) -> list[Any]:
    return list(runs.events_of(ready(folder, run), run))


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in (folder / "checkpoints").glob("step-*"))


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    with safe_open(folder / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors", framework="pt") as file:
        return {name.split("/")[1]: file.get_tensor(name) for name in file.keys() if name.startswith("weight/")}  # noqa: SIM118


def check_export(folder: Path, step: int) -> None:
    exported, saved = load_file(folder / "export" / "model" / "model.safetensors"), weights(folder, step)
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())
    assert json.loads((folder / "export" / "manifest.json").read_text())["step"] == step


def test_a_loss_counts_as_lower_only_below_the_mark_by_more_than_the_least_difference() -> None:
    """By hand: 0.95 and 0.9 lie within 0.1 of 1.0, 0.85 does not; the lowest of all is another matter."""
    course, seen = Course(), []
    for step, loss in enumerate([1.0, 0.95, 0.9, 0.85, 0.9, 0.84], start=1):
        course = course.after(step, loss, min_delta=0.1)
        seen.append((course.best_step, course.mark, course.waited))
    assert seen == [(1, 1.0, 0), (2, 1.0, 1), (3, 1.0, 2), (4, 0.85, 0), (4, 0.85, 1), (6, 0.85, 2)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A run that stops early and exports its best step."""
    run = config(
        training={"keep_best": True, "early_stopping": {"patience": PATIENCE}, "checkpoint_every": 2},
        export={"checkpoint": "best"},
    )
    folder = tmp_path_factory.mktemp("best") / "run"
    return folder, events(folder, run)


def test_the_best_checkpoint_outlives_newer_ones_and_is_exported(whole: tuple[Path, list[Any]]) -> None:
    folder, told = whole
    evaluated = {event.step: event.loss for event in told if event.type == "evaluated"}
    assert min(evaluated, key=evaluated.__getitem__) == BEST
    assert [event.step for event in told if event.type == "evaluated" and event.is_best] == [2, 4, BEST]
    assert [event.best_step for event in told if event.type == "checkpoint"] == [2, 4, 6, 6, 6, 6]
    assert checkpoints(folder) == [BEST, BEST + 2 * PATIENCE]
    check_export(folder, BEST)


def test_a_run_ends_once_the_loss_has_rested_for_as_long_as_it_has_patience(whole: tuple[Path, list[Any]]) -> None:
    _, told = whole
    last = told[-1]
    assert (last.type, last.step, last.stopped_early) == ("finished", BEST + 2 * PATIENCE, True)
    assert last.exported_step == BEST
    (said,) = [event.message for event in told if event.type == "log"]
    assert said.startswith(f"stopping early after step {last.step}: the last 3 validation losses were not lower than ")


def test_a_run_that_took_all_its_steps_did_not_stop_early_whatever_its_loss_did(tmp_path: Path) -> None:
    told = events(
        tmp_path / "run",
        config(training={"early_stopping": {"patience": PATIENCE}, "steps": BEST + 2 * PATIENCE}),
    )
    assert (told[-1].step, told[-1].stopped_early) == (BEST + 2 * PATIENCE, False)
    assert not [event.message for event in told if event.type == "log"]


def test_unasked_the_last_step_is_exported_and_the_best_is_removed_like_others(tmp_path: Path) -> None:
    told = events(tmp_path / "run", config(training={"checkpoint_every": 2, "steps": 10}))
    assert checkpoints(tmp_path / "run") == [10]
    assert (told[-1].stopped_early, told[-1].exported_step) == (False, 10)
    check_export(tmp_path / "run", 10)


TRAIN = """
import sys
from pathlib import Path
import torch
from engine.config import RunConfig
from engine.emit import Emitter
from engine.stop import StopWish
from engine.trainer import train
torch.set_num_threads(1)
folder = Path(sys.argv[1])
run = RunConfig.model_validate_json((folder / "run.json").read_text())
with Emitter(folder / "events.jsonl") as emitter:
    train(run, folder, emitter.emit, StopWish())
"""


def test_best_step_and_patience_outlive_a_kill(whole: tuple[Path, list[Any]], tmp_path: Path) -> None:
    straight, told = whole
    run = RunConfig.model_validate_json((straight / "run.json").read_text())
    folder = ready(tmp_path / "run", run)
    child = subprocess.Popen([sys.executable, "-c", TRAIN, str(folder)])
    try:
        seen = followed(folder / "events.jsonl", child)
        next(event for event in seen if event["type"] == "checkpoint" and event["step"] == BEST + 2)
    finally:
        child.kill()
        ended = child.wait(60)
    assert ended == -signal.SIGKILL
    first, *_, newest = checkpoints(folder)
    assert (first, newest > BEST) == (BEST, True)

    rest = runs.events_of(folder, run.model_copy(update={"resume": Path("checkpoints") / f"step-{newest:08d}"}))
    assert rest[-1].model_dump(exclude={"time", "seq"}) == told[-1].model_dump(exclude={"time", "seq"})
    assert [event.loss for event in rest if event.type == "evaluated"] == [
        event.loss for event in told if event.type == "evaluated" and event.step > newest
    ]
    check_export(folder, BEST)


def followed(path: Path, child: subprocess.Popen[bytes]) -> Any:
    """The events in a file that a process writes, as they come."""
    latest = monotonic() + PATIENCE_SECONDS
    while not path.exists():
        assert child.poll() is None, "it ended first"
        assert monotonic() < latest, "it writes nothing"
    line = ""
    with path.open() as file:
        while True:
            line += file.readline()
            if line.endswith("\n"):
                yield json.loads(line)
                line = ""
            else:
                assert child.poll() is None, "it ended first"
                assert monotonic() < latest, "what was waited for does not come"


def test_a_best_checkpoint_that_is_gone_is_told_and_the_last_step_exported(tmp_path: Path) -> None:
    run = config(training={"keep_best": True, "checkpoint_every": 2, "steps": 10}, export={"checkpoint": "best"})
    folder = ready(tmp_path / "run", run)
    runs.events_of(folder, run)
    for file in (folder / "checkpoints" / f"step-{BEST:08d}").rglob("*"):
        if file.is_file():
            file.unlink()
    (folder / "checkpoints" / f"step-{BEST:08d}" / "tokenizer").rmdir()
    (folder / "checkpoints" / f"step-{BEST:08d}").rmdir()
    again = runs.events_of(folder, run.model_copy(update={"resume": Path("checkpoints/step-00000010")}))
    assert [event.message for event in again if event.type == "log"] == [
        f"the checkpoint of the best step, {BEST}, is not there; the last step's weights are exported"
    ]
    check_export(folder, 10)


def on_ranks(folder: Path, run: RunConfig) -> list[Any]:
    return runs.events_of(folder, run)


def test_two_ranks_stop_at_the_step_of_one_and_export_its_weights(
    world2: Any, whole: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    straight, told = whole
    run = RunConfig.model_validate_json((straight / "run.json").read_text())
    run = run.model_copy(update={"parallel": runs.config(parallel={"tensor": 2, "sequence": True}).parallel})
    folder = ready(tmp_path / "run", run)
    first, second = world2.run(on_ranks, folder, run)
    for events_ in (first, second):
        assert (events_[-1].step, events_[-1].exported_step) == (told[-1].step, told[-1].exported_step)
    ours, theirs = (load_file(path / "export" / "model" / "model.safetensors") for path in (folder, straight))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        pytest.param({"training": {"keep_best": True, "eval_every": None}}, "training.eval_every", id="no validations"),
        pytest.param(
            {"training": {"early_stopping": {"patience": 1}}, "data": {"validation": None}}, "data.validation",
            id="nothing held out",
        ),
        pytest.param({"export": {"checkpoint": "best"}}, "training.keep_best", id="nothing kept"),
    ],
)  # fmt: skip
def test_what_goes_by_a_validation_loss_is_refused_without_one(changes: dict[str, Any], lacking: str) -> None:
    given: dict[str, Any] = {"training": {"eval_every": 1}, "data": {"validation": 0.1}}
    with pytest.raises(ValidationError, match=lacking):
        runs.config(**{name: given.get(name, {}) | changes.get(name, {}) for name in given | changes})
