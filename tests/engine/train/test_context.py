"""Whole runs in which ranks share the tokens of each row: what one rank tells, and what it goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.config import Parallel, RunConfig
from tests.engine.train import runs
from tests.worlds import World

Told = list[tuple[float, ...]]


def told(run_dir: Path, run: RunConfig) -> Told:
    """Loss and gradient norm of each step; loss, accuracy and labels of each validation."""
    events = runs.events_of(run_dir, run)
    steps = [(event.loss, event.grad_norm) for event in events if event.type == "step"]
    return [*steps, *((e.loss, e.token_accuracy, e.tokens) for e in events if e.type == "evaluated")]


def trained(run_dir: Path) -> dict[str, Tensor]:
    return load_file(run_dir / "export" / "model" / "model.safetensors")


def folder(tmp_path: Path, name: str, run: RunConfig) -> Path:
    (tmp_path / name).mkdir()
    runs.write(tmp_path / name, run)
    return tmp_path / name


def test_four_ranks_give_the_losses_norms_and_validation_of_one(world4: World, tmp_path: Path) -> None:
    # Rows packed with short answers: most labels stand at few places, and some shares have none.
    run = runs.config(
        objective="sft",
        data={"train": ["data/train.jsonl"], "format": "completion", "seq_len": 32, "validation": 0.3},
        training={"micro_batch": 2},
    )
    spread = run.model_copy(update={"parallel": Parallel(context=2, data=2)})
    one, four = folder(tmp_path, "one", run), folder(tmp_path, "four", spread)
    expected = told(one, run)
    for got in world4.run(told, four, spread):
        assert [len(numbers) for numbers in got] == [2] * 10 + [3]
        for numbers, alike in zip(got, expected, strict=True):
            assert numbers == pytest.approx(alike, rel=2e-6)


def test_one_rank_goes_on_bitwise_from_what_two_context_ranks_saved(world2: World, tmp_path: Path) -> None:
    run = runs.config(training={"steps": 3}, parallel={"context": 2})
    world2.run(told, folder(tmp_path, "two", run), run)
    resume = tmp_path / "two" / "checkpoints" / "step-00000003"
    # With nothing left to do, what one rank exports is what it loaded.
    alone = runs.config(training={"steps": 3}, resume=resume)
    told(folder(tmp_path, "one", alone), alone)
    saved, loaded = trained(tmp_path / "two"), trained(tmp_path / "one")
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
