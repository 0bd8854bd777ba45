"""Go on pretraining SmolLM2-135M on plain text, all weights of it, and watch what it makes of text held out.

The text is Python's own language reference, as the standard library carries it for `help()`; every eighth topic is held
out. --data train.txt --held-out other.jsonl trains on text of yours: the second has a short document a line, as
{"text": …}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import held_out
from scene import Scene, parser, scene, with_files
from service import Failed
from showing import as_script, console, fetch, quote, run, seconds, series

NAME = "continued_pretraining"
SEQ_LEN = 512
EVERY, CHARACTERS = 8, 1500
"""Which topics are held out, and how much of each."""
LOOKS = 4
"""Validations in a run."""
PROMPT = "The for statement is used to"
WORDS = 40


@dataclass(frozen=True)
class Read:
    """What the example found."""

    before: float
    """Held-out loss of the base, in nats a token."""
    after: float
    """Of what was made of it."""
    validations: list[float]
    """The job's own losses of the same text, in rows."""
    seconds: float
    """That the job took."""


def main(arguments: Sequence[str] | None = None) -> Read:
    made = parser(__doc__, steps=24, short_steps=4)
    told = with_files(
        made,
        arguments,
        data="text to train on, with --held-out (default: Python's reference)",
        held_out="text that is not trained on",
    )
    with scene(NAME, told) as there:
        return read(there, told.data, told.held_out)


def read(there: Scene, data: Path | None, others: Path | None) -> Read:
    client = there.client
    if data is not None and others is not None:
        train, validation = there.send(data), there.send(others)
    else:
        names = sorted(topics)
        kept, length = names[::EVERY], there.share(CHARACTERS)
        train = there.upload("reference.jsonl", ({"text": topics[name]} for name in names if name not in kept))
        validation = there.upload("held-out.jsonl", ({"text": topics[name][:length]} for name in kept))
    rows = held_out.rows(client, validation, there.base, seq_len=SEQ_LEN)
    before = held_out.loss(client, there.base, rows)
    console.print(f"held-out loss of {there.base}: [bold]{before:.3f}[/] nats a token, {len(rows)} documents")

    job = run(client, spec(there, train, validation))
    after = held_out.loss(client, job["model"], rows)
    validations = series(client, job, "validation_loss")
    console.print(f"validation loss: {' '.join(f'{loss:.3f}' for loss in validations)}", soft_wrap=True)
    if not (after < before and validations[-1] < validations[0]):
        raise Failed(f"it did not learn: the held-out loss was {before:.3f} and is {after:.3f}")

    count = fetch(client, job, there.folder / "result")
    for model in (there.base, job["model"]):
        went_on = client.complete(model, PROMPT, max_tokens=WORDS, temperature=0)
        quote(model, PROMPT, went_on["choices"][0]["text"])
    console.print(
        f"\n[bold green]ok[/] {job['progress']['step']} steps in {seconds(job):.0f} s: held-out loss {before:.3f} → "
        f"{after:.3f} nats a token; {count} files verified",
        soft_wrap=True,
    )
    return Read(before, after, validations, seconds(job))


def spec(there: Scene, train: str, validation: str) -> dict[str, Any]:
    return {
        "kind": "pretrain",
        "name": "python-reference",
        "model": {"base": there.base},
        "data": {"train": [train], "validation": validation, "seq_len": SEQ_LEN},
        "training": {
            "steps": there.steps,
            "global_batch": 1,
            "lr": 1e-2 if there.is_rehearsal else 5e-5,
            "precision": "fp32",
            "checkpoint_every": there.steps,
            "eval_every": max(1, there.steps // LOOKS),
        },
    }


if __name__ == "__main__":
    as_script(main)
