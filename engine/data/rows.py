"""Token ids on disk, and the rows made of them: flat arrays, mapped into memory. `packing` says what makes a row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_SEGMENT = np.dtype([("start", "<i8"), ("length", "<i4"), ("file", "<i4"), ("line", "<i8")])


@dataclass(frozen=True)
class Document:
    """What stands in a row of one example, or of one text."""

    file: int
    """Number among the files that were read."""
    line: int
    tokens: Array
    trained: Array


@dataclass(frozen=True)
class Row:
    """One row in full; every array has `width` places."""

    tokens: Array
    trained: Array
    """Whether the id at that place counts as a label."""
    documents: Array
    """Number of the document within the row, from 0; what fills the row has one of its own."""
    positions: Array
    """From 0 in each document."""
    filled: int
    """Places that are not padding, which stands at the end."""


class Rows:
    """Rows of `width` ids each: `seq_len` inputs, and the last one as a label only."""

    def __init__(self, folder: Path, *, width: int, pad_id: int, members: Array, bounds: Array) -> None:
        """`members` numbers segments of the store in `folder`; row i is those from `bounds[i]` to `bounds[i + 1]`."""
        facts = json.loads((folder / "store.json").read_text(encoding="utf-8"))
        self.width = width
        self.pad_id = pad_id
        self._tokens = _mapped(folder / "tokens.bin", np.dtype(facts["dtype"]))
        self._trained = _mapped(folder / "trained.bin", np.dtype(np.bool_))
        self._segments = _mapped(folder / "segments.bin", _SEGMENT)
        self._members = members
        self._bounds = bounds
        self.references: Array | None = None
        """Where documents are answers in pairs, the better one first: fp64 log-probability of each document of each
        row, one row after another, that they are compared with."""
        lengths = self._segments["length"][members].astype(np.int64)
        sums = np.concatenate([[0], np.cumsum(lengths)])
        self.filled: Array = sums[bounds[1:]] - sums[bounds[:-1]]
        """For each row, the places that are not padding."""
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @property
    def seq_len(self) -> int:
        return self.width - 1

    @property
    def tokens(self) -> int:
        """Inputs in all rows, padding left out."""
        return int(np.minimum(self.filled, self.seq_len).sum())

    def pairs(self, window: int | None = None) -> Array:
        """For each row, (token, token of the same document), padding left out: what attention works on.

        With a `window` a token of a longer document pairs with as many as that.
        """
        inputs = self._lengths.copy()
        # The last id of a full row is a label only.
        inputs[self._bounds[1:][self.filled == self.width] - 1] -= 1
        attended = inputs if window is None else np.minimum(inputs, window)
        sums = np.concatenate([[0], np.cumsum(inputs * attended)])
        pairs: Array = sums[self._bounds[1:]] - sums[self._bounds[:-1]]
        return pairs

    def row(self, index: int) -> Row:
        tokens = np.full(self.width, self.pad_id, dtype=np.int64)
        trained = np.zeros(self.width, dtype=np.bool_)
        segments = self._segments[self._members[self.place(index)]]
        documents = np.full(self.width, len(segments), dtype=np.int64)
        positions = np.empty(self.width, dtype=np.int64)
        at = 0
        for number, segment in enumerate(segments):
            start, end = int(segment["start"]), at + int(segment["length"])
            tokens[at:end] = self._tokens[start : start + end - at]
            trained[at:end] = self._trained[start : start + end - at]
            documents[at:end] = number
            positions[at:end] = np.arange(end - at)
            # The first id of a document has nothing before it to be predicted from.
            trained[at] = False
            at = end
        positions[at:] = np.arange(self.width - at)
        return Row(tokens, trained, documents, positions, at)

    @property
    def documents(self) -> int:
        """In all rows."""
        return len(self._members)

    def place(self, index: int) -> slice:
        """Where the documents of a row stand among those of all rows."""
        return slice(int(self._bounds[index]), int(self._bounds[index + 1]))

    def digest(self) -> str:
        """Tells rows apart by what is in them."""
        digest = hashlib.sha256()
        for array in (self._tokens, self._trained, self._segments, self._members, self._bounds):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def first(self, count: int) -> list[Document]:
        """Those of the documents in these rows that were read first, in that order, at most `count`."""
        members = np.asarray(self._members)
        chosen = np.sort(np.partition(members, count)[:count] if len(members) > count else members)
        documents = []
        for file, line, start, length in self._segments[chosen][["file", "line", "start", "length"]].tolist():
            place = slice(start, start + length)
            documents.append(Document(file, line, np.asarray(self._tokens[place]), np.asarray(self._trained[place])))
        return documents

    def origin(self, document: int) -> tuple[int, int]:
        """File number and line of a document, by its place among those of all rows."""
        segment = self._segments[self._members[document]]
        return int(segment["file"]), int(segment["line"])

    def all_origins(self) -> tuple[Array, Array]:
        """File number and line of each document of all rows."""
        segments = self._segments[self._members]
        return segments["file"], segments["line"]

    def origins(self, index: int) -> list[tuple[int, int]]:
        """File number and line of each document in a row."""
        segments = self._segments[self._members[self.place(index)]]
        return [(int(segment["file"]), int(segment["line"])) for segment in segments]

    def labels(self) -> int:
        """Label tokens in all rows. Reads every row once."""
        return sum(int(self.row(index).trained.sum()) for index in range(len(self)))


class Store:
    """Writes ids as they come. Documents are appended in pieces; segments of them are named afterwards."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """For ids below `vocab_size`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.vocab_size = vocab_size
        self.dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        self.length = 0
        """Ids written so far."""
        self._files: dict[str, BinaryIO] = {
            name: (folder / f"{name}.bin").open("wb") for name in ("tokens", "trained", "segments")
        }

    def append(self, ids: Sequence[int] | Array, trained: Sequence[bool] | None = None) -> None:
        """Write ids; without `trained` all of them are learned. Raises ValueError for one that has no room here."""
        given = np.asarray(ids)
        # NumPy would keep the low bits of a larger one and say nothing.
        if len(given) and not 0 <= given.min() <= given.max() < self.vocab_size:
            raise ValueError(f"ids from {given.min()} to {given.max()} are not all among {self.vocab_size} entries")
        self._files["tokens"].write(given.astype(self.dtype).tobytes())
        marks = np.ones(len(ids), dtype=np.bool_) if trained is None else np.asarray(trained, dtype=np.bool_)
        self._files["trained"].write(marks.tobytes())
        self.length += len(ids)

    def segments(self, segments: Iterable[tuple[int, int, int, int]]) -> None:
        """Name pieces of what was written: start, length, file, line."""
        self._files["segments"].write(np.array(list(segments), dtype=_SEGMENT).tobytes())

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        (self.folder / "store.json").write_text(json.dumps({"dtype": self.dtype.str}), encoding="utf-8")


def _mapped(path: Path, dtype: np.dtype[Any]) -> Array:
    # An empty file can't be mapped.
    if not path.stat().st_size:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")
