"""What a run needs to go on, in files, by global name, shape and offset: any layout loads what any other saved.

A checkpoint is a folder. Each rank writes the boxes that only it keeps, as safetensors; `index.json` says which box of
which parameter each tensor is; `manifest.json` has the sha256 of every file. It is written under a temporary name,
made durable, and renamed: what has the final name is whole, unless the disk lies, which the manifest shows. When all
that happens is `engine.saving`'s business.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from engine import tensorfile
from engine.course import Course
from engine.failure import RunFailure
from engine.optimizer import AnyOptimizer, Fillable, Piece
from engine.pieces import Rectangle
from engine.together import together

INDEX = "index.json"
MANIFEST = "manifest.json"
FORMAT = 2
SAMPLE_BYTES = 2**14
"""Of each tensor, in a fingerprint: training changes next to every number of a matrix."""


class BadCheckpoint(RunFailure):
    """The checkpoint can't be resumed from."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__("internal", f"checkpoint {path.name}: {why}", "Resume from another checkpoint, or start anew.")


@dataclass(frozen=True)
class Facts:
    """Where the run stands, beside its tensors."""

    step: int
    """Optimizer steps done."""
    tokens: int
    """Trained on so far."""
    rows: int
    """Taken so far from the loader's line of rows."""
    seed: int
    """Data order and initial weights follow from it."""
    base: str | None = None
    """Fingerprint of the frozen weights that adapters belong to; None where the checkpoint holds all weights."""
    scale: float | None = None
    """What the adapters are multiplied by; None where there are none, or from an engine that did not say."""
    course: Course = field(default_factory=Course)
    """How the validation loss has gone."""


@dataclass(frozen=True)
class Snapshot:
    """What one rank has to save, as it was at one moment: training goes on without changing it."""

    facts: Facts
    rank: int
    tensors: list[tuple[str, Tensor]]
    """On the host, by their name in the file."""
    pieces: list[dict[str, Any]]
    """Which box of which parameter each of them is, for the index."""
    about: dict[str, Any]
    """What the index says of the whole: the same on every rank."""

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors)


def folder_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is published."""
    return folder / f"step-{step:08d}"


def unfinished(path: Path) -> Path:
    """Where the checkpoint to be published as `path` is written."""
    return path.with_name(f".{path.name}.unfinished")


def make_room(folder: Path) -> None:
    """Make the folder of checkpoints durable, and remove what a run that was killed left half made or half removed."""
    folder.mkdir(exist_ok=True)
    sync(folder.parent)
    for left in folder.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)


def take(optimizer: AnyOptimizer, facts: Facts) -> Snapshot:
    """Copy what this rank has to save to the host."""
    names, pieces, tensors = [], [], []
    for piece in optimizer.pieces():
        if not piece.is_kept:
            continue
        for key, tensor in piece.tensors.items():
            name = f"{key}/{piece.parameter}/{'-'.join(map(str, piece.box.offset))}"
            names.append(name)
            tensors.append(tensor)
            pieces.append({"parameter": piece.parameter, "key": key, "tensor": name, **asdict(piece.box)})
    about = {
        "format": FORMAT,
        **asdict(facts),
        "updates": optimizer.steps,
        "layout": optimizer.mesh.parallel.model_dump(),
        "parameters": optimizer.shapes,
    }
    copies = on_host(tensors)
    return Snapshot(facts, optimizer.mesh.world_rank, list(zip(names, copies, strict=True)), pieces, about)


def on_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies on the host. What lies on a device is copied there and then, and the host waits for it once."""
    copies, device = [], None
    for tensor in tensors:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies.append(copy.copy_(tensor, non_blocking=tensor.is_cuda))
        device = tensor.device
    if device is not None and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return copies


def write(path: Path, snapshot: Snapshot, *, wrote: Callable[[], object] = lambda: None) -> None:
    """Write a rank's boxes, and what they are into a note for rank 0. Leaves neither where it fails.

    `wrote` is called after each tensor.
    """
    name = f"rank-{snapshot.rank:05d}"
    file, note = path / f"{name}.safetensors", path / f"{name}.note"
    try:
        sha256 = tensorfile.write(file, snapshot.tensors, wrote=wrote)
        note.write_text(json.dumps({"file": file.name, "sha256": sha256, "pieces": snapshot.pieces}))
    except BaseException:
        # A full disk must have room to say so.
        for left in (file, note):
            left.unlink(missing_ok=True)
        raise


def finish(path: Path, about: dict[str, Any]) -> None:
    """Turn the ranks' notes into the index and the manifest, which goes last, and make all of it durable."""
    notes = [json.loads(note.read_text()) for note in sorted(path.glob("*.note"))]
    pieces = [{**piece, "file": note["file"]} for note in notes for piece in note["pieces"]]
    (path / INDEX).write_text(json.dumps({**about, "pieces": pieces}))
    for note in path.glob("*.note"):
        note.unlink()
    known = {note["file"]: note["sha256"] for note in notes}
    files = [
        {
            "path": str(file.relative_to(path)),
            "bytes": file.stat().st_size,
            "sha256": known.get(file.name) or sha256_of(file),
        }
        for file in sorted(path.rglob("*"))
        if file.is_file()
    ]
    (path / MANIFEST).write_text(json.dumps({"files": files}, indent=1))
    for file in files:
        if file["path"] not in known:
            sync(path / str(file["path"]))
    sync(path / MANIFEST)
    for inner in path.rglob("*"):
        if inner.is_dir():
            sync(inner)
    sync(path)


def size_of(path: Path) -> int:
    """Bytes of all files of a checkpoint."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def publish(path: Path) -> None:
    """Give a whole checkpoint its final name; an earlier one of that name goes."""
    going = set_aside(path)
    unfinished(path).rename(path)
    sync(path.parent)
    if going is not None:
        shutil.rmtree(going)


def prune(folder: Path, *, keep: int, spare: int | None = None) -> None:
    """Remove all but the `keep` checkpoints published last and that of step `spare`.

    What somebody else put there is none.
    """
    spared = None if spare is None else folder_of(folder, spare)
    manifests = [path for path in folder.glob(f"step-*/{MANIFEST}") if path.is_file()]
    for manifest in sorted(manifests, key=lambda path: path.stat().st_mtime_ns)[:-keep]:
        if manifest.parent != spared:
            remove(manifest.parent)


def remove(path: Path) -> None:
    """Remove a checkpoint, so that what still has its name is whole at any moment."""
    if (going := set_aside(path)) is not None:
        shutil.rmtree(going)


def set_aside(path: Path) -> Path | None:
    """Take a checkpoint's name away; where it lies then, or None where there is none."""
    if not path.exists():
        return None
    going = path.with_name(f".{path.name}.going")
    shutil.rmtree(going, ignore_errors=True)
    return path.rename(going)


def load(path: Path, optimizer: Fillable, *, base: str | None, scale: float | None = None) -> Facts:
    """Fill the optimizer and the weights from a checkpoint of any layout. Every rank calls this together.

    `base` is the fingerprint of the frozen weights in use, `scale` what adapters are multiplied by. Raises
    BadCheckpoint where the checkpoint is damaged, or is one of another model.
    """
    mesh = optimizer.mesh
    with together(mesh):
        verify(path, share=mesh.world_rank, shares=mesh.parallel.ranks)
        index = json.loads((path / INDEX).read_text())
        check_fits(path, index, optimizer, base=base, scale=scale)
        fill(path, index["pieces"], mesh.stopwatch.whereabouts.through(optimizer.pieces()))
        optimizer.steps = index["updates"]
    optimizer.publish()
    return facts_of(index)


def facts_of(index: dict[str, Any]) -> Facts:
    # What an older engine did not say has its default.
    known = {each.name: index[each.name] for each in fields(Facts) if each.name in index}
    return Facts(**known | {"course": Course(**known.get("course", {}))})


def verify(path: Path, *, share: int = 0, shares: int = 1) -> None:
    """Compare every `shares`-th file with the manifest, from number `share`; raise BadCheckpoint where one differs."""
    if not path.is_dir():
        raise BadCheckpoint(path, "it is not there")
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        raise BadCheckpoint(path, "it has no manifest.json, so it was never finished") from None
    except ValueError:
        raise BadCheckpoint(path, "its manifest.json is not readable") from None
    for file in files[share::shares]:
        name = file["path"]
        if not (path / name).is_file():
            raise BadCheckpoint(path, f"{name} is missing")
        if (size := (path / name).stat().st_size) != file["bytes"]:
            raise BadCheckpoint(path, f"{name} has {size} bytes where its manifest says {file['bytes']}")
        if sha256_of(path / name) != file["sha256"]:
            raise BadCheckpoint(path, f"{name} is damaged: its sha256 is not the manifest's")


def check_fits(
    path: Path, index: dict[str, Any], optimizer: Fillable, *, base: str | None, scale: float | None
) -> None:
    """Raise BadCheckpoint where the checkpoint is not one of this model."""
    if index["format"] != FORMAT:
        raise BadCheckpoint(path, f"it has format {index['format']}, and this version reads {FORMAT}")
    if index["base"] != base:
        raise BadCheckpoint(path, "it was made on other base weights")
    if (before := facts_of(index).scale) is not None and scale is not None and before != scale:
        raise BadCheckpoint(
            path,
            f"its adapters were trained with a scale of {before:g} and this run's is {scale:g}, which would change "
            "what they do; leave lora.alpha, lora.rank and lora.rslora as they were",
        )
    saved, wanted = index["parameters"], optimizer.shapes
    for name in saved.keys() | wanted.keys():
        if saved.get(name) != wanted.get(name):
            raise BadCheckpoint(
                path, f"{name} has shape {saved.get(name)} there and {wanted.get(name)} in this model (None: not in it)"
            )


def fill(path: Path, saved: Iterable[dict[str, Any]], pieces: Iterable[Piece]) -> None:
    """Copy into `pieces` what the files hold of them."""
    by_parameter: dict[tuple[str, str], list[tuple[Rectangle, str, str]]] = defaultdict(list)
    for entry in saved:
        box = Rectangle(tuple(entry["offset"]), tuple(entry["size"]))
        by_parameter[entry["parameter"], entry["key"]].append((box, entry["file"], entry["tensor"]))
    files: dict[str, Any] = {}
    for piece in pieces:
        for key, tensor in piece.tensors.items():
            filled = 0
            for box, file, name in by_parameter[piece.parameter, key]:
                if (both := piece.box.overlap(box)) is None:
                    continue
                if file not in files:
                    files[file] = safe_open(path / file, framework="pt")
                part = files[file].get_slice(name)[both.within(box)]
                tensor[both.within(piece.box)].copy_(part)
                filled += prod(both.size)
            if filled != prod(piece.box.size):
                raise BadCheckpoint(path, f"it lacks a part of {piece.parameter}")


def fingerprint(base: Path) -> str:
    """Tells base weights apart without reading all of them: configuration, each file's header, each tensor's start."""
    digest = hashlib.sha256((base / "config.json").read_bytes())
    for path in sorted(base.glob("*.safetensors")):
        with path.open("rb") as file:
            size = file.read(8)
            header = file.read(int.from_bytes(size, "little"))
            digest.update(size + header)
            data = file.tell()
            tensors = (entry for name, entry in json.loads(header).items() if name != "__metadata__")
            for start, end in sorted(entry["data_offsets"] for entry in tensors):
                file.seek(data + start)
                digest.update(file.read(min(end - start, SAMPLE_BYTES)))
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
