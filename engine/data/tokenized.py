"""A training file as ids, document after document, for `engine.data.tokens` to write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engine.data.format import Choice, Finding, Format, InvalidData, Preference, Text, read
from engine.data.judging import judge
from engine.data.texts import encoded_pieces
from engine.data.tokens import Ids
from engine.data.tokens import read as read_ids
from engine.tokenizer import Tokenizer


def tokenized(tokenizer: Tokenizer, path: Path, form: Format) -> Iterator[Ids]:
    """As a job would tokenise them: texts with BOS and the end-of-text token, conversations in the base's template."""
    if form == "preference":
        raise InvalidData([Finding(0, "a document of ids is one text, and a pair is two; keep it as it is")])
    if form == "choice":
        raise InvalidData([Finding(0, "multiple-choice questions are asked and not learned; keep them as they are")])
    if form == "tokens":
        yield from read_ids(path)
    elif form == "text":
        yield from _texts(tokenizer, path)
    else:
        for example in read(path, form):
            assert not isinstance(example, Text | Preference | Choice)
            (part,) = judge(tokenizer, example, capacity=2**31, truncate=False).parts
            yield Ids(example.line, np.asarray(part.ids, np.int64), np.asarray(part.trained, np.bool_))


def _texts(tokenizer: Tokenizer, path: Path) -> Iterator[Ids]:
    held: list[int] = []
    pieces = ((0, piece) for piece in read(path, "text"))
    for _, piece, ids in encoded_pieces(tokenizer, pieces):
        held += ids
        if piece.ends:
            yield Ids(piece.line, np.asarray(held, np.int64))
            held = []
