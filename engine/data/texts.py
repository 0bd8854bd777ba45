"""Documents of text to ids, piece after piece: BOS where the vocabulary begins with one, and an end-of-text token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from engine.data.format import Finding, InvalidData, Text
from engine.tokenizer import Tokenizer

_BATCH_CHARACTERS = 2**20

F = TypeVar("F")
"""What tells files apart."""


def encoded_pieces(
    tokenizer: Tokenizer,
    source: Iterable[tuple[F, Any]],
    *,
    named: Callable[[F, Finding], Finding] = lambda _, finding: finding,
) -> Iterator[tuple[F, Text, list[int]]]:
    """The pieces with their ids, tokenised some at a time so that every core has work.

    Raises InvalidData, of what `named` makes of the finding, where the vocabulary can't write a text.
    """
    begun = False
    for some in _batches(source):
        pieces: list[tuple[F, Text, bool]] = []
        for file, piece in some:
            assert isinstance(piece, Text)
            pieces.append((file, piece, begun))
            begun = not piece.ends
        encoded = tokenizer.encode_all([(piece.text, follows) for _, piece, follows in pieces])
        for file, piece, follows in pieces:
            try:
                ids = next(encoded)
            except ValueError as unfit:
                raise InvalidData([named(file, Finding(piece.line, str(unfit)))]) from unfit
            start = [] if follows else list(tokenizer.start_ids)
            end = [tokenizer.eos_id] if piece.ends and tokenizer.eos_id is not None else []
            yield file, piece, start + ids + end


def _batches(source: Iterable[tuple[F, Any]]) -> Iterator[list[tuple[F, Any]]]:
    """The examples, so many at a time that they have about `_BATCH_CHARACTERS`."""
    batch: list[tuple[F, Any]] = []
    characters = 0
    for file, example in source:
        batch.append((file, example))
        characters += example.characters
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
