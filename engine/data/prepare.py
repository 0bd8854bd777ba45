"""From a run's files to its rows on disk. One rank does it; the others `open_prepared` what it wrote."""

from __future__ import annotations

import hashlib
import json
import shutil
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from engine.config import Data, RunConfig
from engine.data.format import (
    READ_BYTES,
    Chat,
    Choice,
    Completion,
    Example,
    Finding,
    InvalidData,
    Preference,
    Text,
    examples,
    read_chunks,
    validate,
    ways_out,
)
from engine.data.judging import judge
from engine.data.packing import cut, pack
from engine.data.questions import Notebook, Questions, opened
from engine.data.rows import Array, Rows, Store
from engine.data.texts import encoded_pieces
from engine.data.tokens import Ids, parts, read
from engine.tokenizer import InvalidTokenizer, Tokenizer


class Report(Protocol):
    """Called often, so the receiver thins out."""

    def __call__(self, phase: str, done: int, total: int, unit: str) -> None: ...


OVERLONG = "Change what the message says, or shorten these examples, and submit the job anew."
MAX_LINES = 20
"""Lines that a note names."""
_HELD_OUT = 0x7661  # keeps the draw of held-out rows apart from the shuffling of epochs
_SEGMENTS_AT_ONCE = 4096


@dataclass(frozen=True)
class Counts:
    """What became of a set of files."""

    examples: int = 0
    """Read: documents, conversations or pairs."""
    kept: int = 0
    truncated: int = 0
    """Kept, and cut to the row's length."""
    dropped: int = 0
    """Left out because longer than a row."""
    untrainable: int = 0
    """Left out because nothing in them would be learned."""
    rows: int = 0
    tokens: int = 0
    """Inputs in the rows, padding left out."""


@dataclass(frozen=True)
class FileRead:
    """A file as it was when its rows were made."""

    path: str
    """As the run says it."""
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Prepared:
    """Rows that are ready, and what there is to say about them."""

    train: Rows
    validation: Rows | None
    counts: Counts
    """Of the training files, held-out part included in `examples` and `kept`."""
    notes: tuple[str, ...] = ()
    """Sentences for the log: what was dropped or cut, with the lines."""
    files: tuple[FileRead, ...] = ()
    """What the rows were made of."""
    questions: Questions | None = None
    """Multiple-choice questions to ask; None: there are none."""


def tokenizer_for(run: RunConfig, run_dir: Path, report: Report, *, into: Path | None = None) -> Tokenizer:
    """The run's tokenizer, written to `prepared/tokenizer` in `into`, or the run directory: the other ranks load it.

    A resumed run keeps the one beside its checkpoint, if there is one: ids must not change their meaning.
    """
    kept = run_dir / run.resume / "tokenizer" if run.resume is not None else None
    source = run.tokenizer
    if kept is not None and kept.is_dir():
        # Its template is the one that the run chose, if it chose one.
        tokenizer = Tokenizer.load(kept, now=run.data.now)
    elif source.type == "base":
        assert run.base is not None
        tokenizer = Tokenizer.load(run_dir / run.base, template=run.data.template, now=run.data.now)
    elif source.type == "file":
        assert source.path is not None
        tokenizer = Tokenizer.from_file(run_dir / source.path)
    elif source.type == "train":
        assert source.vocab_size is not None
        tokenizer = Tokenizer.train(_texts(run.data, run_dir, report), source.vocab_size)
    else:
        tokenizer = Tokenizer.bytes()
    if tokenizer.eos_id is None:
        raise InvalidTokenizer(
            "the tokenizer names no end-of-text token"
            + (
                f" that it has ({said!r} is not in the vocabulary)"
                if (said := tokenizer.roles.get("eos_token"))
                else ""
            )
            + ', so nothing would ever stop; set "eos_token" in its tokenizer_config.json'
        )
    tokenizer.save((into or run_dir) / "prepared" / "tokenizer")
    return tokenizer


def load_tokenizer(run_dir: Path) -> Tokenizer:
    """The tokenizer that `tokenizer_for` wrote."""
    return Tokenizer.load(run_dir / "prepared" / "tokenizer")


def prepare(
    run: RunConfig,
    run_dir: Path,
    tokenizer: Tokenizer,
    report: Report,
    *,
    vocab_size: int | None = None,
    max_seq_len: int | None = None,
    into: Path | None = None,
) -> Prepared:
    """Write `prepared/` in `into`, or the run directory, and open it.

    Raises InvalidData, naming lines, where the data can't be trained on.

    `vocab_size` and `max_seq_len` are the model's; None: what the run says of its model, or else the tokenizer's, and
    any.
    """
    if vocab_size is None:
        vocab_size = tokenizer.vocab_size if run.model is None else run.model.vocab_size
    if max_seq_len is None and run.model is not None:
        max_seq_len = run.model.max_seq_len
    data, folder = run.data, (into or run_dir) / "prepared"
    for name in ("train", "validation", "questions"):
        shutil.rmtree(folder / name, ignore_errors=True)
    learns_all = run.objective == "pretrain" or data.format == "text"
    work = _Work(data, tokenizer, report, learns_all, vocab_size, max_seq_len)
    train = work.tokenize(data.train, run_dir, folder / "train", "training")
    tables: dict[str, Table | None] = {"train": None, "validation": None, "questions": None}
    if isinstance(data.validation, float):
        tables["train"], tables["validation"] = _held_out(train, data, data.validation, run.training.seed, report)
    else:
        tables["train"] = train.table(data, np.arange(train.units), report)
        if data.validation is not None:
            held = work.tokenize((data.validation,), run_dir, folder / "validation", "validation")
            tables["validation"] = held.table(data, np.arange(held.units), report)
            work.note_same(data.validation)
    if data.evaluation is not None:
        asked = work.questions(data.evaluation, run_dir, folder / "questions")
        tables["questions"] = asked.table(data, np.arange(asked.units), report)
    index = {
        "width": data.seq_len + 1,
        "pad_id": tokenizer.pad_id,
        "validation_store": "train" if isinstance(data.validation, float) else "validation",
        "counts": asdict(train.counts),
        "notes": work.notes,
        "files": [asdict(file) for file in work.files],
    }
    for name, table in tables.items():
        if table is not None:
            np.save(folder / f"{name}.members.npy", table.members)
            np.save(folder / f"{name}.bounds.npy", table.bounds)
        else:
            (folder / f"{name}.bounds.npy").unlink(missing_ok=True)
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
    return open_prepared(into or run_dir)


def open_prepared(run_dir: Path) -> Prepared:
    """What `prepare` wrote there, on any rank."""
    folder = run_dir / "prepared"
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))

    def rows(name: str, store: str) -> Rows | None:
        if not (folder / f"{name}.bounds.npy").is_file():
            return None
        return Rows(
            folder / store,
            width=index["width"],
            pad_id=index["pad_id"],
            members=np.load(folder / f"{name}.members.npy", mmap_mode="r"),
            bounds=np.load(folder / f"{name}.bounds.npy", mmap_mode="r"),
        )

    train = rows("train", "train")
    assert train is not None
    counts = Counts(**{**index["counts"], "rows": len(train), "tokens": train.tokens})
    files = tuple(FileRead(**file) for file in index["files"])
    validation, questions = rows("validation", index["validation_store"]), None
    if (asked := rows("questions", "questions")) is not None:
        questions = opened(folder / "questions", asked, np.load(folder / "questions.members.npy"))
    return Prepared(train, validation, counts, tuple(index["notes"]), files, questions)


@dataclass(frozen=True)
class Table:
    """Rows as runs of segment numbers."""

    members: Array
    bounds: Array


@dataclass
class _Tokenized:
    """A store that is whole, in units that may be held out: rows of text, or examples of the other formats."""

    counts: Counts
    unit: str
    lengths: array[int] = field(default_factory=lambda: array("i"))
    """Of each example, in ids; empty for text."""
    parts: int = 1
    """Segments of an example."""
    bounds: array[int] = field(default_factory=lambda: array("q", [0]))
    """Of the rows of text, in segments; just 0 for the other formats."""
    short: _Tally = field(default_factory=lambda: _Tally())
    """Documents of ids in which none follows another."""

    @property
    def units(self) -> int:
        return len(self.lengths) or len(self.bounds) - 1

    def table(self, data: Data, chosen: Array, report: Report) -> Table:
        """The rows that the chosen units make."""
        if self.lengths:
            lengths = [self.lengths[unit] for unit in chosen]
            rows = [[place] for place in range(len(lengths))]
            if data.packing:
                rows = pack(
                    lengths, data.seq_len + 1, told=lambda done, total: report("packing", done, total, "examples")
                )
            firsts = [int(chosen[place]) * self.parts for row in rows for place in row]
            members = [first + part for first in firsts for part in range(self.parts)]
            sizes = [len(row) * self.parts for row in rows]
        else:
            starts, ends = np.asarray(self.bounds[:-1])[chosen], np.asarray(self.bounds[1:])[chosen]
            sizes = [int(size) for size in ends - starts]
            members = [at for start, end in zip(starts, ends, strict=True) for at in range(start, end)]
        return Table(np.asarray(members, dtype=np.int64), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


@dataclass
class _Work:
    """Tokenising, for one run."""

    data: Data
    tokenizer: Tokenizer
    report: Report
    learns_all: bool
    vocab_size: int
    """Of the model, which may have more entries than the tokenizer."""
    max_seq_len: int | None
    """Of the model; None where nobody says."""
    notes: list[str] = field(default_factory=list)
    files: list[FileRead] = field(default_factory=list)

    def tokenize(self, files: Sequence[Path], run_dir: Path, folder: Path, name: str) -> _Tokenized:
        store = Store(folder, max(self.vocab_size, self.tokenizer.vocab_size))
        try:
            streams = self.data.format == "text" or (self.data.format == "tokens" and self.learns_all)
            write = self._text if streams else self._pairs
            source = _Source(files, run_dir, self.data.format, self.report)
            done = write(source, store, name)
            self.files += source.read
        finally:
            store.close()
        if not done.units:
            raise InvalidData(
                [Finding(0, f"the {name} data is left with no examples to learn from: {self._lost(done)}")]
            )
        return done

    def note_same(self, validation: Path) -> None:
        """Say so where what is validated with is trained on too."""
        digests = {file.path: file.sha256 for file in self.files}
        held = digests.pop(validation.as_posix(), None)
        if held in digests.values():
            self.notes.append(
                "the validation file is a training file too, byte for byte, so that its loss does not tell what the "
                "model makes of what it has not seen; hold other examples out, or let data.validation be a share"
            )

    def _lost(self, done: _Tokenized) -> str:
        if done.counts.dropped:
            return f"{done.counts.dropped} are longer than data.seq_len={self.data.seq_len}; raise it or shorten them"
        if done.counts.untrainable and not done.bounds[-1]:
            # The last note names the lines.
            return f"{self.notes[-1]}; raise data.seq_len={self.data.seq_len} or shorten what comes before the answers"
        return "it is empty, or too short for one token to follow another; add text"

    # ---- Text: a stream of documents, cut into rows ----

    def _text(self, source: _Source, store: Store, name: str) -> _Tokenized:
        done = _Tokenized(Counts(), "rows")
        held: list[tuple[int, int, int, int]] = []
        total = 0
        for row in cut(self._documents(source, store, done), self.data.seq_len + 1, packing=self.data.packing):
            held.extend((start + offset, length, file, line) for (start, file, line), offset, length in row)
            total += len(row)
            done.bounds.append(total)
            if len(held) >= _SEGMENTS_AT_ONCE:
                store.segments(held)
                held = []
        store.segments(held)
        self._note(name, done.counts.examples, done.short, "left out: in fewer than two ids none follows another")
        return done

    def _documents(self, source: _Source, store: Store, done: _Tokenized) -> Iterator[tuple[tuple[int, int, int], int]]:
        """Write each document, in pieces as they come; yields its start, file and line, and its length."""
        if self.data.format == "tokens":
            yield from self._ids(source, store, done)
            return
        start, begun, origin, count = 0, False, (0, 0), 0
        for file, piece, ids in encoded_pieces(self.tokenizer, source, named=source.named):
            if not begun:
                start, origin = store.length, (file, piece.line)
            store.append(ids)
            begun = not piece.ends
            if piece.ends:
                count += 1
                done.counts = Counts(examples=count, kept=count)
                yield (start, *origin), store.length - start

    def _ids(self, source: _Source, store: Store, done: _Tokenized) -> Iterator[tuple[tuple[int, int, int], int]]:
        """Documents of ids as they are: nothing is put before or behind them."""
        kept = 0
        for count, (file, document) in enumerate(source, 1):
            assert isinstance(document, Ids)
            self._check_ids(document, source, file)
            # Of a single id nothing can be predicted, so no row takes it.
            if len(document.ids) < 2:
                done.short.add(source.name(file, document.line))
            else:
                kept += 1
            done.counts = Counts(examples=count, kept=kept, untrainable=count - kept)
            start = store.length
            store.append(document.ids)
            yield (start, file, document.line), len(document.ids)

    def _check_ids(self, document: Ids, source: _Source, file: int) -> None:
        """Raise InvalidData where the model has no entry for an id, or what the file says is learned would not be."""
        beyond = np.flatnonzero(document.ids >= self.vocab_size)
        if len(beyond):
            problem = Finding(
                document.line,
                f"the id is {document.ids[beyond[0]]}, and the model's vocabulary has {self.vocab_size} entries; the "
                "ids must be made with the model's own tokenizer",
                field=f"input_ids[{beyond[0]}]",
            )
            raise InvalidData([source.named(file, problem)])
        # Nothing predicts the first id, whatever is said of it.
        if self.learns_all and document.trained is not None and not document.trained[1:].all():
            problem = Finding(
                document.line,
                "labels or loss_mask say that not all ids here are learned, and a pretrain learns all; set objective "
                'to "sft", or leave the column out',
            )
            raise InvalidData([source.named(file, problem)])

    # ---- Chat, completion and preference: examples, each whole in one row ----

    def _pairs(self, source: _Source, store: Store, name: str) -> _Tokenized:
        capacity = self.data.seq_len + 1
        done = _Tokenized(Counts(), "examples", parts=2 if self.data.format == "preference" else 1)
        overlong, cut_short, empty = _Tally(), _Tally(), _Tally()
        read = longest = 0
        refused: list[Finding] = []
        for file, example in source:
            read += 1
            at = source.name(file, example.line)
            assert not isinstance(example, Text)
            if isinstance(example, Ids):
                self._check_ids(example, source, file)
            try:
                judged = judge(
                    self.tokenizer,
                    example,
                    capacity=capacity,
                    truncate=self.data.overlong == "truncate",
                    learns_all=self.learns_all,
                )
            except InvalidData as problem:
                # What one conversation lacks, others often lack too: name them all, to the cap.
                refused.extend(source.named(file, finding) for finding in problem.findings)
                if len(refused) >= MAX_LINES:
                    break
                continue
            if judged.length > capacity:
                longest = max(longest, judged.length)
                overlong.add(f"{at} ({judged.length} tokens)")
            if judged.fate == "untrainable":
                empty.add(at)
            if judged.fate in ("overlong", "untrainable"):
                continue
            if judged.fate == "truncated":
                cut_short.add(at)
            for part in judged.parts:
                store.segments([(store.length, len(part.ids), file, example.line)])
                store.append(part.ids, part.trained)
            done.lengths.append(sum(len(part.ids) for part in judged.parts))
        if refused:
            raise InvalidData(refused)
        if overlong.count and self.data.overlong == "error":
            problem_text = (
                f"{overlong.count} of {read} {name} examples are longer than data.seq_len={self.data.seq_len}: "
                f"{overlong}; {ways_out(longest, self.max_seq_len)}"
            )
            raise InvalidData([Finding(0, problem_text)], hint=OVERLONG)
        dropped = overlong.count if self.data.overlong == "drop" else 0
        done.counts = Counts(read, len(done.lengths), cut_short.count, dropped, empty.count)
        self._note(name, read, cut_short, f"cut to data.seq_len={self.data.seq_len}")
        self._note(
            name, read, overlong if dropped else _Tally(), f"dropped: longer than data.seq_len={self.data.seq_len}"
        )
        self._note(name, read, empty, "left out: nothing in them would be learned" + " once cut" * bool(overlong.count))
        return done

    def questions(self, file: Path, run_dir: Path, folder: Path) -> _Tokenized:
        """Write each choice of each question that fits a row; what is right is written beside."""
        capacity = self.data.seq_len + 1
        done, notebook, overlong = _Tokenized(Counts(), "choices"), Notebook(), _Tally()
        source = _Source((file,), run_dir, "choice", self.report)
        store = Store(folder, max(self.vocab_size, self.tokenizer.vocab_size))
        read = 0
        refused: list[Finding] = []
        try:
            for _, example in source:
                read += 1
                assert isinstance(example, Choice)
                try:
                    judged = judge(self.tokenizer, example, capacity=capacity, truncate=False)
                except InvalidData as problem:
                    refused.extend(problem.findings)
                    if len(refused) >= MAX_LINES:
                        break
                    continue
                if judged.fate != "kept":
                    overlong.add(f"line {example.line} ({judged.length} tokens)")
                    continue
                notebook.add(example)
                for part in judged.parts:
                    store.segments([(store.length, len(part.ids), 0, example.line)])
                    store.append(part.ids, part.trained)
                    done.lengths.append(len(part.ids))
        finally:
            store.close()
        if refused:
            raise InvalidData(refused, source=file.name)
        longer = f"longer than data.seq_len={self.data.seq_len}"
        if not done.units:
            problem_text = f"of {read} multiple-choice questions none can be asked: they are {longer}; raise it"
            raise InvalidData([Finding(0, problem_text)], source=file.name)
        self._note("multiple-choice", read, overlong, f"left out: {longer}")
        notebook.write(folder, left_out=overlong.count)
        self.files += source.read
        return done

    def _note(self, name: str, read: int, tally: _Tally, what: str) -> None:
        if tally.count:
            self.notes.append(f"{tally.count} of {read} {name} examples {what}: {tally}")


@dataclass
class _Source:
    """The examples of several files in order, with the number of each file; reports the bytes read."""

    files: Sequence[Path]
    run_dir: Path
    format: str
    report: Report
    phase: str = "data"
    read: list[FileRead] = field(default_factory=list)
    """Those that were read to their end."""

    def __iter__(self) -> Iterator[tuple[int, Example | Ids]]:
        paths = [self.run_dir / path for path in self.files]
        if missing := [path for path in self.files if not (self.run_dir / path).is_file()]:
            raise InvalidData([Finding(0, f"there is no file {missing[0]}")])
        meter = _Meter(self.report, self.phase, sum(map(self._bytes, paths)))
        for number, path in enumerate(paths):
            if self.format == "tokens":
                for document in self._ids(path, meter):
                    yield number, document
                for part in parts(path):
                    # What is learned from is told by what is in it, and these files are not read from end to end.
                    for _ in self._chunks(part, self.files[number].with_suffix(part.suffix), meter):
                        pass
                continue
            try:
                for example in examples(self._chunks(path, self.files[number], meter), self.format):  # type: ignore[arg-type]
                    yield number, example
            except InvalidData as first:
                found = validate(read_chunks(path), format=self.format)  # type: ignore[arg-type]
                raise InvalidData(found.errors or first.findings, source=path.name) from first

    def _bytes(self, path: Path) -> int:
        """To be read of a file: those of ids twice, for their documents and for their digest."""
        if self.format != "tokens":
            return path.stat().st_size
        return 2 * sum(part.stat().st_size for part in parts(path) if part.is_file())

    def _ids(self, path: Path, meter: _Meter) -> Iterator[Ids]:
        before, size = meter.done, self._bytes(path) // 2
        yield from read(path, told=lambda seen, total: meter.reach(before + size * seen // total))
        meter.reach(before + size)

    def _chunks(self, path: Path, named: Path, meter: _Meter) -> Iterator[bytes]:
        digest, size = hashlib.sha256(), 0
        with path.open("rb") as file:
            while chunk := file.read(READ_BYTES):
                digest.update(chunk)
                size += len(chunk)
                yield chunk
                meter.reach(meter.done + len(chunk))
        self.read.append(FileRead(named.as_posix(), size, digest.hexdigest()))

    def name(self, file: int, line: int) -> str:
        return f"line {line}" if len(self.files) == 1 else f"{self.files[file].name} line {line}"

    def named(self, file: int, finding: Finding) -> Finding:
        """The finding with the file's name, where there are several."""
        if len(self.files) == 1:
            return finding
        return replace(finding, message=f"{self.files[file].name}: {finding.message}")


@dataclass
class _Meter:
    """How many of the bytes of all files are read."""

    report: Report
    phase: str
    total: int
    done: int = 0

    def reach(self, done: int) -> None:
        self.done = done
        self.report(self.phase, done, self.total, "bytes")


def _texts(data: Data, run_dir: Path, report: Report) -> Iterator[str]:
    """Every text that the tokenizer will meet in training."""
    for _, example in _Source(data.train, run_dir, data.format, report, phase="tokenizer"):
        if isinstance(example, Text):
            yield example.text
        elif isinstance(example, Preference):
            yield from _read(example.chosen)
            yield from _read(example.rejected)
        elif not isinstance(example, Ids | Choice):
            yield from _read(example)


def _read(example: Chat | Completion) -> Sequence[str]:
    if isinstance(example, Chat):
        return [message["content"] for message in example.messages]
    return example.prompt, example.completion


def _held_out(done: _Tokenized, data: Data, fraction: float, seed: int, report: Report) -> tuple[Table, Table]:
    """Rows to train on and rows to validate with, at least one each."""
    if done.units < 2:
        raise InvalidData(
            [
                Finding(
                    0,
                    f"data.validation={fraction} can't be held out: there is only one of the {done.unit}; "
                    "add data, give a validation file, or leave data.validation out",
                )
            ]
        )
    held = min(done.units - 1, max(1, round(done.units * fraction)))
    order = shuffled(done.units, seed, _HELD_OUT)
    return done.table(data, np.sort(order[held:]), report), done.table(data, np.sort(order[:held]), report)


def shuffled(count: int, *key: int) -> Array:
    """0 to `count - 1` in an order that `key`, two integers below 2^63, decides on every machine and version."""
    # NumPy promises the raw bits of Philox, but not what `permutation` makes of them.
    bits = np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(count)
    return np.argsort(bits, kind="stable")


@dataclass
class _Tally:
    """Places that something happened at: all counted, the first few named."""

    count: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, place: str) -> None:
        self.count += 1
        if len(self.named) < MAX_LINES:
            self.named.append(place)

    def __str__(self) -> str:
        more = f" and {self.count - len(self.named)} more" if self.count > len(self.named) else ""
        return ", ".join(self.named) + more
