"""What a line of training data means, and what is wrong with one that means nothing. Knows no tokens, needs no torch.

Formats
    text        plain UTF-8 text, one document per file; or JSON Lines with one `{"text": …}` document a line.
    chat        JSON Lines, `{"messages": [{"role", "content", …}, …], "tools": […]}` as OpenAI writes it.
    completion  JSON Lines, `{"prompt": …, "completion": …}`.
    preference  JSON Lines, a prompt and two answers to it, the better one told: `{"input": {"messages": […]},
                "preferred_output": […], "non_preferred_output": […]}` as OpenAI writes it, or `{"prompt", "chosen",
                "rejected"}`, as texts or as lists of messages.
    choice      JSON Lines, `{"question", "choices": […], "answer": 0}`, or `messages` instead of `question`: nothing is
                learned from them, a model is asked which choice it holds likeliest.
    tokens      ids that somebody else made, in Parquet or Megatron's files: `engine.data.tokens` reads them.

Decisions, each of which has hurt somebody elsewhere
    - A line ends at LF alone. U+2028, U+2029, U+0085, VT and FF are text. CRLF counts as LF, in plain text too.
    - A UTF-8 byte order mark at the start is not text, nor one at the start of a line of JSON, where files were joined.
      Bytes that aren't UTF-8 are errors, and UTF-16 is named as such, with a mark or without.
    - What stands in place of a file (a Git LFS pointer) and tables (a name that ends in `.csv`) are not plain text.
    - Blank lines are skipped and counted. An empty `{"text": ""}` document is skipped with a warning. A file that is
      left with no example is an error.
    - A repeated key in one object is an error: no reading of it is safe. So are NaN, Infinity, numbers beyond what a
      double holds, and half surrogate pairs; also within the JSON that a tool call's arguments are a string of.
    - A line of JSON is at most `MAX_LINE_BYTES` long, so that memory stays flat; lines of plain text have any length.
    - A file holds one format: the first line decides, and each line of another kind is an error.
    - Top-level fields that no format knows are left out with a warning; unknown fields of a message are errors, because
      a misspelt `weight` would train what was meant to be left alone. One that is null or empty says nothing.
    - `weight` is the integer 0 or 1, on assistant messages only. A conversation ends with an assistant message, and one
      assistant message at least is trained.
    - Several text parts of one content are joined as they are. `content: null` beside `tool_calls` is empty text.
      Arguments of a tool call become the object that their JSON says. `function`, the old role, becomes `tool`.
    - The answers of a pair may repeat the prompt, or be written without it; without a `prompt` it is the messages that
      both begin with. Beside lists of messages, a text is a message. Two answers that are the same are an error.
    - Choices are texts, two at least and none of them twice; `answer` is the number of the right one, from 0.

Every error has its line, its column (in characters, from 1), the path of the field, and says what to do.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from json.decoder import scanstring  # type: ignore[attr-defined]
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

from engine.counting import counted

Format = Literal["text", "chat", "completion", "preference", "choice", "tokens"]
MAX_LINE_BYTES = 16 * 2**20
MAX_ERRORS = 100
"""Errors that one report holds; validation stops there."""
MAX_WARNINGS = 100
PIECE_CHARACTERS = 2**16
"""Plain text is handed on in pieces of about this length."""
READ_BYTES = 2**20
PARQUET, MEGATRON = b"PAR1", b"MMIDIDX"
"""What files of ids begin with."""

_JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
_TEXT_ENDINGS = (".txt", ".text", ".md")
_TABLE_ENDINGS = (".csv", ".tsv", ".parquet", ".arrow", ".xlsx")
_NOT_TEXT = (
    (PARQUET, "a Parquet file"),
    (rb"\x1f\x8b", "gzip-compressed"),
    (rb"PK\x03\x04", "a zip archive"),
    (rb"\x28\xb5\x2f\xfd", "zstd-compressed"),
    (rb"\xfd7zXZ\0", "xz-compressed"),
    (rb"BZh[1-9]1AY&SY", "bzip2-compressed"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (rb"%PDF-", "a PDF"),
    (rb"ARROW1", "an Arrow file"),
    # Of JSON the first two characters are ASCII, whatever the rest is.
    (rb"\xff\xfe\0\0|\0\0\xfe\xff|[^\0]\0\0\0|\0\0\0[^\0]", "UTF-32 text"),
    (rb"\xff\xfe|\xfe\xff|[^\0]\0[^\0]\0|\0[^\0]\0[^\0]", "UTF-16 text"),
    (
        rb"version https://git-lfs\.github\.com/spec/",
        "a Git LFS pointer and not the file that it stands for, which git lfs pull fetches",
    ),
)
"""How a file begins that is no UTF-8 text of anybody's, and what it is."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

Path_ = tuple[str | int, ...]
Fault = Callable[[Path_, str], None]
"""Reports one error: where in the line's object, and what to do about it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know about one line."""

    line: int
    """From 1; 0 is the file as a whole."""
    message: str
    column: int | None = None
    """In characters, from 1; None where the line as a whole is meant."""
    field: str | None = None
    """Such as `messages[2].content`; None where the line as a whole is meant."""

    def to_dict(self) -> dict[str, object]:
        return {"line": self.line, "column": self.column, "field": self.field, "message": self.message}

    def __str__(self) -> str:
        where = ", ".join(
            part
            for part in (
                f"line {self.line}" if self.line else "",
                f"column {self.column}" if self.column else "",
                self.field or "",
            )
            if part
        )
        return f"{where}: {self.message}" if where else self.message


class InvalidData(ValueError):
    """The data can't be trained on; `findings` says where and why, and `hint` what to do, where that is not clear."""

    def __init__(self, findings: Iterable[Finding], *, source: str | None = None, hint: str | None = None) -> None:
        self.findings = tuple(findings)
        self.hint = hint
        prefix = f"{source}: " if source else ""
        shown = "; ".join(str(finding) for finding in self.findings[:5])
        more = f"; and {len(self.findings) - 5} more" if len(self.findings) > 5 else ""
        super().__init__(f"{prefix}{shown}{more}")


def ways_out(longest: int, most: int | None, *, may_be_cut: bool = True) -> str:
    """What to set where examples are longer than a row, the longest of `longest` ids, of a model that takes `most`."""
    cut = 'data.overlong to "drop" or "truncate"' if may_be_cut else None
    longer = f"data.seq_len to {longest - 1}" if most is None or longest - 1 <= most else None
    if ways := " or ".join(filter(None, (longer, cut))):
        return f"set {ways}" + ("" if longer else f", as the model takes {counted(most or 0, 'token')} at most")
    return f"shorten them, as the model takes {counted(most or 0, 'token')} at most"


@dataclass(frozen=True, slots=True)
class Report:
    """What validation found in one file."""

    format: Format | None
    """None where no line says what it is."""
    examples: int
    """Documents, conversations or pairs that can be trained on, or questions to ask."""
    characters: int
    """Of their text, markup left out."""
    empty_lines: int
    errors: tuple[Finding, ...] = ()
    """At most the asked number; reading stopped there."""
    warnings: tuple[Finding, ...] = ()
    plain_text: bool = False
    """The file is text as it stands, not JSON Lines."""

    @property
    def ok(self) -> bool:
        return not self.errors

    def to_dict(self) -> dict[str, object]:
        return {
            "format": self.format,
            "plain_text": self.plain_text,
            "examples": self.examples,
            "characters": self.characters,
            "empty_lines": self.empty_lines,
            "errors": [finding.to_dict() for finding in self.errors],
            "warnings": [finding.to_dict() for finding in self.warnings],
        }


@dataclass(frozen=True, slots=True)
class Text:
    """A document, or a piece of one."""

    line: int
    text: str
    ends: bool = True
    """False: the next `Text` continues the same document."""

    @property
    def characters(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation in the one form that templates get."""

    line: int
    messages: tuple[dict[str, Any], ...]
    """Each has `role` and a `content` that is text; never None."""
    trained: tuple[bool, ...]
    """For each message, whether its text is learned."""
    tools: tuple[dict[str, Any], ...] | None = None

    @property
    def characters(self) -> int:
        return sum(len(message["content"]) for message in self.messages)


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and what should follow it."""

    line: int
    prompt: str
    completion: str

    @property
    def characters(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to one prompt: both of the same kind, each in full behind the prompt, which is not learned."""

    line: int
    chosen: Chat | Completion
    rejected: Chat | Completion

    @property
    def characters(self) -> int:
        return self.chosen.characters + self.rejected.characters


@dataclass(frozen=True, slots=True)
class Choice:
    """A question and what may be said to it, one of which is right. Nothing of it is learned."""

    line: int
    question: str | Chat
    """Text, or a conversation that the choices answer."""
    choices: tuple[str, ...]
    answer: int
    """Number of the right one, from 0."""

    @property
    def characters(self) -> int:
        asked = len(self.question) if isinstance(self.question, str) else self.question.characters
        return asked + sum(map(len, self.choices))


Example = Text | Chat | Completion | Preference | Choice


def validate(
    chunks: Iterable[bytes],
    *,
    name_hint: str | None = None,
    format: Format | Literal["auto"] = "auto",
    max_errors: int = MAX_ERRORS,
) -> Report:
    """Read a file of any size once and say what it is and everything that is wrong with it, up to `max_errors`.

    `name_hint` is the name it was uploaded under: `.jsonl` that holds no JSON is then an error instead of text.
    """
    reading = _Reading(format=format, name_hint=name_hint or "")
    examples = characters = 0
    for example in reading.examples(chunks):
        if isinstance(example, Finding):
            if len(reading.errors) >= max_errors:
                break
            continue
        examples += not isinstance(example, Text) or example.ends
        characters += example.characters
    if not examples and not reading.errors:
        reading.errors.append(Finding(0, "the file is empty: there are no examples in it; upload at least one"))
    return Report(
        format=reading.format,
        examples=examples,
        characters=characters,
        empty_lines=reading.empty_lines,
        errors=tuple(reading.errors[:max_errors]),
        warnings=tuple(reading.all_warnings()),
        plain_text=reading.plain_text,
    )


def examples(chunks: Iterable[bytes], format: Format) -> Iterator[Example]:
    """The examples in file order. Raises InvalidData at the first line that is not one; `validate` names them all."""
    for example in _Reading(format=format).examples(chunks):
        if isinstance(example, Finding):
            raise InvalidData([example])
        yield example


def read(path: Path, format: Format) -> Iterator[Example]:
    """The examples of a file, as `examples` gives them."""
    return examples(read_chunks(path), format)


def read_chunks(path: Path) -> Iterator[bytes]:
    """The file's bytes, a piece at a time."""
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            yield chunk


def conversation(value: object, *, line: int = 0, training: bool = True) -> Chat:
    """The chat that a parsed `{"messages": …}` object is; raises InvalidData with everything that is wrong with it.

    With `training` off it may end with any role, as a prompt does.
    """
    findings: list[Finding] = []
    chat = _chat(value, lambda path, text: findings.append(Finding(line, text, None, _dotted(path))), line, training)
    if chat is None or findings:
        raise InvalidData(findings)
    return chat


# ---- Reading ------------------------------------------------------------------------------------------


@dataclass
class _Reading:
    """One pass over one file: hands out examples and findings in order, and keeps the counts."""

    format: Any = "auto"
    name_hint: str = ""
    errors: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    unused: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Top-level fields that nothing reads: how often, and the first line."""
    empty_lines: int = 0
    plain_text: bool = False

    def __post_init__(self) -> None:
        self.declared = self.format != "auto"
        if not self.declared:
            self.format = None
        self.first_line = 0
        self.decoder = _Decoder()

    def all_warnings(self) -> list[Finding]:
        ignored = [
            Finding(line, f'the field "{name}" is not used; it stands on {count} line(s)', field=name)
            for name, (count, line) in self.unused.items()
        ]
        return ignored + self.warnings

    def examples(self, chunks: Iterable[bytes]) -> Iterator[Example | Finding]:
        head, rest = _head(iter(chunks))
        for beginning, what in _NOT_TEXT:
            if re.match(beginning, head):
                yield self.error(Finding(1, f"this is {what}; upload UTF-8 text or JSON Lines", 1))
                return
        head = head.removeprefix(codecs.BOM_UTF8)
        source = _prepend(head, rest)
        if self.is_json(head):
            yield from self.lines(source)
            return
        if self.name_hint.lower().endswith(_TABLE_ENDINGS):
            yield self.error(
                Finding(
                    0,
                    f"the file is named {self.name_hint[-60:]!r}, and rows of a table are no examples; write one JSON "
                    "object a line, or name it .txt to train on it as plain text",
                )
            )
            return
        if head.lstrip().startswith((b"{", b"[")):
            self.warn(Finding(1, "this begins like JSON, but is no line of a known kind: it is read as plain text"))
        yield from self.plain(source)

    def is_json(self, head: bytes) -> bool:
        """Whether the file is JSON Lines. What is accepted depends on the content alone, so that `read` agrees."""
        if self.format in ("chat", "completion", "preference", "choice"):
            return True
        first = head.lstrip(b" \t\r\n").split(b"\n", 1)[0]
        if not first.startswith((b"{", b"[")):
            return self.name_hint.lower().endswith(_JSON_ENDINGS)
        try:
            value = json.loads(first)
        except (ValueError, RecursionError):
            return not self.declared and not self.name_hint.lower().endswith(_TEXT_ENDINGS)
        if isinstance(value, dict) and _kind(value) is not None:
            return True
        return not self.declared and not self.name_hint.lower().endswith(_TEXT_ENDINGS)

    def plain(self, chunks: Iterator[bytes]) -> Iterator[Example | Finding]:
        """One document: pieces with `ends` False, then the last. Blank pieces before the first word are left out."""
        self.format, self.plain_text = "text", True
        held, at, begun = "", _Place(), False
        for text in _decoded(chunks):
            if isinstance(text, bytes):
                here = at.after(held)
                yield self.error(_not_utf8(text, here.line, here.column))
                continue
            if "\0" in text:
                here = at.after(held + text[: text.index("\0")])
                yield self.error(
                    Finding(here.line, "there is a NUL character; upload text, not binary data", here.column)
                )
            *pieces, held = _cut(held + text)
            for piece in pieces:
                begun = begun or bool(piece.strip())
                if begun:
                    yield Text(at.line, piece, ends=False)
                at = at.after(piece)
        if begun or held.strip():
            yield Text(at.line, held)

    def lines(self, chunks: Iterator[bytes]) -> Iterator[Example | Finding]:
        for number, raw in _numbered(chunks):
            if raw is None:
                yield self.error(
                    Finding(number, f"the line is longer than {MAX_LINE_BYTES // 2**20} MiB; split the example")
                )
            elif not (said := raw.removeprefix(codecs.BOM_UTF8)).strip():
                self.empty_lines += 1
            else:
                yield from self.line(number, said)

    def line(self, number: int, raw: bytes) -> Iterator[Example | Finding]:
        try:
            text = raw.decode()
        except UnicodeDecodeError as broken:
            yield self.error(_not_utf8(raw[broken.start :], number, len(raw[: broken.start].decode()) + 1))
            return
        found: list[Finding] = []

        def fault(path: Path_, message: str, *, again: str | None = None) -> None:
            found.append(
                Finding(number, message, _column(text, path, again), _dotted((*path, again) if again else path))
            )

        value = _parsed(self.decoder, text, number, found, fault)
        example = self.example(value, number, fault) if not found else None
        for finding in found:
            yield self.error(finding)
        if isinstance(example, Text) and not found:
            yield from _in_pieces(example)
        elif example is not None and not found:
            yield example

    def example(self, value: object, line: int, fault: Fault) -> Example | None:
        if not isinstance(value, dict):
            fault((), f"a line must be one JSON object, and this is {_name(value)}; {_wrapping(value)}")
            return None
        kind = _kind(value)
        if kind is None or kind.parse is None:
            fault((), kind.hint if kind else _unknown(value))
            return None
        if self.format is None:
            self.format, self.first_line = kind.name, line
        if kind.name != self.format:
            origin = (
                f"data.format is {self.format}" if self.declared else f"line {self.first_line} made it {self.format}"
            )
            fault((), f"this line is {kind.name}, but {origin}; put each format in a file of its own")
            return None
        for name in value.keys() - kind.fields:
            if name in self.unused or len(self.unused) < MAX_WARNINGS:
                count, first = self.unused.get(name, (0, line))
                self.unused[name] = (count + 1, first)
        example = kind.parse(value, fault, line)
        if isinstance(example, Text) and not example.text.strip():
            self.warn(Finding(line, "the document is empty and is skipped", field="text"))
            return None
        return example

    def error(self, finding: Finding) -> Finding:
        self.errors.append(finding)
        return finding

    def warn(self, finding: Finding) -> None:
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(finding)


@dataclass(frozen=True, slots=True)
class _Place:
    """A character's line and column, both from 1."""

    line: int = 1
    column: int = 1

    def after(self, text: str) -> _Place:
        lines = text.count("\n")
        return _Place(self.line + lines, len(text) - text.rfind("\n") if lines else self.column + len(text))


_BLANK = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*")


def _head(chunks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The beginning, up to the end of the first line that isn't blank, and the rest."""
    head, searched = bytearray(), 0
    for chunk in chunks:
        head += chunk
        blank = _BLANK.match(head)
        assert blank is not None
        if len(head) > MAX_LINE_BYTES or head.find(b"\n", max(blank.end(), searched)) >= 0:
            break
        searched = len(head)
    return bytes(head), chunks


def _prepend(head: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    if head:
        yield head
    yield from rest


def _numbered(chunks: Iterator[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers; None stands for one that is too long to hold."""
    number, held, too_long = 1, bytearray(), False
    for chunk in chunks:
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            held += chunk[start:end]
            yield number, (None if too_long or len(held) > MAX_LINE_BYTES else bytes(held))
            number, too_long, start = number + 1, False, end + 1
            held.clear()
        if not too_long:
            held += chunk[start:]
        if len(held) > MAX_LINE_BYTES:
            too_long = True
            held.clear()
    if held or too_long:
        yield number, (None if too_long else bytes(held))


def _decoded(chunks: Iterator[bytes]) -> Iterator[str | bytes]:
    """Text with CRLF as LF; bytes where they are not UTF-8, which are then skipped."""
    held = b""
    for chunk in chunks:
        held += chunk
        # A sequence that the chunk cuts, and a CR whose LF may follow, wait for the next one.
        keep = _unfinished(held)
        ready, held = held[: len(held) - keep], held[len(held) - keep :]
        yield from _pieces(ready)
    yield from _pieces(held)


def _unfinished(data: bytes) -> int:
    """How many bytes at the end may be the start of something that goes on."""
    if data.endswith(b"\r"):
        return 1
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < needed else 0
        if byte < 0x80:
            return 0
    return 0


def _pieces(data: bytes) -> Iterator[str | bytes]:
    while data:
        try:
            yield data.decode().replace("\r\n", "\n")
            return
        except UnicodeDecodeError as broken:
            if broken.start:
                yield data[: broken.start].decode().replace("\r\n", "\n")
            yield data[broken.start : broken.end]
            data = data[broken.end :]


def _in_pieces(document: Text) -> Iterator[Text]:
    """A document of a JSON line as pieces that are no longer than those of plain text."""
    *pieces, last = _cut(document.text)
    for piece in pieces:
        yield Text(document.line, piece, ends=False)
    yield Text(document.line, last)


_SEAM = re.compile(r"(?<=\S\n)(?=\S)")


def _cut(text: str) -> Iterator[str]:
    """Pieces that join to `text`, cut so that tokens stay the same: where a line ends, between two words."""
    start = 0
    while len(text) - start >= 2 * PIECE_CHARACTERS:
        least, most = start + PIECE_CHARACTERS, start + 2 * PIECE_CHARACTERS
        seam = _SEAM.search(text, least, most)
        end = seam.start() if seam else text.find(" ", least, most)
        end = end if end > 0 else least
        yield text[start:end]
        start = end
    yield text[start:]


def _not_utf8(data: bytes, line: int, column: int) -> Finding:
    return Finding(line, f"byte 0x{data[0]:02x} is not UTF-8 here; save the file as UTF-8", column)


@dataclass(frozen=True, slots=True)
class _Odd:
    """What makes a JSON value unfit to read: where in it, and what to do."""

    path: Path_
    message: str
    again: str | None = None
    """The key of the object at `path` that it has twice."""


@dataclass(frozen=True, slots=True, eq=False)
class _NoNumber:
    """Stands for what is written as a number and is none."""

    text: str


class _Decoder(json.JSONDecoder):
    """JSON that remembers which objects have a key twice, and which numbers are none."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=self._mapping, parse_constant=self._constant, parse_float=self._real)
        self._repeated: list[tuple[dict[str, Any], str]] = []
        self._numberless: list[_NoNumber] = []

    def read(self, text: str) -> tuple[object, list[_Odd]]:
        """A value, and what is odd about it. Raises ValueError and RecursionError as the library does."""
        self._repeated.clear()
        self._numberless.clear()
        value: object = self.decode(text)
        odd = []
        for owner, key in self._repeated:
            why = f'duplicate key "{key}": only one of its values can be meant; remove the others'
            odd.append(_Odd(_path_of(owner, value), why, key))
        for part in self._numberless:
            why = "is not JSON" if part.text[-1].isalpha() else "is beyond what a number can be"
            odd.append(_Odd(_path_of(part, value), f"{part.text[:40]} {why}; write a number or null"))
        if _ESCAPED_SURROGATE.search(text):
            odd.extend(
                _Odd(path, r"the text has half of a surrogate pair (\ud800 to \udfff alone); write the whole character")
                for path, part in _walk(value)
                if any(isinstance(name, str) and _SURROGATE.search(name) for name in _texts_of(part))
            )
        return value, odd

    def _mapping(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            self._repeated.append((value, next(key for key, count in counts.items() if count > 1)))
        return value

    def _constant(self, name: str) -> _NoNumber:
        self._numberless.append(_NoNumber(name))
        return self._numberless[-1]

    def _real(self, text: str) -> float | _NoNumber:
        return number if isfinite(number := float(text)) else self._constant(text)


def _parsed(decoder: _Decoder, text: str, line: int, found: list[Finding], fault: Callable[..., None]) -> object:
    """The JSON value of a line. Appends to `found` what makes it unfit to read."""
    try:
        value, odd = decoder.read(text)
    except json.JSONDecodeError as broken:
        message = f"not valid JSON: {_cause(text, broken)}; a line must be one whole JSON object"
        found.append(Finding(line, message, broken.colno))
        return None
    except RecursionError:
        found.append(Finding(line, "the JSON is nested too deeply; flatten it"))
        return None
    except ValueError:
        # Of a line, that is, for which the library has no word of its own.
        found.append(Finding(line, "a number has more digits than can be read; write it as a string"))
        return None
    for each in odd:
        fault(each.path, each.message, again=each.again)
    return value


def _cause(text: str, broken: json.JSONDecodeError) -> str:
    """What the library says, and what usually is behind it."""
    said = broken.msg[:1].lower() + broken.msg[1:]
    hint, there = "", text[broken.pos : broken.pos + 1]
    if "\r" in text.rstrip("\r"):
        hint = "its lines end in CR alone; save it with LF line ends"
    elif text.lstrip().startswith("["):
        hint = "a list of examples is not JSON Lines; leave out its brackets and commas"
    elif said.startswith("invalid control character"):
        hint = f"U+{ord(there):04X} can't stand in a string as it is; write {json.dumps(there)[1:-1]}"
    elif said.startswith("invalid \\"):
        hint = "a backslash is written as two"
    elif said.startswith("extra data"):
        hint = "nothing may follow the object, neither a comma nor another one"
    elif said.startswith("unterminated") or not there:
        hint = "the line ends before the object does"
    elif there == "'":
        hint = "strings have double quotes"
    elif there in "}]":
        hint = "leave out the comma before it"
    elif not there.isprintable() or not there.isascii():
        hint = f"U+{ord(there):04X} stands there"
    return f"{said} ({hint})" if hint else said


def _path_of(wanted: object, value: object) -> Path_:
    return next((path for path, part in _walk(value) if part is wanted), ())


def _texts_of(part: object) -> Iterable[object]:
    return part if isinstance(part, dict) else (part,)


def _walk(value: object) -> Iterator[tuple[Path_, object]]:
    """Every part of a JSON value, with its path."""
    waiting: list[tuple[Path_, object]] = [((), value)]
    while waiting:
        path, part = waiting.pop()
        yield path, part
        if isinstance(part, dict):
            waiting.extend(((*path, key), child) for key, child in part.items())
        elif isinstance(part, list):
            waiting.extend(((*path, index), child) for index, child in enumerate(part))


_SPACE = re.compile(r"[ \t\r\n]*")
_SKIP = json.JSONDecoder()


def _column(text: str, path: Path_, again: str | None = None) -> int:
    """The column of the value at `path`, or of the second key `again` in it; of the nearest part that exists."""
    at = _after_space(text, 0)
    for step in path:
        inside = next((start for key, _, start in _children(text, at) if key == step), None)
        if inside is None:
            return at + 1
        at = inside
    if again is not None:
        places = [key_at for key, key_at, _ in _children(text, at) if key == again]
        return places[1] + 1 if len(places) > 1 else at + 1
    return at + 1


def _children(text: str, at: int) -> Iterator[tuple[str | int, int, int]]:
    """Key or index, its place, and its value's place, for each child of the object or array that starts at `at`."""
    opening, index = text[at], 0
    if opening not in "{[":
        return
    at = _after_space(text, at + 1)
    while text[at] not in "}]":
        key: str | int = index
        key_at = at
        if opening == "{":
            key, at = scanstring(text, at + 1)
            at = _after_space(text, _after_space(text, at) + 1)
        yield key, key_at, at
        _, at = _SKIP.raw_decode(text, at)
        at, index = _after_space(text, at), index + 1
        if text[at] == ",":
            at = _after_space(text, at + 1)


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _dotted(path: Path_) -> str | None:
    out = ""
    for step in path:
        out += f"[{step}]" if isinstance(step, int) else f".{step}" if out else step
    return out or None


# ---- Formats ------------------------------------------------------------------------------------------


def _text(value: dict[str, Any], fault: Fault, line: int) -> Text | None:
    text = value["text"]
    if not isinstance(text, str):
        fault(("text",), f"text must be a string, and this is {_name(text)}")
        return None
    return Text(line, text)


def _completion(value: dict[str, Any], fault: Fault, line: int) -> Completion | None:
    whole = True
    for name in ("prompt", "completion"):
        if not isinstance(value.get(name), str):
            missing = name not in value
            lists = '; write the messages of both as one list, "messages"' if isinstance(value.get(name), list) else ""
            fault(
                (name,),
                f"{name} is missing; add it"
                if missing
                else f"{name} must be a string, and this is {_name(value[name])}{lists}",
            )
            whole = False
    if not whole:
        return None
    if not value["completion"].strip():
        fault(("completion",), "the completion is empty, so there is nothing to learn; write it or remove the line")
        return None
    return Completion(line, value["prompt"], value["completion"])


ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_MESSAGE_FIELDS = frozenset(
    {"role", "content", "name", "weight", "tool_calls", "tool_call_id", "function_call", "refusal", "reasoning_content"}
)
_SAYS_NOTHING: tuple[object, ...] = (None, "", [], {})
"""What clients write for a field that a message does not have."""


def _chat(value: object, fault: Fault, line: int, training: bool = True) -> Chat | None:
    raw = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(raw, list) or not raw:
        fault(("messages",), "messages must be a list with at least one message")
        return None
    faults = 0

    def counted(path: Path_, message: str) -> None:
        nonlocal faults
        faults += 1
        fault(path, message)

    tools = _tools(value, counted)
    messages = [_message(message, ("messages", index), counted) for index, message in enumerate(raw)]
    if faults:
        return None
    built = [message for message in messages if message is not None]
    trained = _trained(built, raw)
    if training:
        _check_learnable(built, trained, counted, ("messages",))
    return None if faults else Chat(line, tuple(built), trained, tools)


def _trained(messages: Sequence[dict[str, Any]], raw: Sequence[Any]) -> tuple[bool, ...]:
    return tuple(
        message["role"] == "assistant" and source.get("weight", 1) != 0
        for message, source in zip(messages, raw, strict=True)
    )


def _check_learnable(
    messages: Sequence[dict[str, Any]], trained: Sequence[bool], fault: Fault, path: Path_, first: int = 0
) -> None:
    """`first` is the number in the list at `path` that the first of `messages` has."""
    last = len(messages) - 1
    if not any(message["role"] == "assistant" for message in messages):
        fault(path, "there is no assistant message, so there is nothing to learn; add the answer")
    elif messages[last]["role"] != "assistant":
        fault(
            (*path, first + last),
            f"the last message is from {messages[last]['role']!r}; end with an assistant message: "
            "there is nothing to learn after this one",
        )
    elif not any(trained):
        fault(path, "every assistant message has weight 0, so there is nothing to learn; remove the line")
    for index, (message, learned) in enumerate(zip(messages, trained, strict=True)):
        if learned and not message["content"].strip() and not message.get("tool_calls"):
            fault(
                (*path, first + index, "content"),
                "this assistant message is empty; write the answer, or give the message weight 0",
            )


_ANSWERS = (("chosen", "rejected"), ("preferred_output", "non_preferred_output"))
"""What the better and the worse answer are called: by most, and by OpenAI."""


_TEXT: Sequence[Any] = ({},)
"""Stands for the message as it is written, where it is a text."""


@dataclass(frozen=True, slots=True)
class _Turns:
    """A list of messages in a pair: where it is, as it is written, and as templates get it."""

    path: Path_
    raw: Sequence[Any]
    messages: list[dict[str, Any]]


def _preference(value: dict[str, Any], fault: Fault, line: int) -> Preference | None:
    faults = 0

    def counted(path: Path_, message: str) -> None:
        nonlocal faults
        faults += 1
        fault(path, message)

    as_openai = not value.keys().isdisjoint(_ANSWERS[1])
    names = better, worse = _ANSWERS[as_openai]
    source = value.get("input") if as_openai else value
    where: Path_ = ("input", "messages") if as_openai else ("prompt",)
    if not isinstance(source, dict) or (as_openai and not isinstance(source.get("messages"), list)):
        counted(("input",), 'input must be an object that has the prompt: {"messages": […]}')
        return None
    for name in names:
        if value.get(name) is None:
            counted((name,), f"{name} is missing; a pair has both answers, {better} and {worse}")
    if faults:
        return None
    prompt = source.get("messages" if as_openai else "prompt")
    answers = [value[name] for name in names]
    pair: tuple[Chat, ...] | tuple[Completion, ...] = ()
    if not isinstance(prompt, list) and all(isinstance(answer, str) for answer in answers):
        pair = _texts_compared(prompt, answers, counted, line)
    else:
        asked = None if prompt is None else _turns(prompt, "user", where, counted)
        both = [_turns(answer, "assistant", (name,), counted) for answer, name in zip(answers, names, strict=True)]
        tools = _tools(source, counted, where[:-1])
        if not faults:
            pair = _chats_compared(asked, both, tools, counted, line)
    if not faults and pair[0] == pair[1]:
        counted((worse,), f"{better} and {worse} are the same, so there is nothing to prefer; remove the line")
    return None if faults else Preference(line, *pair)


def _texts_compared(prompt: object, answers: list[str], fault: Fault, line: int) -> tuple[Completion, ...]:
    if not isinstance(prompt, str):
        fault(("prompt",), "prompt is missing; add it" if prompt is None else f"prompt is {_name(prompt)}; write text")
        return ()
    for name, answer in zip(_ANSWERS[0], answers, strict=True):
        if not answer.strip():
            fault((name,), "the answer is empty, so there is nothing to compare; write it or remove the line")
    return tuple(Completion(line, prompt, answer) for answer in answers)


def _chats_compared(
    asked: _Turns | None, answers: list[_Turns], tools: tuple[dict[str, Any], ...] | None, fault: Fault, line: int
) -> tuple[Chat, ...]:
    least = min(len(answer.messages) for answer in answers) - 1
    both = zip(*(answer.messages[:least] for answer in answers), strict=True)
    shared = [first for first, _ in takewhile(lambda each: each[0] == each[1], both)]
    # Beside a prompt that is a text, whole conversations may hold it, and more of it.
    told = asked is not None and (asked.raw != _TEXT or shared[-1:] != asked.messages)
    prompt = asked.messages if asked is not None and told else shared
    if not prompt:
        fault(("prompt",), "there is no prompt: the answers begin differently; add the messages that both answer")
        return ()
    chats = []
    for answer in answers:
        # It may repeat the prompt.
        first = len(prompt) if answer.messages[: len(prompt)] == prompt else 0
        messages, trained = answer.messages[first:], _trained(answer.messages, answer.raw)[first:]
        for index, message in enumerate(messages, first):
            if message["role"] not in ("assistant", "tool"):
                fault(
                    (*answer.path, index, "role"),
                    f"an answer has messages of assistant and tool, and this one is from {message['role']!r}; "
                    "put it into the prompt",
                )
        _check_learnable(messages, trained, fault, answer.path, first)
        chats.append(Chat(line, (*prompt, *messages), (*(False for _ in prompt), *trained), tools))
    return tuple(chats)


def _choice(value: dict[str, Any], fault: Fault, line: int) -> Choice | None:
    faults = 0

    def counted(path: Path_, message: str) -> None:
        nonlocal faults
        faults += 1
        fault(path, message)

    question = _question(value, counted, line)
    choices = _choices(value, counted)
    answer = value.get("answer")
    if type(answer) is not int:
        said = f"and this is {_name(answer)}" if "answer" in value else "and it is missing"
        counted(("answer",), f"answer must be the number of the right choice, from 0, {said}")
    elif choices and not 0 <= answer < len(choices):
        last = len(choices) - 1
        counted(("answer",), f"answer is {str(answer)[:20]}, and choices are numbered from 0, to {last} here")
    if faults or question is None or type(answer) is not int:
        return None
    return Choice(line, question, choices, answer)


def _question(value: dict[str, Any], fault: Fault, line: int) -> str | Chat | None:
    text, messages = value.get("question"), value.get("messages")
    if (text is None) == (messages is None):
        fault(("question",), 'say what is asked either as "question", a text, or as "messages", and not both')
        return None
    if messages is not None:
        chat = _chat(value, fault, line, training=False)
        if chat is None:
            return None
        if chat.messages[-1]["role"] == "assistant":
            fault(
                ("messages", len(chat.messages) - 1),
                "the last message is from 'assistant', and the choices are what may be said next; leave it out",
            )
        return Chat(line, chat.messages, (False,) * len(chat.messages), chat.tools)
    if not isinstance(text, str):
        fault(("question",), f"question must be a string, and this is {_name(text)}")
        return None
    if not text.strip():
        fault(("question",), "the question is empty; write it or remove the line")
    return text


def _choices(value: dict[str, Any], fault: Fault) -> tuple[str, ...]:
    """The choices; none where there is something wrong with the list as a whole."""
    choices = value.get("choices")
    if not isinstance(choices, list) or len(choices) < 2:
        said = f"this is {_name(choices)}" if not isinstance(choices, list) else f"here {_are(len(choices))}"
        fault(("choices",), f"choices must be a list of at least two texts, and {said}")
        return ()
    first: dict[str, int] = {}
    for number, choice in enumerate(choices):
        if not isinstance(choice, str):
            fault(("choices", number), f"a choice must be a string, and this is {_name(choice)}")
        elif not choice.strip():
            fault(("choices", number), "the choice is empty; write it or remove it")
        elif first.setdefault(choice.strip(), number) != number:
            fault(
                ("choices", number),
                f"this is choices[{first[choice.strip()]}] again; remove one, and mind the number in answer",
            )
    return tuple(str(choice) for choice in choices)


def _are(count: int) -> str:
    return "is one" if count == 1 else "are none"


def _turns(value: object, role: str, path: Path_, fault: Fault) -> _Turns:
    """A list of messages; a text is a message from `role`."""
    if isinstance(value, str):
        return _Turns(path, _TEXT, [{"role": role, "content": value}])
    if not isinstance(value, list) or not value:
        fault(path, f"{_dotted(path)} must be a list with at least one message")
        return _Turns(path, [], [])
    messages = [_message(message, (*path, index), fault) for index, message in enumerate(value)]
    return _Turns(path, value, [message for message in messages if message is not None])


def _message(raw: object, path: Path_, fault: Fault) -> dict[str, Any] | None:
    if not isinstance(raw, dict):
        fault(path, f"a message must be an object with role and content, and this is {_name(raw)}")
        return None
    role = raw.get("role")
    if not isinstance(role, str) or role not in ROLES:
        known = "system, developer, user, assistant or tool"
        fault(
            (*path, "role"),
            f"role is {json.dumps(role)[:60]}; it must be {known}"
            if "role" in raw
            else f"role is missing; say {known}",
        )
        return None
    for name in sorted(key for key in raw.keys() - _MESSAGE_FIELDS if raw[key] not in _SAYS_NOTHING):
        fault((*path, name), f'a message has no field "{name}"; its fields are {", ".join(sorted(_MESSAGE_FIELDS))}')
    if raw.get("refusal") not in _SAYS_NOTHING:
        fault((*path, "refusal"), "refusal must be null; write the refusal as the content")
    _check_weight(raw, role, path, fault)
    message: dict[str, Any] = {"role": "tool" if role == "function" else role}
    calls = _tool_calls(raw, role, path, fault)
    message["content"] = _content(raw, bool(calls), path, fault)
    for name in ("name", "tool_call_id", "reasoning_content"):
        if raw.get(name) is not None:
            if not isinstance(raw[name], str):
                fault((*path, name), f"{name} must be a string, and this is {_name(raw[name])}")
            message[name] = raw[name]
    if calls:
        message["tool_calls"] = calls
    return message


def _check_weight(raw: dict[str, Any], role: str, path: Path_, fault: Fault) -> None:
    weight = raw.get("weight")
    if weight is None:
        return
    if type(weight) is not int or weight not in (0, 1):
        fault((*path, "weight"), f"weight is {json.dumps(weight)[:60]}; it must be the integer 0 (not trained) or 1")
    elif role != "assistant":
        fault((*path, "weight"), f"weight belongs to assistant messages, and this one is from {role!r}; remove it")


def _content(raw: dict[str, Any], has_calls: bool, path: Path_, fault: Fault) -> str:
    content = raw.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if not has_calls:
            state = "null" if "content" in raw else "missing"
            fault(
                (*path, "content"),
                f"content is {state}; write a string (null is for assistant messages with tool_calls)",
            )
        return ""
    if not isinstance(content, list):
        fault((*path, "content"), f"content must be a string or a list of text parts, and this is {_name(content)}")
        return ""
    texts: list[str] = []
    for index, part in enumerate(content):
        here = (*path, "content", index)
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else _name(part)
            fault(here, f'only parts of type "text" can be trained on, and this is {kind}; remove the part')
        elif not isinstance(part.get("text"), str):
            fault((*here, "text"), "a text part must have its text as a string")
        else:
            texts.append(part["text"])
    return "".join(texts)


def _tool_calls(raw: dict[str, Any], role: str, path: Path_, fault: Fault) -> list[dict[str, Any]]:
    calls, old = raw.get("tool_calls"), raw.get("function_call")
    if calls is None and old is not None:
        calls, name = [{"type": "function", "function": old}], "function_call"
    else:
        name = "tool_calls"
    if calls is None or calls == []:
        return []
    here: Path_ = (*path, name)
    if role != "assistant":
        fault(here, f"{name} belongs to assistant messages, and this one is from {role!r}; remove it")
        return []
    if not isinstance(calls, list):
        fault(here, f"tool_calls must be a list, and this is {_name(calls)}")
        return []
    built = []
    for index, call in enumerate(calls):
        at = here if name == "function_call" else (*here, index)
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            fault(at, 'a tool call must be {"id", "type": "function", "function": {"name", "arguments"}}')
            continue
        arguments = _arguments(function.get("arguments"), at if name == "function_call" else (*at, "function"), fault)
        identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        built.append({**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return built


def _arguments(value: object, path: Path_, fault: Fault) -> dict[str, Any]:
    # Templates write arguments with `tojson`: a string would be quoted twice, so they get the object.
    at, odd = (*path, "arguments"), list[_Odd]()
    if isinstance(value, str):
        try:
            value, odd = _Decoder().read(value) if value.strip() else ({}, odd)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        fault(at, "arguments must be a JSON object, written out in a string as OpenAI does or as it is")
        return {}
    for each in odd:
        fault(at, f"in {_dotted(each.path) or 'the object'} of the arguments, {each.message}")
    return value


def _tools(value: dict[str, Any], fault: Fault, path: Path_ = ()) -> tuple[dict[str, Any], ...] | None:
    tools, name = value.get("tools"), "tools"
    if tools is None and value.get("functions") is not None:
        name = "functions"
        tools = value["functions"]
    if tools is None:
        return None
    if not isinstance(tools, list):
        fault((*path, name), f"{name} must be a list, and this is {_name(tools)}")
        return None
    built = []
    for index, tool in enumerate(tools):
        function = tool if name == "functions" else tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            fault(
                (*path, name, index),
                'a tool must be {"type": "function", "function": {"name", "description", "parameters"}}',
            )
            continue
        built.append({"type": "function", "function": function})
    return tuple(built) or None


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of line: the fields that tell it, and how it is read."""

    name: str
    tells: frozenset[str]
    """The line is this kind when it has one of these fields."""
    fields: frozenset[str] = frozenset()
    parse: Callable[[dict[str, Any], Fault, int], Example | None] | None = None
    hint: str = ""
    """What to do instead, where it is known but can't be trained on."""


# The order decides where a line could be read in two ways: the richer kind comes first.
_KINDS = (
    _Kind(
        "choice",
        frozenset({"choices"}),
        frozenset({"question", "messages", "choices", "answer", "tools", "functions", "parallel_tool_calls"}),
        _choice,
    ),
    _Kind(
        "preference",
        frozenset({"preferred_output", "non_preferred_output", "chosen", "rejected"}),
        frozenset(
            {"input", "preferred_output", "non_preferred_output", "prompt", "chosen", "rejected", "tools", "functions"}
            | {"parallel_tool_calls"}
        ),
        _preference,
    ),
    _Kind(
        "chat",
        frozenset({"messages"}),
        frozenset({"messages", "tools", "parallel_tool_calls", "functions", "function_call"}),
        _chat,
    ),
    _Kind(
        "sharegpt",
        frozenset({"conversations"}),
        hint='rename "conversations" to "messages", "from" to "role" (gpt is assistant) and "value" to "content"',
    ),
    _Kind(
        "ids",
        frozenset({"input_ids"}),
        hint="ids are read from Parquet, with a column input_ids; write that, or upload text",
    ),
    _Kind("completion", frozenset({"prompt", "completion"}), frozenset({"prompt", "completion"}), _completion),
    _Kind("text", frozenset({"text"}), frozenset({"text"}), _text),
    _Kind(
        "instruction",
        frozenset({"instruction"}),
        hint='write "instruction", and "input" behind it, as "prompt", and "output" as "completion"',
    ),
)
assert {kind.name for kind in _KINDS if kind.parse} == set(get_args(Format)) - {"tokens"}


def _kind(value: dict[str, Any]) -> _Kind | None:
    """By the fields that say something; by null ones only where there is no other."""
    said = {name for name, content in value.items() if content is not None}
    return next((kind for names in (said, value.keys()) for kind in _KINDS if not kind.tells.isdisjoint(names)), None)


def _unknown(value: dict[str, Any]) -> str:
    names = ", ".join(f'"{name}"' for name in list(value)[:5]) or "nothing"
    return f'a line needs "messages" (chat), "prompt" and "completion", or "text"; this one has {names}'


def _wrapping(value: object) -> str:
    if isinstance(value, list):
        return "write each example as an object on a line of its own, without brackets and commas around them"
    return 'wrap it, such as {"text": …}'


def _name(value: object) -> str:
    """What JSON calls it."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return "null" if value is None else names[type(value)]
