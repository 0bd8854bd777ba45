"""What the model says at present to a few of the run's own validation prompts: greedy, so that steps can be compared.

A prompt is what stands before the first token that is learned; of a text, all of which is learned, its beginning.
"""

from __future__ import annotations

from pathlib import Path

import torch

from engine.data.rows import Document, Rows
from engine.events import Sample
from engine.model import Decoder
from engine.tokenizer import Tokenizer

MOST_TOKENS = 64
"""Of an answer; no more of the expected one are shown."""
TEXT_PROMPT = 32
"""Tokens of a text that are its prompt, at most; half of them where it is short."""


def samples(decoder: Decoder, tokenizer: Tokenizer, rows: Rows, *, most: int, files: list[Path]) -> tuple[Sample, ...]:
    """An answer to each of the first `most` documents. All ranks call it together, none in training.

    Where a model is spread over a pipeline, it raises ValueError.
    """
    return tuple(_sample(decoder, tokenizer, document, files) for document in rows.first(most))


def _sample(decoder: Decoder, tokenizer: Tokenizer, document: Document, files: list[Path]) -> Sample:
    ids, trained = document.tokens.tolist(), [False, *document.trained[1:].tolist()]
    start = trained.index(True) if True in trained else len(ids) - 1
    if start <= 1:
        start = max(1, min(TEXT_PROMPT, len(ids) // 2))
    end = trained.index(False, start) if False in trained[start:] else len(ids)
    said, ended = greedy(decoder, ids[:start], room=MOST_TOKENS, stop_ids=tokenizer.stop_ids)
    return Sample(
        file=str(files[document.file]),
        line=document.line,
        prompt=tokenizer.decode(ids[:start], skip_special=False),
        text=tokenizer.decode(said),
        finish_reason="stop" if ended else "length",
        expected=tokenizer.decode(ids[start : min(end, start + MOST_TOKENS)]),
    )


@torch.no_grad()
def greedy(decoder: Decoder, prompt: list[int], *, room: int, stop_ids: tuple[int, ...]) -> tuple[list[int], bool]:
    """At most `room` ids that the model holds likeliest, one after another; and whether one that ends it came next."""
    # What ranks share out along a row they must share evenly, so that one token more is a whole row again.
    unit = decoder.axis.size if decoder.axis.sequence else 1
    room = min(room, decoder.shape.max_seq_len // unit * unit - len(prompt))
    cache = decoder.cache(rows=1, tokens=len(prompt) + room) if unit == 1 and room > 0 else None
    said: list[int] = []
    pending = prompt
    for _ in range(room):
        if cache is None:
            whole = [*prompt, *said]
            padded_BT = torch.tensor([[*whole, *[0] * (-len(whole) % unit)]], device=decoder.device)
            logits_V = decoder.logits(padded_BT)[0, len(whole) - 1]
        else:
            logits_V = decoder.logits(torch.tensor([pending], device=decoder.device), cache, last_only=True)[0, -1]
        token = int(logits_V.argmax())
        if token in stop_ids:
            return said, True
        said.append(token)
        pending = [token]
    return said, False
