"""Whole DPO runs: what they start from, what they tell, what they learn, and how they go on. The loss is `net`'s."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import reference
from engine.config import RunConfig
from engine.data.prepare import open_prepared
from engine.failure import RunFailure
from engine.tokenizer import Tokenizer
from tests.engine.train import runs

ADAPTED = pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.base_in(tmp_path_factory.mktemp("base"))


def config(base: Path, **changes: Any) -> RunConfig:
    training = {"lr": 3e-3, "steps": 8, "schedule": "constant"} | changes.pop("training", {})
    data = runs.PREFERENCE["data"] | {"validation": 0.2}
    return runs.config(
        **runs.PREFERENCE | {"data": data},
        model=None,
        base=str(base),
        tokenizer={"type": "base"},
        training=training,
        **changes,
    )


@ADAPTED
def test_a_run_begins_without_a_preference_and_learns_one(base: Path, tmp_path: Path, lora: Any) -> None:
    events = runs.events_of(tmp_path, config(base, lora=lora, training={"eval_every": 4}))
    steps = [event for event in events if event.type == "step"]
    first, last = steps[0], steps[-1]
    assert first.loss == pytest.approx(math.log(2), rel=1e-6)
    assert (first.rewards_chosen, first.rewards_rejected) == pytest.approx((0, 0), abs=1e-5)
    assert last.loss < 0.5
    assert last.reward_accuracy == 1
    assert last.reward_margin == pytest.approx(last.rewards_chosen - last.rewards_rejected)
    assert last.reward_margin > 0.5
    evaluated = [event for event in events if event.type == "evaluated"]
    assert [event.step for event in evaluated] == [4, 8]
    assert evaluated[1].reward_margin > evaluated[0].reward_margin > 0
    assert events[-1].type == "finished"


def test_each_answer_is_compared_with_what_the_base_says_of_it(base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = config(base, training={"steps": 1})
    runs.events_of(tmp_path, run)
    kept = json.loads((tmp_path / "prepared" / reference.FILE).read_text())
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = Tokenizer.load(base)
    expected = {}
    for number, line in enumerate((tmp_path / "data" / "pairs.jsonl").read_text().splitlines(), start=1):
        pair = json.loads(line)
        for which in ("chosen", "rejected"):
            prompt, said = tokenizer.prompt(pair["prompt"]), tokenizer.encode(pair[which], follows=True)
            ids = torch.tensor(prompt + said + [tokenizer.eos_id])
            with torch.no_grad():
                log_probs = model(ids[None]).logits[0].log_softmax(-1)
            each_T1 = log_probs[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])
            expected[number, which] = each_T1.sum().item()
    found = {}
    prepared = open_prepared(tmp_path)
    for part, rows in {"train": prepared.train, "validation": prepared.validation}.items():
        assert rows is not None
        log_probs = iter(kept[part]["log_probs"])
        for row in range(len(rows)):
            for place, (_, number) in enumerate(rows.origins(row)):
                found[number, ("chosen", "rejected")[place % 2]] = next(log_probs)
    assert found == pytest.approx(expected, rel=1e-5)


@ADAPTED
def test_a_run_that_goes_on_compares_with_the_same_model_and_ends_bitwise_alike(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: Any
) -> None:
    for name in ("whole", "again"):
        (tmp_path / name).mkdir()
    run = config(base, lora=lora, training={"checkpoint_every": 4})
    whole = runs.events_of(tmp_path / "whole", run)

    def twice(*_: Any) -> None:
        raise AssertionError("the checkpoint has what was found")

    monkeypatch.setattr(reference, "compute", twice)
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-00000004"
    again = runs.events_of(tmp_path / "again", run.model_copy(update={"resume": checkpoint}))
    assert runs.losses(again) == runs.losses(whole)[4:]
    files = [folder / "export" / "model" / "model.safetensors" for folder in (tmp_path / "whole", tmp_path / "again")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_other_pairs_than_those_of_the_checkpoint_are_compared_anew(base: Path, tmp_path: Path) -> None:
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    run = config(base, training={"steps": 2})
    runs.events_of(tmp_path / "before", run)
    resume = tmp_path / "before" / "checkpoints" / "step-00000002"
    longer = config(base, training={"steps": 4}, resume=str(resume))
    runs.write(tmp_path / "after", longer)
    lines = (tmp_path / "after" / "data" / "pairs.jsonl").read_text().splitlines()
    (tmp_path / "after" / "data" / "pairs.jsonl").write_text("\n".join(lines[:7]) + "\n")
    runs.events_of(tmp_path / "after", longer)
    before, after = (
        json.loads((tmp_path / name / "prepared" / reference.FILE).read_text()) for name in ("before", "after")
    )
    found, known = ({n for part in held.values() for n in part["log_probs"]} for held in (after, before))
    assert len(found) == 14
    # By the base, and not by what two steps have made of it.
    assert all(any(here == pytest.approx(there, rel=1e-6) for there in known) for here in found)


def test_a_base_that_gives_an_answer_no_probability_is_refused_naming_a_line(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    # A number that a file may have, and whose logits no number has.
    weights["model.norm.weight"].fill_(torch.finfo(weights["model.norm.weight"].dtype).max)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunFailure, match=r"answers is not finite, such as of one in line \d"):
        runs.events_of(tmp_path, config(folder))
