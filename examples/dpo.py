"""Teach SmolLM2-135M by pairs of answers (DPO) to show its work and drop the chatter, and watch the reward margin grow.

Of each pair from examples/word_problems.py the worked answer is the better one. The reward of an answer is `beta` times
how much likelier the model finds it than its base does, so that the margin of a pair is 0 before the first step.
--data pairs.jsonl trains on pairs of yours, a twentieth of which is held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import word_problems
from scene import Scene, parser, scene
from service import Failed
from showing import as_script, console, fetch, quote, run, seconds, series

NAME = "dpo"
SEQ_LEN = 512
TRAINED, HELD_OUT = 96, 16
SHARE = 0.05
"""Of the pairs in a file of yours, what is held out."""
LOOKS = 4
"""Validations in a run."""
ANSWER_TOKENS = 120


@dataclass(frozen=True)
class Preferred:
    """What the example found, of the pairs held out."""

    margins: list[float]
    """How much more the better answers are rewarded than the worse ones, at each validation."""
    accuracy: float
    """Share of the pairs in which the better answer has the higher reward, at the end."""
    seconds: float
    """That the job took."""


def main(arguments: Sequence[str] | None = None) -> Preferred:
    made = parser(__doc__, steps=24, short_steps=4)
    made.add_argument("--data", type=Path, help="preference pairs (default: word problems of our own)")
    told = made.parse_args(arguments)
    with scene(NAME, told) as there:
        return prefer(there, told.data)


def prefer(there: Scene, data: Path | None) -> Preferred:
    client = there.client
    if data is not None:
        files: dict[str, Any] = {"train": [there.send(data)], "validation": SHARE}
    else:
        files = {
            "train": [there.upload("pairs.jsonl", word_problems.pairs(there.share(TRAINED), seed=1))],
            "validation": there.upload("held-out.jsonl", word_problems.pairs(there.share(HELD_OUT), seed=2)),
        }
    job = run(client, spec(there, files))
    margins = series(client, job, "validation_reward_margin")
    (*_, accuracy) = series(client, job, "validation_reward_accuracy")
    trained = series(client, job, "reward_margin")
    console.print(f"reward margin, step by step: {line_of(trained)}", soft_wrap=True)
    console.print(f"the same of pairs held out:  {line_of(margins)}", soft_wrap=True)
    if not 0 < margins[0] < margins[-1]:
        raise Failed(f"the margin of the pairs held out did not grow: {line_of(margins)}")

    count = fetch(client, job, there.folder / "result")
    question = word_problems.problems(1, seed=3)[0].question
    for model in (there.base, job["model"]):
        messages = [{"role": "user", "content": question}]
        answered = client.chat(model, messages, temperature=0, max_tokens=ANSWER_TOKENS)
        quote(model, question, answered["choices"][0]["message"]["content"])
    console.print(
        f"\n[bold green]ok[/] {job['progress']['step']} DPO steps in {seconds(job):.0f} s: reward margin of pairs held "
        f"out {margins[0]:.3f} → {margins[-1]:.3f}, the better answer ahead in {accuracy:.0%}; {count} files verified",
        soft_wrap=True,
    )
    return Preferred(margins, accuracy, seconds(job))


def spec(there: Scene, files: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "finetune",
        "name": "shows-its-work",
        "model": {"base": there.base},
        "data": {**files, "seq_len": SEQ_LEN if not there.is_rehearsal else 2 * SEQ_LEN},
        "method": {"type": "dpo", "beta": 0.1, "lora": {"rank": 16, "alpha": 32}},
        "training": {
            "steps": there.steps,
            "global_batch": 2,
            "lr": 1e-2 if there.is_rehearsal else 1e-4,
            "precision": "fp32",
            "checkpoint_every": there.steps,
            "eval_every": max(1, there.steps // LOOKS),
        },
    }


def line_of(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    as_script(main)
