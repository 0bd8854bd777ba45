"""Answers to validation prompts during a run: those that `transformers` gives, in layouts that can give any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from engine.config import RunConfig
from engine.tokenizer import Tokenizer
from tests.engine.train import runs
from tests.worlds import World

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor": {"tensor": 2},
    "tensor-sequence": {"tensor": 2, "sequence": True},
    "context": {"context": 2},
    "data-weights": {"data": 2, "shard_weights": True},
}


def config(**changes: Any) -> RunConfig:
    data = runs.COMPLETION["data"] | {"validation": "data/held-out.jsonl", "packing": False}
    training = {"steps": 20, "lr": 0.01, "eval_every": 10, "samples": 2} | changes.pop("training", {})
    return runs.config(**runs.COMPLETION | {"data": data | changes.pop("data", {})}, training=training, **changes)


def told(folder: Path, run: RunConfig) -> list[Any]:
    runs.write(folder, run)
    lines = [{"prompt": f"{n} and {n}?", "completion": " yes" * n} for n in range(1, 4)]
    (folder / "data" / "held-out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [event for event in runs.events_of(folder, run) if event.type in ("evaluated", "samples")]


def by_transformers(folder: Path, prompt: str) -> str:
    """The greedy continuation by the exported model, as long as its positions last."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "export" / "model", dtype=torch.float32)
    tokenizer = Tokenizer.load(folder / "export" / "model")
    ids = tokenizer.prompt(prompt)
    end = list(tokenizer.stop_ids)
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        do_sample=False,
        max_length=model.config.max_position_embeddings,
        eos_token_id=end,
        pad_token_id=end[0],
    )
    return tokenizer.decode([id_ for id_ in out[0, len(ids) :].tolist() if id_ not in end])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_answers_the_users_own_prompts_as_transformers_would(
    world2: World, tmp_path: Path, layout: str
) -> None:
    run = config(parallel=LAYOUTS[layout])
    seen = told(tmp_path, run) if run.parallel.ranks == 1 else world2.run(told, tmp_path, run)[0]
    assert [(event.type, event.step) for event in seen] == [
        ("evaluated", 10), ("samples", 10), ("evaluated", 20), ("samples", 20),
    ]  # fmt: skip
    last = seen[-1].samples
    assert [(each.file, each.line) for each in last] == [("data/held-out.jsonl", 1), ("data/held-out.jsonl", 2)]
    assert [each.expected for each in last] == [" yes", " yes yes"]
    for number, each in enumerate(last, start=1):
        assert each.prompt.endswith(f"{number} and {number}?")
        assert each.text == by_transformers(tmp_path, f"{number} and {number}?")
        assert each.text


def test_a_text_is_continued_from_its_beginning(tmp_path: Path) -> None:
    run = runs.config(training={"steps": 1, "samples": 1}, data={"validation": 0.2})
    runs.write(tmp_path, run)
    (sampled,) = [event.samples for event in runs.events_of(tmp_path, run) if event.type == "samples"]
    (each,) = sampled
    text = (tmp_path / "data" / "train.txt").read_text()
    assert len(each.prompt) >= 10
    assert each.prompt.removeprefix("<s>") + each.expected in text


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"data": {"validation": None}}, "data.validation"), ({"parallel": {"pipeline": 2}}, "parallel.pipeline")],
    ids=["nothing held out", "a pipeline"],
)
def test_what_gives_no_answers_is_refused_in_words(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=rf"training.samples.*{word}"):
        config(**changes)
