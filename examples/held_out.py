"""What a held-out file costs a model, in nats a learned token: asked of the service alone, of any model that it has.

`POST /v1/files/{id}/preview` tells the ids of each example and which of them are learned; `POST /v1/completions` with
`echo` and no new tokens tells how likely a model finds each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from api.client import Client
from service import Failed

SHOWN = 20
"""Examples that a preview shows."""
TOGETHER = 8
"""Prompts of a request."""


@dataclass(frozen=True)
class Row:
    """One example in a base's tokens."""

    ids: list[int]
    is_learned: list[bool]


def rows(client: Client, file_id: str, base: str, *, seq_len: int) -> list[Row]:
    """Every example of the file, as `base` reads it."""
    return list(_rows(client, file_id, base, seq_len))


def _rows(client: Client, file_id: str, base: str, seq_len: int) -> Iterator[Row]:
    line = 1
    while shown := client.preview(file_id, base, first_line=line, limit=SHOWN, seq_len=seq_len)["data"]:
        for example in shown:
            if example["fate"] != "kept":
                raise Failed(f"line {example['line']} of the held-out file is {example['fate']}; leave it out")
            yield Row(example["ids"], [bool(learned) for learned in example["mask"]])
        line = shown[-1]["line"] + 1


def loss(client: Client, model: str, rows: list[Row]) -> float:
    """The mean over all learned tokens of all rows."""
    nats, learned = 0.0, 0
    for start in range(0, len(rows), TOGETHER):
        some = rows[start : start + TOGETHER]
        scored = client.complete(model, [row.ids for row in some], max_tokens=0, echo=True, logprobs=0)
        for row, choice in zip(some, scored["choices"], strict=True):
            for is_learned, logprob in zip(row.is_learned, choice["logprobs"]["token_logprobs"], strict=True):
                if is_learned:
                    nats, learned = nats - logprob, learned + 1
    return nats / learned
