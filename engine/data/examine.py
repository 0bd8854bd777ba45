"""A file as a base would read it, without training: what becomes of each example, and what some of them look like.

It imports no torch, and reads the file once, from wherever its bytes come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import Any, Literal

from engine.counting import counted
from engine.data.chat import Encoded
from engine.data.format import Choice, Example, Format, InvalidData, Text, examples, ways_out
from engine.data.judging import Fate, judge
from engine.data.packing import cut, pack
from engine.data.texts import encoded_pieces
from engine.tokenizer import Tokenizer

MAX_PLACES = 100
"""Lines that each part of a report names."""
MAX_WORDS = 500
"""Characters of what a template says of an example, which may quote all of it."""
MAX_SHOWN = 32_768
"""Ids that a preview shows of one example."""
Overlong = Literal["error", "drop", "truncate"]


@dataclass(frozen=True)
class Reading:
    """How a job would read the file."""

    format: Format
    seq_len: int
    overlong: Overlong = "error"
    packing: bool = True
    max_seq_len: int | None = None
    """Of the model; None where nobody says."""


@dataclass
class _Group:
    """Examples that share a fate: how many, and where the first are."""

    count: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)

    def add(self, line: int, **facts: Any) -> None:
        self.count += 1
        if len(self.lines) < MAX_PLACES:
            self.lines.append({"line": line, **facts})

    def to_dict(self) -> dict[str, Any]:
        return {"count": self.count, "lines": self.lines}


def survey(tokenizer: Tokenizer, chunks: Iterable[bytes], reading: Reading, *, seconds: float) -> dict[str, Any]:
    """How many examples are kept, cut and left out, with their lines, and how full the rows become.

    What takes longer than `seconds` is told as far as it was read, with `complete` false.
    """
    until = monotonic() + seconds
    work = _survey_text if reading.format == "text" else _survey_examples
    return work(tokenizer, examples(chunks, reading.format), reading, until)


def _survey_examples(tokenizer: Tokenizer, source: Iterator[Example], reading: Reading, until: float) -> dict[str, Any]:
    capacity = reading.seq_len + 1
    groups: dict[Fate, _Group] = {fate: _Group() for fate in ("truncated", "overlong", "untrainable")}
    refused, lengths = _Group(), []
    read = kept = trained = 0
    longest, complete = {"line": 0, "tokens": 0}, True
    for example in source:
        assert not isinstance(example, Text)
        if monotonic() > until:
            complete = False
            break
        read += 1
        try:
            judged = judge(tokenizer, example, capacity=capacity, truncate=reading.overlong == "truncate")
        except InvalidData as problem:
            refused.add(example.line, message=_words(problem))
            continue
        if judged.length > longest["tokens"]:
            longest = {"line": example.line, "tokens": judged.length}
        if judged.fate != "kept":
            groups[judged.fate].add(example.line, tokens=judged.length)
        if judged.fate in ("kept", "truncated"):
            kept += 1
            sizes = [len(part.ids) for part in judged.parts]
            # Choices are packed one by one.
            lengths += sizes if isinstance(example, Choice) else [sum(sizes)]
            trained += sum(sum(part.trained[1:]) for part in judged.parts)
    rows = [[place] for place in range(len(lengths))]
    if reading.packing:
        rows = pack(lengths, capacity, in_time=lambda: monotonic() <= until)
        complete = complete and monotonic() <= until
    tokens = sum(min(sum(lengths[place] for place in row), reading.seq_len) for row in rows)
    return {
        "complete": complete,
        "examined": read,
        "kept": kept,
        "truncated": groups["truncated"].to_dict(),
        "dropped": groups["overlong"].to_dict(),
        "untrainable": groups["untrainable"].to_dict(),
        "refused": refused.to_dict(),
        "longest": longest,
        **_rows(len(rows), tokens, trained, reading),
        "problem": _problem(kept, groups["overlong"], refused, longest, reading),
    }


def _words(problem: InvalidData) -> str:
    message = problem.findings[0].message
    return message if len(message) <= MAX_WORDS else f"{message[: MAX_WORDS - 1]}…"


def _problem(kept: int, overlong: _Group, refused: _Group, longest: dict[str, int], reading: Reading) -> str | None:
    """Why a job that reads the file so would fail; None where it would not."""
    if refused.count:
        number, first = counted(refused.count, "example"), refused.lines[0]["message"]
        return f"{number} can't be shown by the base's chat template: {first}"
    is_asked = reading.format == "choice"
    if overlong.count and reading.overlong == "error" and not (is_asked and kept):
        return f"{counted(overlong.count, 'example')} of more than seq_len={reading.seq_len} tokens: " + ways_out(
            longest["tokens"], reading.max_seq_len, may_be_cut=not is_asked
        )
    return None if kept else "no question is left to ask" if is_asked else "no example is left to learn from"


def _survey_text(tokenizer: Tokenizer, source: Iterator[Example], reading: Reading, until: float) -> dict[str, Any]:
    documents = 0
    complete = True

    def in_time() -> Iterator[tuple[int, Example]]:
        nonlocal complete
        for example in source:
            if monotonic() > until:
                complete = False
                return
            yield 0, example

    def lengths() -> Iterator[tuple[int, int]]:
        nonlocal documents
        length = 0
        for _, piece, ids in encoded_pieces(tokenizer, in_time()):
            length += len(ids)
            if piece.ends:
                documents += 1
                yield piece.line, length
                length = 0
        if length:
            documents += 1
            yield 0, length

    rows = tokens = trained = 0
    for row in cut(lengths(), reading.seq_len + 1, packing=reading.packing):
        filled = sum(length for _, _, length in row)
        rows += 1
        tokens += min(filled, reading.seq_len)
        trained += filled - len(row)
    nothing = _Group().to_dict()
    return {
        "complete": complete,
        "examined": documents,
        "kept": documents,
        **{name: nothing for name in ("truncated", "dropped", "untrainable", "refused")},
        "longest": None,
        **_rows(rows, tokens, trained, reading),
        "problem": None if rows else "the text is too short for one token to follow another",
    }


def _rows(rows: int, tokens: int, trained: int, reading: Reading) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "trainable_tokens": trained,
        "rows": rows,
        "filled": round(tokens / (rows * reading.seq_len), 4) if rows else 0.0,
    }


def preview(
    tokenizer: Tokenizer, chunks: Iterable[bytes], reading: Reading, *, first_line: int = 1, limit: int = 3
) -> list[dict[str, Any]]:
    """Examples from a line on as the model sees them: ids, their text, and which of them are learned."""
    source = (example for example in examples(chunks, reading.format) if example.line >= first_line)
    shown = _shown_texts(tokenizer, source) if reading.format == "text" else _shown_examples(tokenizer, source, reading)
    return list(islice(shown, limit))


def _shown_texts(tokenizer: Tokenizer, source: Iterator[Example]) -> Iterator[dict[str, Any]]:
    ids: list[int] = []
    line = 0
    for _, piece, more in encoded_pieces(tokenizer, ((0, piece) for piece in source)):
        line = line or piece.line
        ids += more
        if piece.ends or len(ids) > MAX_SHOWN:
            yield _shown(tokenizer, line, Encoded(ids, [True] * len(ids)), "kept", more=not piece.ends)
            ids, line = [], 0
            if not piece.ends:
                # The rest of so long a document is not worth reading for the sake of the next.
                return


def _shown_examples(tokenizer: Tokenizer, source: Iterator[Example], reading: Reading) -> Iterator[dict[str, Any]]:
    for example in source:
        assert not isinstance(example, Text)
        try:
            judged = judge(tokenizer, example, capacity=reading.seq_len + 1, truncate=reading.overlong == "truncate")
        except InvalidData as problem:
            yield {"line": example.line, "fate": "refused", "message": _words(problem)}
            continue
        shown = [_shown(tokenizer, example.line, part, judged.fate) for part in judged.parts]
        if isinstance(example, Choice):
            yield shown[example.answer] | {"choices": shown, "answer": example.answer}
        else:
            yield shown[0] | ({"rejected": shown[1]} if shown[1:] else {})


def _shown(tokenizer: Tokenizer, line: int, encoded: Encoded, fate: Fate, *, more: bool = False) -> dict[str, Any]:
    ids, mask = encoded.ids[:MAX_SHOWN], [int(trained) for trained in encoded.trained[:MAX_SHOWN]]
    # Nothing stands before the first id that it could be predicted from.
    mask[:1] = [0]
    return {
        "line": line,
        "fate": fate,
        "tokens": len(encoded.ids),
        "trainable_tokens": sum(encoded.trained[1:]),
        "more": more or len(ids) < len(encoded.ids),
        "ids": ids,
        "mask": mask,
        "text": tokenizer.decode(ids, skip_special=False),
        "spans": list(_spans(tokenizer, ids, mask)),
    }


def _spans(tokenizer: Tokenizer, ids: list[int], mask: list[int]) -> Iterator[dict[str, Any]]:
    """The text in runs of what is learned and what is not; a character is where its last byte is."""
    stream = tokenizer.stream(skip_special=False)
    text = ""
    for place, (identity, learned) in enumerate(zip(ids, mask, strict=True), start=1):
        text += stream.push(identity)
        if place == len(ids):
            yield {"trained": bool(learned), "text": text + stream.finish()}
        elif mask[place] != learned:
            yield {"trained": bool(learned), "text": text}
            text = ""
