"""Means are over all labels, however they are cut into rows and micro-batches; `transformers` says what they are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from engine.config import RunConfig
from engine.data.rows import Rows
from engine.mesh import alone
from engine.progress import Reporter
from engine.stop import StopWish
from engine.trainer import Work, ready_data, ready_model
from tests.engine.train import runs

FIRST_AVERAGE = 0.1
"""After one step Adam's first moment is the gradient times this: 1 less the first beta, which is 0.9."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.base_in(tmp_path_factory.mktemp("base"))


def config(base: Path, **changes: Any) -> RunConfig:
    data = runs.COMPLETION["data"] | {"packing": False} | changes.pop("data", {})
    training = {"steps": 1, "clip": None, "weight_decay": 0} | changes.pop("training", {})
    of_base = {"model": None, "base": str(base), "tokenizer": {"type": "base"}}
    return runs.config(**runs.COMPLETION | of_base | {"data": data}, training=training, **changes)


@dataclass(frozen=True)
class Stepped:
    """What one step says, its rows and its gradient."""

    loss: float
    norm: float
    rows: list[int]
    gradient: dict[str, Tensor]
    of: Rows


def stepped(folder: Path, run: RunConfig) -> Stepped:
    mesh, steps = alone(torch.device("cpu")), []
    tokenizer, prepared = ready_data(run, folder, mesh, Reporter(lambda event: None, mesh.stopwatch.whereabouts))
    decoder = ready_model(run, folder, mesh, tokenizer)
    work = Work(run, folder, mesh, steps.append, StopWish(), tokenizer, prepared, decoder)
    assert work.all_steps()
    (step,) = [event for event in steps if event.type == "step"]
    gradient = {piece.parameter: piece.tensors["average"] / FIRST_AVERAGE for piece in work.optimizer.pieces()}
    return Stepped(step.loss, step.grad_norm, list(work.loader.order(0)), gradient, prepared.train)


def by_transformers(base: Path, of: Rows, rows: list[int]) -> tuple[float, int, dict[str, Tensor]]:
    """Mean loss over all labels of the rows, how many there are, and the gradient."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    losses, count = [], 0
    for number in rows:
        row = of.row(number)
        ids, trained = torch.from_numpy(row.tokens[: row.filled]), torch.from_numpy(row.trained[: row.filled])
        labels = ids.where(trained, torch.tensor(-100))[1:]
        losses.append(cross_entropy(model(ids[None, :-1]).logits[0], labels, reduction="sum"))
        count += int((labels != -100).sum())
    mean = torch.stack(losses).sum() / count
    mean.backward()
    return mean.item(), count, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("rows", "micro_batch"),
    [(4, 1), (4, 4), (3, 2)],
    ids=["4 x 1", "1 x 4", "2 and 1, where 4 were asked for"],
)
def test_a_step_has_the_gradient_of_the_mean_over_all_its_labels_however_it_is_cut(
    base: Path, tmp_path: Path, rows: int, micro_batch: int
) -> None:
    run = config(base, training={"micro_batch": micro_batch})
    runs.write(tmp_path, run)
    # Answers of one to four words: a mean of means would weigh the short ones more.
    lines = [{"prompt": f"{n}?", "completion": " yes" * (n + 1)} for n in range(rows)]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ours = stepped(tmp_path, run)
    assert sorted(ours.rows) == list(range(rows))
    loss, _, gradient = by_transformers(base, ours.of, ours.rows)
    assert ours.loss == pytest.approx(loss, rel=1e-5)
    assert ours.norm == pytest.approx(sum(float(g.square().sum()) for g in gradient.values()) ** 0.5, rel=1e-5)
    assert ours.gradient.keys() == gradient.keys()
    for name, expected in gradient.items():
        assert ((ours.gradient[name] - expected).norm() / expected.norm()).item() <= 1e-5, name


@pytest.mark.parametrize(
    ("examples", "micro_batch", "packing"),
    [(1, 4, False), (5, 1, False), (5, 4, True)],
    ids=["one example", "micro-batches of one", "packed, the last micro-batch not full"],
)
def test_the_validation_loss_is_the_mean_over_each_label_held_out(
    base: Path, tmp_path: Path, examples: int, micro_batch: int, packing: bool
) -> None:
    data = {"validation": "data/held-out.jsonl", "packing": packing}
    # A rate of next to nothing, so that the model is the base's.
    run = config(base, data=data, training={"micro_batch": micro_batch, "lr": 1e-30})
    runs.write(tmp_path, run)
    lines = "".join(json.dumps({"prompt": f"{n}?", "completion": " no" * (n + 1)}) + "\n" for n in range(examples))
    (tmp_path / "data" / "held-out.jsonl").write_text(lines)
    (evaluated,) = [event for event in runs.events_of(tmp_path, run) if event.type == "evaluated"]

    (tmp_path / "data" / "train.jsonl").write_text(lines)
    mesh = alone(torch.device("cpu"))
    _, prepared = ready_data(config(base), tmp_path, mesh, Reporter(lambda event: None, mesh.stopwatch.whereabouts))
    loss, count, _ = by_transformers(base, prepared.train, list(range(examples)))
    assert (evaluated.loss, evaluated.tokens) == (pytest.approx(loss, rel=1e-5), count)
    # " no" is three bytes, and the end of the text is a label too.
    assert count == sum(3 * (n + 1) + 1 for n in range(examples))
