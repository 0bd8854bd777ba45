"""Ids that somebody else made, read and written: Parquet with a column `input_ids`, and Megatron's `.bin` and `.idx`.

Nothing is added to them: a document begins and ends with what is there. What they mean, a job's base decides.

Layouts
    Parquet     a row is a document: `input_ids`, a list of integers, and which of them are learned, either as `labels`
                (the ids, or -100 where nothing is learned; unshifted, as `transformers` has them) or as `loss_mask`
                (0 or 1 for each id). Without either all of them are.
    Megatron    `NAME.idx` beside `NAME.bin`, or both in one uncompressed tar. The index is little-endian: the magic
                `MMIDIDX\\0\\0`, uint64 version 1, uint8 code of the type, uint64 number of sequences S and of document
                boundaries D; then int32[S] lengths, int64[S] byte offsets, int64[D] boundaries, and int8[S] modes or
                nothing. A document is the sequences from one boundary to the next, end to end.
"""

from __future__ import annotations

import struct
import tarfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from engine.data.format import MAX_ERRORS, MAX_WARNINGS, MEGATRON, PARQUET, Finding, InvalidData

Array = npt.NDArray[Any]

MAGIC = MEGATRON + b"\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"), 2: np.dtype("i1"), 3: np.dtype("<i2"), 4: np.dtype("<i4"), 5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}  # fmt: skip
"""By Megatron's code. 6 and 7 are floats, one of each width, in an order that changed over time; ids never are."""
UINT16_BELOW = 65_500
"""Entries of a vocabulary up to which Megatron writes two bytes for an id."""
MOST_IDS = 2**31
IGNORED = -100
"""A label of `transformers` that is none."""
ROWS_AT_ONCE = 1024
IDS_AT_ONCE = 2**20
"""Held in memory of a Parquet file, or written to one as a group, whatever the length of a document; but one is held
whole."""
_MASKS = ("labels", "loss_mask")


@dataclass(frozen=True, slots=True)
class Ids:
    """A document in ids."""

    line: int
    """Its number in the file, from 1."""
    ids: Array
    trained: Array | None = None
    """For each id, whether predicting it counts; None: all do."""


@dataclass
class Facts:
    """What is in a file of ids, and what is wrong with it."""

    container: str
    examples: int = 0
    tokens: int = 0
    max_id: int = -1
    longest: tuple[int, int] = (0, 0)
    """Number of the first of the longest documents, and its ids."""
    masked: bool = False
    """It says which ids are learned."""
    errors: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As the report of a file, beside what it has of other formats."""
        return {
            "format": "tokens",
            "container": self.container,
            "plain_text": False,
            "examples": self.examples,
            "characters": 0,
            "tokens": self.tokens,
            "max_id": self.max_id,
            "longest": {"line": self.longest[0], "tokens": self.longest[1]},
            "masked": self.masked,
            "empty_lines": 0,
            "errors": [finding.to_dict() for finding in self.errors],
            "warnings": [finding.to_dict() for finding in self.warnings],
        }


def inspect(file: BinaryIO, *, max_errors: int = MAX_ERRORS) -> Facts:
    """Read a file of ids once, and say what it holds and all that is wrong with it, up to `max_errors`."""
    facts = Facts("parquet" if _is_parquet(file) else "megatron")
    try:
        source = _open(file)
    except InvalidData as problem:
        facts.errors.extend(problem.findings)
        return facts
    facts.masked = source.masked
    facts.warnings.extend(source.warnings[:MAX_WARNINGS])
    for found in source.documents():
        if isinstance(found, Finding):
            facts.errors.append(found)
            if len(facts.errors) >= max_errors:
                break
            continue
        facts.examples += 1
        facts.tokens += len(found.ids)
        facts.max_id = max(facts.max_id, int(found.ids.max()) if len(found.ids) else -1)
        if len(found.ids) > facts.longest[1]:
            facts.longest = (found.line, len(found.ids))
        if len(found.ids) < 2 and len(facts.warnings) < MAX_WARNINGS:
            facts.warnings.append(
                Finding(found.line, "fewer than two ids, of which none follows another; it is left out")
            )
    if not facts.errors and not facts.tokens:
        facts.errors.append(Finding(0, "the file is empty: there are no ids in it"))
    return facts


def read(path: Path, *, told: Callable[[int, int], None] | None = None) -> Iterator[Ids]:
    """The documents of a Parquet file, a tar of Megatron's two files, or an `.idx` that has its `.bin` beside it.

    `told(done, total)` hears of each document that is used.
    """
    with path.open("rb") as file:
        source = _open(file, beside=path.with_suffix(".bin") if path.suffix == ".idx" else None)
        for found in source.documents():
            if isinstance(found, Finding):
                raise InvalidData([found], source=path.name)
            yield found
            if told is not None:
                told(found.line, source.count)


def parts(path: Path) -> tuple[Path, ...]:
    """The files that one of ids consists of: an index is nothing without its ids."""
    return (path, path.with_suffix(".bin")) if path.suffix == ".idx" else (path,)


def _is_parquet(file: BinaryIO) -> bool:
    file.seek(0)
    return file.read(len(PARQUET)) == PARQUET


def _open(file: BinaryIO, *, beside: Path | None = None) -> _Parquet | _Megatron:
    if _is_parquet(file):
        return _Parquet(file)
    if beside is not None:
        if not beside.is_file():
            raise InvalidData([Finding(0, f"there is no {beside.name} beside the index; copy it there")])
        with beside.open("rb") as data:
            return _Megatron(_mapped(file.fileno(), 0, _size(file)), _mapped(data.fileno(), 0, _size(data)))
    return _Megatron(*_parts_of_tar(file))


def _size(file: BinaryIO) -> int:
    return file.seek(0, 2)


# ---- Parquet ------------------------------------------------------------------------------------------


class _Parquet:
    """Rows of a table, some at a time."""

    def __init__(self, file: BinaryIO) -> None:
        # Here and below, since a run that reads no Parquet need not spend half a second on it.
        import pyarrow as pa
        import pyarrow.parquet as pq

        file.seek(0)
        try:
            self.table = pq.ParquetFile(file, pre_buffer=False)
        except (pa.ArrowException, OSError) as broken:
            raise InvalidData([Finding(0, f"the Parquet file can't be read: {_first_line(broken)}")]) from broken
        schema = self.table.schema_arrow
        names = set(schema.names)
        if "input_ids" not in names:
            there = ", ".join(schema.names[:5]) or "nothing"
            raise InvalidData(
                [
                    Finding(
                        0,
                        f"there is no column input_ids, a list of ids for each row; there is {there}",
                        field="input_ids",
                    )
                ]
            )
        for name in ("input_ids", *_MASKS, "attention_mask"):
            if (times := schema.names.count(name)) > 1:
                raise InvalidData([Finding(0, f"there are {times} columns {name}; keep one of them", field=name)])
        masks = [name for name in _MASKS if name in names]
        if len(masks) > 1:
            raise InvalidData([Finding(0, "labels and loss_mask both say what is learned; keep one of them")])
        self.mask = masks[0] if masks else None
        self.masked = self.mask is not None
        self.columns = ["input_ids", *masks, *(["attention_mask"] if "attention_mask" in names else [])]
        for name in self.columns:
            if not _is_list_of_whole(schema.field(name).type):
                raise InvalidData(
                    [
                        Finding(
                            0,
                            f"{name} must be a list of integers in each row, and is {schema.field(name).type}",
                            field=name,
                        )
                    ]
                )
        self.count = self.table.metadata.num_rows
        self.warnings = [
            Finding(0, f'the column "{name}" is not used', field=name)
            for name in schema.names
            if name not in self.columns
        ]

    def documents(self) -> Iterator[Ids | Finding]:
        import pyarrow as pa

        line = 0
        try:
            for batch in self.table.iter_batches(batch_size=self.rows_at_once(), columns=self.columns):
                columns = [batch.column(name) for name in self.columns]
                for row in range(batch.num_rows):
                    line += 1
                    yield self.document(line, [column[row].values for column in columns])
        except (pa.ArrowException, OSError) as broken:
            yield Finding(line + 1, f"the Parquet file is damaged here: {_first_line(broken)}; write it again")

    def rows_at_once(self) -> int:
        """As many as hold `IDS_AT_ONCE` where they are longest on average."""
        longest = 1
        for number in range(self.table.metadata.num_row_groups):
            group = self.table.metadata.row_group(number)
            columns = (group.column(each) for each in range(group.num_columns))
            ids = sum(each.num_values for each in columns if each.path_in_schema.split(".")[0] == "input_ids")
            longest = max(longest, ids // max(1, group.num_rows))
        return max(1, min(ROWS_AT_ONCE, IDS_AT_ONCE // longest))

    def document(self, line: int, cells: list[Any]) -> Ids | Finding:
        found: dict[str, Array] = {}
        for name, cell in zip(self.columns, cells, strict=True):
            if cell is None or cell.null_count:
                return Finding(line, f"{name} is null, or has a null in it; write a whole list", field=name)
            found[name] = cell.to_numpy(zero_copy_only=False)
            if len(found[name]) != len(found["input_ids"]):
                return Finding(
                    line,
                    f"{name} has {len(found[name])} entries and input_ids {len(found['input_ids'])}; make them equal",
                    field=name,
                )
        # Before it is made signed, in which an unsigned one above 2^63 would be another.
        if (problem := _range_problem(line, found["input_ids"])) is not None:
            return problem
        ids = found["input_ids"].astype(np.int64)
        padding = np.flatnonzero(found.get("attention_mask", np.ones(1)) == 0)
        if len(padding):
            return Finding(
                line,
                "attention_mask is 0 here, so this is padding; write rows without it",
                field=f"attention_mask[{padding[0]}]",
            )
        return self.marked(line, ids, found[self.mask]) if self.mask else Ids(line, ids)

    def marked(self, line: int, ids: Array, said: Array) -> Ids | Finding:
        if self.mask == "loss_mask":
            wrong = np.flatnonzero((said != 0) & (said != 1))
            why = "loss_mask is {}; it must be 0 or 1"
            trained = said == 1
        else:
            wrong = np.flatnonzero((said != ids) & (said != IGNORED))
            why = "the label is {}; it must be the id at its place (labels are not shifted), or -100"
            trained = said != IGNORED
        if len(wrong):
            return Finding(line, why.format(said[wrong[0]]), field=f"{self.mask}[{wrong[0]}]")
        return Ids(line, ids, trained)


def _is_list_of_whole(kind: Any) -> bool:
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list and (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)))


def _range_problem(line: int, ids: Array) -> Finding | None:
    wrong = np.flatnonzero((ids < 0) | (ids >= MOST_IDS))
    if not len(wrong):
        return None
    return Finding(line, f"the id is {ids[wrong[0]]}; ids are from 0 to {MOST_IDS - 1}", field=f"input_ids[{wrong[0]}]")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


# ---- Megatron -----------------------------------------------------------------------------------------


class _Megatron:
    """Sequences of one file, told by another; both mapped into memory."""

    masked = False
    warnings: tuple[Finding, ...] = ()

    def __init__(self, index: Array, data: Array) -> None:
        header = bytes(index[: HEADER.size])
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise InvalidData(
                [Finding(0, "the .idx does not begin as one of Megatron's does (MMIDIDX); write it again")]
            )
        _, version, code, sequences, boundaries = HEADER.unpack(header)
        if version != 1:
            raise InvalidData([Finding(0, f"the .idx has version {version}; only version 1 is known")])
        if code not in DTYPES:
            known = ", ".join(f"{each} ({dtype.name})" for each, dtype in DTYPES.items())
            raise InvalidData([Finding(0, f"the .idx says type {code}, and ids are of one of {known}; write it again")])
        self.dtype = DTYPES[code]
        expected = HEADER.size + 12 * sequences + 8 * boundaries
        if len(index) not in (expected, expected + sequences):
            raise InvalidData(
                [Finding(0, f"the .idx has {len(index):,} bytes where its header promises {expected:,}; copy it again")]
            )
        at = HEADER.size
        self.lengths = _part(index, at, sequences, "<i4")
        self.offsets = _part(index, at + 4 * sequences, sequences, "<i8")
        self.bounds = _part(index, at + 12 * sequences, boundaries, "<i8")
        self.data = data
        self.count = max(0, boundaries - 1)
        if not boundaries or self.bounds[0] != 0 or self.bounds[-1] != sequences or (np.diff(self.bounds) < 0).any():
            raise InvalidData(
                [
                    Finding(
                        0,
                        f"the .idx must divide its {sequences} sequences into documents, in order and all of them",
                    )
                ]
            )

    def documents(self) -> Iterator[Ids | Finding]:
        for number, (first, last) in enumerate(zip(self.bounds[:-1], self.bounds[1:], strict=True), 1):
            pieces = [self.sequence(int(sequence)) for sequence in range(first, last)]
            if any(piece is None for piece in pieces):
                yield Finding(
                    number,
                    f"a sequence lies beyond the {len(self.data):,} bytes of the .bin; the two files belong apart",
                )
                continue
            ids = np.concatenate([piece for piece in pieces if piece is not None] or [np.empty(0, self.dtype)])
            yield _range_problem(number, ids) or Ids(number, ids)

    def sequence(self, number: int) -> Array | None:
        start, length = int(self.offsets[number]), int(self.lengths[number])
        end = start + length * self.dtype.itemsize
        if not 0 <= start <= end <= len(self.data):
            return None
        found: Array = np.frombuffer(self.data[start:end].tobytes(), self.dtype)
        return found


def _part(index: Array, start: int, count: int, dtype: str) -> Array:
    kind = np.dtype(dtype)
    part: Array = index[start : start + count * kind.itemsize].view(kind)
    return part


def _parts_of_tar(file: BinaryIO) -> tuple[Array, Array]:
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            members = [
                member
                for member in tar
                # macOS puts a file's attributes beside it, as "._" and its name.
                if member.isreg() and not member.issparse() and not member.name.split("/")[-1].startswith("._")
            ]
    except (tarfile.TarError, OSError, ValueError) as broken:
        raise InvalidData(
            [Finding(0, f"this is neither Parquet nor a tar of Megatron's two files: {_first_line(broken)}")]
        ) from broken
    found = {}
    for ending in (".idx", ".bin"):
        fitting = [member for member in members if member.name.endswith(ending)]
        if len(fitting) != 1:
            raise InvalidData(
                [Finding(0, f"the tar has {len(fitting)} files that end in {ending}; put one .idx and its .bin in it")]
            )
        found[ending] = fitting[0]
    return tuple(_mapped(file.fileno(), member.offset_data, member.size) for member in found.values())  # type: ignore[return-value]


def _mapped(descriptor: int, start: int, size: int) -> Array:
    # An empty piece can't be mapped.
    if not size:
        return np.empty(0, np.uint8)
    with open(descriptor, "rb", closefd=False) as file:
        return np.memmap(file, np.uint8, mode="r", offset=start, shape=(size,))


# ---- Writing ------------------------------------------------------------------------------------------


def write(path: Path, documents: Iterable[Ids], *, vocab_size: int, source: Path | None = None) -> int:
    """Write documents to `path`, by its ending: `.parquet`, or `.idx` with a `.bin` beside it. Returns how many.

    What is there under these names stays as it is until all is written; `source`, where the documents come from, has
    to be another file.
    """
    writers = {".parquet": _write_parquet, ".idx": _write_megatron}
    if path.suffix not in writers:
        raise ValueError(f"{path.name} must end in .parquet, or in .idx for Megatron's two files")
    read_from = () if source is None else parts(source)
    for target in parts(path):
        if any(target.exists() and each.exists() and target.samefile(each) for each in read_from):
            raise ValueError(f"{target.name} is what is read here; write to another name")
    beside = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        count = writers[path.suffix](beside, _among(documents, vocab_size), vocab_size)
        # The index goes last: without it nobody reads the rest.
        for written, target in reversed(list(zip(parts(beside), parts(path), strict=True))):
            written.replace(target)
    finally:
        for written in parts(beside):
            written.unlink(missing_ok=True)
    return count


def _among(documents: Iterable[Ids], vocab_size: int) -> Iterator[Ids]:
    """The same documents. Raises InvalidData where one has an id that is not among the entries of a vocabulary."""
    for document in documents:
        beyond = np.flatnonzero((document.ids < 0) | (document.ids >= vocab_size))
        if len(beyond):
            said = f"the id is {document.ids[beyond[0]]}, and the vocabulary has {vocab_size} entries; choose the base"
            raise InvalidData([Finding(document.line, f"{said} whose ids these are", field=f"input_ids[{beyond[0]}]")])
        yield document


def _write_megatron(path: Path, documents: Iterable[Ids], vocab_size: int) -> int:
    code = 8 if vocab_size < UINT16_BELOW else 4
    lengths = array("i")
    with path.with_suffix(".bin").open("wb") as data:
        for document in documents:
            if document.trained is not None and not document.trained.all():
                raise ValueError("Megatron's files can't say which ids are learned; write .parquet")
            data.write(document.ids.astype(DTYPES[code]).tobytes())
            lengths.append(len(document.ids))
    sizes = np.asarray(lengths, dtype="<i4")
    offsets = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64)])[: len(sizes)] * DTYPES[code].itemsize
    with path.open("wb") as index:
        index.write(HEADER.pack(MAGIC, 1, code, len(sizes), len(sizes) + 1))
        for part in (sizes, offsets.astype("<i8"), np.arange(len(sizes) + 1, dtype="<i8")):
            index.write(part.tobytes())
    return len(lengths)


def _write_parquet(path: Path, documents: Iterable[Ids], _: int) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    documents = iter(documents)
    first = list(islice(documents, 1))
    # A mask, be it of ones, would make examples of what is a stream of text.
    masked = any(each.trained is not None for each in first)
    schema = pa.schema([("input_ids", pa.list_(pa.int32()))])
    if masked:
        schema = schema.append(pa.field("loss_mask", pa.list_(pa.int8())))
    count = 0
    with pq.ParquetWriter(path, schema) as writer:
        for some in _batches(chain(first, documents)):
            count += len(some)
            columns = [pa.array([each.ids.astype(np.int32) for each in some], schema.field(0).type)]
            if masked:
                masks = [np.ones(len(each.ids)) if each.trained is None else each.trained for each in some]
                columns.append(pa.array([mask.astype(np.int8) for mask in masks], schema.field(1).type))
            elif any(each.trained is not None for each in some):
                raise ValueError("some documents say what is learned, and the first does not; write them apart")
            writer.write_batch(pa.record_batch(columns, schema=schema))
    return count


def _batches(documents: Iterable[Ids]) -> Iterator[list[Ids]]:
    held: list[Ids] = []
    ids = 0
    for document in documents:
        held.append(document)
        ids += len(document.ids)
        if len(held) == ROWS_AT_ONCE or ids >= IDS_AT_ONCE:
            yield held
            held, ids = [], 0
    if held:
        yield held
