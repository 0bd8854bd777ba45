"""What a model's folder holds, by the headers of its files, and whether that is the model.

Nothing is loaded, and of the weights no more than a sample is read, so it is asked before a job waits for it. Part of
the engine's contract, without torch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Set
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from engine.config import ModelShape
from engine.naming import OUTPUT, naming_of, shapes_of, stored, with_prefix

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", f"{OUTPUT}.weight"
TRAINABLE = {"F32": 4, "BF16": 2, "F16": 2}
"""What weights may be stored as, and bytes of one."""
_OTHERS = {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""
_SAMPLE_BYTES = 2**20
_POINTER = b"version "
"""What a Git LFS pointer begins with. As the length of a header it would be beyond all limits."""


class InvalidWeights(ValueError):
    """The folder's tensors are not those of the model; the message names the file or tensor."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file."""

    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]
    start: int
    """Its first byte, counted from the file's."""
    bytes: int


def shown(path: Path) -> str:
    """A file of a model's folder, for people: where the folder lies on this host is nothing to them."""
    return f"{path.parent.name}/{path.name}"


def check(folder: Path, shape: ModelShape) -> None:
    """Raise InvalidWeights where the folder's tensors are not those of a model of this shape, or can't be trained."""
    where = located(folder)
    files = {file: entries(folder / file) for file in dict.fromkeys(where.values())}
    for own, file in where.items():
        if own not in files[file]:
            raise InvalidWeights(
                f"{shown(folder / INDEX)} has {own} in {file}, and it is not there; copy both files again"
            )
    there = {with_prefix(shape, own): files[file][own] for own, file in where.items()}
    wanted = {}
    for name, sizes in shapes_of(shape).items():
        place = stored(shape, name)
        wanted[place.name] = place.shape(sizes)
    head = {HEAD} if shape.tie_embeddings else set()
    strange = {name for name in there.keys() - wanted.keys() - head if not name.endswith(naming_of(shape).ignored)}
    _check_names(folder, strange, wanted.keys() - there.keys())
    for name, sizes in wanted.items():
        _check_entry(folder, name, there[name], sizes)
    if head and HEAD in there:
        embedding = stored(shape, EMBEDDING).name
        paths = {with_prefix(shape, own): folder / file for own, file in where.items()}
        samples = [_sample(paths[name], there[name]) for name in (HEAD, embedding)]
        if there[HEAD].dtype == there[embedding].dtype and samples[0] != samples[1]:
            raise InvalidWeights(f"{folder.name}: {untied(shape)}")


def untied(shape: ModelShape) -> str:
    """What is wrong with an output layer of its own in a tied model."""
    return (
        f"{HEAD} differs from {stored(shape, EMBEDDING).name}, but tie_word_embeddings is true; "
        f"set it to false in config.json, or leave {HEAD} out"
    )


def _check_names(folder: Path, strange: Set[str], missing: Set[str]) -> None:
    if any(".lora_" in name for name in strange):
        hint = "it is an adapter's: merge that into its base first, as peft's merge_and_unload does"
    elif missing:
        hint = f"{min(missing)} is missing, so config.json may be another model's"
    else:
        hint = "config.json may be another model's"
    if strange:
        raise InvalidWeights(f"{folder.name}: tensor {min(strange)} is not part of the model; {hint}")
    if missing:
        hint = " (or set tie_word_embeddings to true)" if min(missing) == HEAD else ""
        raise InvalidWeights(f"{folder.name}: tensor {min(missing)} is missing{hint}")


def _check_entry(folder: Path, name: str, entry: Entry, sizes: tuple[int, ...]) -> None:
    if entry.shape != sizes:
        raise InvalidWeights(f"{folder.name}: {name} has shape {list(entry.shape)}; config.json says {list(sizes)}")
    if entry.dtype not in TRAINABLE:
        advice = "save it as one of these" if entry.dtype == "F64" else "take the model as it was before quantisation"
        raise InvalidWeights(
            f"{folder.name}: {name} is {entry.dtype}, and only {', '.join(TRAINABLE)} can be trained; {advice}"
        )


def _sample(path: Path, entry: Entry) -> bytes:
    with path.open("rb") as file:
        file.seek(entry.start)
        return file.read(min(entry.bytes, _SAMPLE_BYTES))


def located(folder: Path) -> dict[str, str]:
    """Which file each tensor is in, by the names in the files. The index, if any, is the authority."""
    index = folder / INDEX
    if not index.is_file():
        return dict.fromkeys(entries(folder / SINGLE), SINGLE)
    try:
        where: Mapping[str, Any] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidWeights(
            f"{shown(index)} is damaged: it has no weight_map that can be read; copy it again"
        ) from error
    for file in where.values():
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise InvalidWeights(f"{shown(index)} names files outside its folder: {file!r} is not a file of the folder")
    return dict(where)


def entries(path: Path) -> dict[str, Entry]:
    """The tensors of a file, by name. Its length must be what its header promises: so a broken download is found."""
    name = shown(path)
    if not path.is_file():
        raise InvalidWeights(
            f"{name} is not there; weights must be safetensors, {SINGLE} or {INDEX} and its pieces (pickled .bin files "
            "are not read)"
        )
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == _POINTER:
            raise InvalidWeights(f"{name} is a Git LFS pointer and not the weights; fetch these with git lfs pull")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER_BYTES + 1
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise InvalidWeights(f"{name} is cut short, or no safetensors file; copy it again")
        try:
            header = json.loads(file.read(length))
            found = {key: _entry(said, 8 + length) for key, said in header.items() if key != "__metadata__"}
        except (ValueError, KeyError, AttributeError, TypeError, IndexError, RecursionError) as error:
            raise InvalidWeights(f"{name} has a damaged header; copy it again") from error
    end = 8 + length
    for key, entry in sorted(found.items(), key=lambda item: (item[1].start, item[1].bytes)):
        if entry.start != end:
            raise InvalidWeights(f"{name} has a damaged header: {key} does not begin where the one before ends")
        end += entry.bytes
    if end != size:
        raise InvalidWeights(
            f"{name} is damaged or cut short: it has {size:,} bytes, and its header promises {end:,}; copy it again"
        )
    return found


def _entry(said: Any, base: int) -> Entry:
    start, end = said["data_offsets"]
    sizes, dtype = tuple(said["shape"]), said["dtype"]
    if not all(type(number) is int and number >= 0 for number in (start, end - start, *sizes)):
        raise ValueError("sizes and offsets are whole numbers")
    width = (TRAINABLE | _OTHERS).get(dtype)
    if width is not None and prod(sizes) * width != end - start:
        raise ValueError("as many bytes as the shape needs")
    return Entry(str(dtype), sizes, base + start, end - start)
