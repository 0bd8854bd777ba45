"""Training documents that are learned worse than others: their loss is what `transformers` finds, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from engine.config import RunConfig
from engine.data.prepare import open_prepared
from tests.engine.train import runs
from tests.worlds import World

FILES = ("data/train.jsonl", "data/more.jsonl")
STRANGE = (FILES[1], 3)
"""File and line of the one answer that is unlike the others."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says yes."""
    folder = tmp_path_factory.mktemp("base")
    runs.events_of(folder, runs.config(**runs.COMPLETION, training={"steps": 20, "lr": 0.01}))
    return folder / "export" / "model"


def config(base: Path, **changes: Any) -> RunConfig:
    """One pass over the documents at a rate of next to nothing, so that the model is the base's."""
    of_base = {"model": None, "base": str(base), "tokenizer": {"type": "base"}}
    data = runs.COMPLETION["data"] | {"train": FILES}
    training = {"steps": None, "epochs": 1, "lr": 1e-30, "outliers": 3} | changes.pop("training", {})
    return runs.config(**runs.COMPLETION | of_base | {"data": data}, training=training, **changes)


def ready(folder: Path, run: RunConfig) -> Path:
    folder.mkdir()
    runs.write(folder, run)
    answers = {FILES[0]: " yes", FILES[1]: " yes yes"}
    for name, answer in answers.items():
        lines = [{"prompt": f"{n}?", "completion": answer} for n in range(1, 6)]
        if name == STRANGE[0]:
            lines[STRANGE[1] - 1]["completion"] = " #Zq#"
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def by_transformers(folder: Path, base: Path) -> dict[tuple[str, int], float]:
    """Mean loss of each document's labels, by file and line; a packed row's documents one at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    rows = open_prepared(folder).train
    found = {}
    for number in range(len(rows)):
        row = rows.row(number)
        for document, (file, line) in enumerate(rows.origins(number)):
            here = row.documents == document
            ids, trained = torch.from_numpy(row.tokens[here]), torch.from_numpy(row.trained[here])
            labels = ids.where(trained, torch.tensor(-100))[1:]
            with torch.no_grad():
                found[FILES[file], line] = cross_entropy(model(ids[None, :-1]).logits[0], labels).item()
    return found


def told(folder: Path, run: RunConfig) -> list[Any]:
    return [event for event in runs.events_of(folder, run) if event.type in ("outliers", "step")]


@pytest.mark.parametrize("layout", runs.LAYOUTS)
def test_a_document_unlike_the_others_is_named_with_its_loss(
    world2: World, tmp_path: Path, base: Path, layout: str
) -> None:
    run = config(base, parallel=runs.LAYOUTS[layout])
    folder = ready(tmp_path / "run", run)
    seen = told(folder, run) if run.parallel.ranks == 1 else world2.run(told, folder, run)[0]
    (event,) = [event for event in seen if event.type == "outliers"]
    steps = {event.step: event.loss for event in seen if event.type == "step"}
    expected = by_transformers(folder, base)
    assert len(expected) == 10
    assert (event.step, event.since_step) == (max(steps), 1)
    assert (event.documents[0].file, event.documents[0].line) == STRANGE
    assert 1 <= len(event.documents) <= 3
    for each in event.documents:
        assert each.loss == pytest.approx(expected[each.file, each.line], rel=1e-5)
        assert each.step_loss == pytest.approx(steps[each.step], rel=1e-6)
    above = [each.loss - each.step_loss for each in event.documents]
    assert above == sorted(above, reverse=True)
    assert min(above) > 0


def test_it_counts_what_the_last_step_found(tmp_path: Path, base: Path) -> None:
    """Trained on alone for long, the strange document is learned, and the last steps say so."""
    run = config(base, training={"epochs": None, "steps": 60, "lr": 0.02, "outliers": 10})
    seen = told(ready(tmp_path / "run", run), run)
    last = {event.step: event.loss for event in seen if event.type == "step"}
    (event,) = [event for event in seen if event.type == "outliers"]
    assert all(each.step > 57 for each in event.documents)
    assert all(each.step_loss == pytest.approx(last[each.step], rel=1e-6) for each in event.documents)
    assert max(each.loss for each in event.documents) < 0.5 * seen[0].loss


def test_none_is_named_where_none_is_asked_for(tmp_path: Path, base: Path) -> None:
    run = config(base, training={"outliers": 0})
    assert {event.type for event in told(ready(tmp_path / "run", run), run)} == {"step"}


def test_of_stretches_of_a_text_none_is_named_and_of_a_long_document_the_worst_one(tmp_path: Path) -> None:
    run = runs.config(
        data={"train": ("data/train.txt", "data/more.jsonl"), "format": "text", "seq_len": 16},
        training={"steps": 12, "lr": 0.01, "outliers": 5},
    )
    folder = tmp_path / "run"
    folder.mkdir()
    runs.write(folder, run)
    (folder / "data" / "train.txt").write_text("abcd " * 60 + "#Zq# " * 20)
    documents = ["efgh " * 8, "#Xw# " * 8, "ij"]
    (folder / "data" / "more.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    named = [event for event in runs.events_of(folder, run) if event.type == "outliers"]
    places = [(document.file, document.line) for event in named for document in event.documents]
    assert len(places) == len(set(places)) > 0
    assert {file for file, _ in places} == {"data/more.jsonl"}
