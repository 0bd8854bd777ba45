"""How likely each choice is: what `transformers` finds, in every layout; and how often the likeliest is right."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import RunConfig
from engine.data.questions import Questions
from engine.makings import ready_data, ready_model
from engine.mesh import build
from engine.multiple_choice import answered, log_likelihoods, unanswered
from engine.progress import Reporter
from engine.stop import StopWish
from engine.trainer import PATIENCE, Work
from tests.engine.train import runs
from tests.worlds import World

QUESTIONS: list[dict[str, Any]] = [
    {"question": "The shed is", "choices": ["a", "on the rail", "né"], "answer": 1},
    {"question": "A signal of\n", "choices": ["the shed", "a"], "answer": 0},
    {"question": "switch", "choices": [" on", " train on", " x"], "answer": 0},
    {"question": "This question is far too long for a row", "choices": ["a", "b"], "answer": 0},
    {"messages": [{"role": "user", "content": "a"}], "choices": ["rail", "the", "z", "b c"], "answer": 3},
]
"""The fourth does not fit."""
ASKED = [row for row in QUESTIONS if "far too long" not in row.get("question", "")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.base_in(tmp_path_factory.mktemp("base"))


def config(base: Path, **changes: Any) -> RunConfig:
    of_base = {"model": None, "base": str(base), "tokenizer": {"type": "base"}}
    data = changes.pop("data", {}) | {"evaluation": "data/questions.jsonl"}
    return runs.config(**of_base | changes, data=runs.config().data.model_dump() | data)


def ready(folder: Path, run: RunConfig) -> Path:
    folder.mkdir(exist_ok=True)
    runs.write(folder, run)
    (folder / "data" / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return folder


def found(folder: Path, run: RunConfig) -> list[float]:
    """What this rank, with the others, finds for each choice before anything is trained."""
    mesh = build(run.parallel, run.device, timeout=PATIENCE)
    silent = Reporter(lambda event: None, mesh.stopwatch.whereabouts)
    tokenizer, prepared = ready_data(run, folder, mesh, silent)
    decoder = ready_model(run, folder, mesh, tokenizer)
    work = Work(run, folder, mesh, lambda event: None, StopWish(), tokenizer, prepared, decoder)
    assert prepared.questions is not None
    each: list[float] = log_likelihoods(
        prepared.questions,
        work.passes,
        work._loader(prepared.questions.rows),
        lambda sums: work.passes.over_ranks(sums)[0],
    ).tolist()
    mesh.close()
    return each


def by_transformers(model_dir: Path) -> list[list[float]]:
    """Of each choice of each question that fits, one at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    expected = []
    for row in ASKED:
        own = []
        for choice in row["choices"]:
            if "messages" in row:
                before = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
                text = before + choice
            else:
                # A space between the two, unless there is white space; it belongs to the choice.
                before = row["question"].rstrip()
                text = before + {"The shed is": " ", "A signal of": "\n", "switch": ""}[before] + choice
            prompt, ids = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in (before, text))
            with torch.no_grad():
                log_probs_TV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            places = range(len(prompt), len(ids))
            own.append(sum(log_probs_TV[place - 1, ids[place]].item() for place in places))
        expected.append(own)
    return expected


@pytest.fixture(scope="module")
def expected(base: Path) -> list[list[float]]:
    return by_transformers(base)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "a row each"])
def test_how_likely_a_choice_is_says_transformers(
    tmp_path: Path, base: Path, expected: list[list[float]], packing: bool
) -> None:
    run = config(base, data={"packing": packing})
    each = found(ready(tmp_path, run), run)
    assert each == pytest.approx([value for own in expected for value in own], abs=1e-4)


@pytest.mark.parametrize("layout", [name for name in runs.LAYOUTS if name != "one"])
def test_it_is_as_likely_in_every_layout(
    world2: World, tmp_path: Path, base: Path, expected: list[list[float]], layout: str
) -> None:
    run = config(base, parallel=runs.LAYOUTS[layout])
    for each in world2.run(found, ready(tmp_path, run), run):
        assert each == pytest.approx([value for own in expected for value in own], abs=1e-4)


@pytest.mark.parametrize("kind", ["pretrain", "dpo"])
def test_a_run_is_asked_when_it_is_validated_and_in_the_end(tmp_path: Path, base: Path, kind: str) -> None:
    training = {"steps": 3, "eval_every": 2}
    run = config(base, training=training)
    if kind == "dpo":
        preference = {name: runs.PREFERENCE[name] for name in ("objective", "dpo")}
        data = runs.PREFERENCE["data"] | {"validation": 0.2}
        run = config(base, **preference, data=data, training=training)
    events = runs.events_of(ready(tmp_path, run), run)
    told = [event for event in events if event.type == "choices"]
    assert [event.step for event in told] == [2, 3]
    last = told[-1]
    after = by_transformers(tmp_path / "export" / "model")
    answers = [row["answer"] for row in ASKED]
    right = [int(np.argmax(own)) for own in after]
    normalized = [
        int(np.argmax([value / len(choice) for value, choice in zip(own, row["choices"], strict=True)]))
        for own, row in zip(after, ASKED, strict=True)
    ]
    assert last.correct == sum(said == answer for said, answer in zip(right, answers, strict=True))
    assert last.correct_normalized == sum(said == answer for said, answer in zip(normalized, answers, strict=True))
    assert (last.questions, last.left_out) == (4, 1)
    assert last.accuracy == last.correct / 4
    warnings = [event.message for event in events if event.type == "log" and event.level == "warning"]
    assert [said for said in warnings if "multiple-choice" in said] == [
        "1 of 5 multiple-choice examples left out: longer than data.seq_len=32: line 4 (41 tokens)"
    ]


def questions(*asked: tuple[list[str], int]) -> Questions:
    """Without rows: what was found is given."""
    bounds = np.cumsum([0, *(len(choices) for choices, _ in asked)])
    return Questions(
        rows=None,  # type: ignore[arg-type]
        choices_N=np.arange(bounds[-1]),
        bounds=bounds,
        answers_Q=np.array([answer for _, answer in asked]),
        characters_C=np.array([len(choice) for choices, _ in asked for choice in choices]),
        lines_Q=np.arange(1, len(asked) + 1),
        left_out=0,
    )


def test_accuracy_goes_by_the_sum_and_its_normalized_form_by_the_character() -> None:
    """As lm-evaluation-harness defines acc and acc_norm; by hand, -3 of 2 characters is -1.5, and -4 of 6 is -0.67."""
    asked = questions((["no", "sure!!"], 1), (["no", "sure!!"], 0), (["no", "sure!!"], 1), (["ééé", "abcdef"], 0))
    each = np.array([-3.0, -4.0, -3.0, -4.0, -3.0, -2.0, -3.0, -5.0])
    # The sums say no, no, sure!!, ééé. A character of sure!! is likelier each time; of the last two ééé has -1, not a
    # byte's -0.5, and abcdef -0.83.
    told = answered(asked, each, step=7)
    assert (told.step, told.questions) == (7, 4)
    assert (told.correct, told.accuracy) == (3, 0.75)
    assert (told.correct_normalized, told.accuracy_normalized) == (2, 0.5)


def test_of_equals_the_first_counts_and_what_is_no_number_is_wrong() -> None:
    asked = questions((["a", "b"], 0), (["a", "b"], 1), (["a", "b"], 0), (["a", "b"], 1))
    each = np.array([-1.0, -1.0, -1.0, -1.0, nan, -1.0, -inf, -1.0])
    assert answered(asked, each, step=1).correct == 1
    assert unanswered(asked, each) == [3, 4]
