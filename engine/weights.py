"""Weights from and to a folder in Hugging Face's layout, one file or pieces with an index; cut on load, whole on save.

What families call their tensors is `engine.naming`'s business, `config.json` `engine.families`', and which tokens go
with it the tokenizer's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine import inventory, tensorfile
from engine.config import ModelShape
from engine.families import shape_of_config
from engine.fused import read, to_files
from engine.gather import wholes
from engine.inventory import EMBEDDING, HEAD, INDEX, SINGLE, InvalidWeights, shown
from engine.model import Decoder
from engine.naming import Stored, stored, with_prefix
from engine.placement import Placement, placement_of
from engine.together import together

SHARD_BYTES = 5 * 10**9
"""Largest file written, as `transformers` splits; one tensor may exceed it."""


def read_shape(directory: Path) -> ModelShape:
    """The shape that `directory/config.json` describes. Raises ValueError naming what is missing or not supported."""
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{shown(path)} is not there; a model folder needs a config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{shown(path)}: not JSON: {error}") from error
    return shape_of_config(config)


def read_dtype(directory: Path) -> torch.dtype:
    """The type that the folder's embedding is stored in. Raises ValueError as `read_shape` and `load` do."""
    with Folder(directory, read_shape(directory)) as folder:
        return folder.piece(EMBEDDING, Placement(folder.shape(EMBEDDING), 0, 0, 1)).dtype


def load(decoder: Decoder, directory: Path) -> None:
    """Fill the decoder's parameters, each rank reading its own piece, in the decoder's dtype.

    Adapters are left as they are. Raises InvalidWeights where a file is damaged, a tensor is missing, unknown or of
    another shape, is no number, or where a tied model's `lm_head.weight` is not its embedding; then no rank goes on.
    """
    inventory.check(directory, decoder.shape)
    with together(decoder.mesh), Folder(directory, decoder.shape) as folder, torch.no_grad():
        if (
            decoder.shape.tie_embeddings
            and folder.has(HEAD)
            and not torch.equal(folder.whole(HEAD), folder.whole(EMBEDDING))
        ):
            raise InvalidWeights(inventory.untied(decoder.shape))
        for name, parameter in decoder.mesh.stopwatch.whereabouts.through(decoder.named_parameters()):
            if ".adapter." in name:
                continue
            placement = placement_of(parameter)
            parameter.zero_()
            placement.true_part(parameter).copy_(folder.piece(name, placement))
            # Else the first loss would not be finite, and the data be blamed for it. A row that only ids look up does
            # no harm as long as no text has that id, and is found by the line where one has.
            looked_up = name == EMBEDDING and not decoder.shape.tie_embeddings
            if not looked_up and not parameter.isfinite().all():
                own = stored(decoder.shape, name).name
                raise InvalidWeights(
                    f"{directory.name}: {own} has NaN or infinity among its values, so the model was broken before it "
                    "was saved; take an earlier one"
                )


def whole_state(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Name and global host tensor of each parameter that is not an adapter's, one at a time.

    All ranks that hold a model between them go through it together, for each tensor is gathered from them.
    """
    return wholes(decoder, ((name, p) for name, p in decoder.named_parameters() if ".adapter." not in name))


def save(decoder: Decoder, directory: Path, dtype: torch.dtype) -> None:
    """Write the decoder's weights to `directory`; adapters are left out. Every rank calls it, world rank 0 writes."""
    write(decoder, directory, whole_state(decoder), dtype)


def write(
    decoder: Decoder,
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write global tensors in `dtype`, as the family's files have them, in one or in pieces of at most `shard_bytes`.

    `tensors` may gather as it goes, so the ranks that it gathers from all exhaust it; world rank 0 alone keeps and
    writes, a piece's worth at a time.
    """
    if decoder.mesh.rank("replicas") != 0 and not decoder.mesh.parallel.is_shared_out:
        return
    if decoder.mesh.world_rank != 0:
        for _ in tensors:
            pass
        return
    tensors = to_files(decoder.shape, tensors)
    pieces: list[tuple[Path, list[str]]] = []
    held: dict[str, Tensor] = {}
    total = parameters = size = 0

    def put() -> None:
        nonlocal held, size
        path = directory / f"piece-{len(pieces)}.safetensors.part"
        tensorfile.write(path, list(held.items()))
        pieces.append((path, list(held)))
        held, size = {}, 0

    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, tensor in tensors:
            kept = tensor.to(device="cpu", dtype=dtype).contiguous()
            if held and size + kept.nbytes > shard_bytes:
                put()
            # A view of a parameter's storage would be written again should the parameter change meanwhile.
            held[name] = kept.clone() if kept.data_ptr() == tensor.data_ptr() else kept
            size, total, parameters = size + kept.nbytes, total + kept.nbytes, parameters + kept.numel()
        put()
    except Exception:
        # The others go on gathering until the last tensor, and would wait for this rank for ever.
        for _ in tensors:
            pass
        raise
    _name_pieces(directory, pieces, total=total, parameters=parameters)


def _name_pieces(directory: Path, pieces: list[tuple[Path, list[str]]], *, total: int, parameters: int) -> None:
    if len(pieces) == 1:
        pieces[0][0].replace(directory / SINGLE)
        return
    placed: dict[str, str] = {}
    for number, (path, names) in enumerate(pieces, start=1):
        file = f"model-{number:05d}-of-{len(pieces):05d}.safetensors"
        path.replace(directory / file)
        placed.update(dict.fromkeys(names, file))
    index = {
        "metadata": {"total_size": total, "total_parameters": parameters},
        "weight_map": dict(sorted(placed.items())),
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class Folder:
    """The tensors of a folder by our names, wherever and however they lie. The index, if any, is the authority.

    Raises InvalidWeights, where a file is damaged or a tensor missing, from `with` and whatever asks for a tensor.
    """

    def __init__(self, directory: Path, shape: ModelShape) -> None:
        self.directory, self.model = directory, shape
        self._open = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Folder:
        # By the name that a file should have used: its own, and where it lies.
        self._where = {
            with_prefix(self.model, name): (name, file) for name, file in inventory.located(self.directory).items()
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def has(self, name: str) -> bool:
        """Whether our tensor is in the files."""
        return stored(self.model, name).name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        """Of our whole tensor, as the file has it."""
        there = stored(self.model, name)
        outputs, *inputs = self._shape(there)[:: -1 if there.transposed else 1]
        return (outputs // there.parts, *inputs)

    def check(self, name: str, whole: tuple[int, ...]) -> None:
        """Raise InvalidWeights where our tensor is not of this shape in the files."""
        there = stored(self.model, name)
        if self._shape(there) != there.shape(whole):
            raise InvalidWeights(
                f"{self.directory.name}: {there.name} has shape {list(self._shape(there))}; "
                f"config.json says {list(there.shape(whole))}"
            )

    def piece(self, name: str, placement: Placement) -> Tensor:
        """What a rank holds of our tensor. Raises InvalidWeights where the file's has another shape."""
        there, whole = stored(self.model, name), placement.shape
        self.check(name, whole)
        if placement.dim is None:
            return read(there, partial(self._window, there.name), whole, 0, 0, whole[0])
        return read(there, partial(self._window, there.name), whole, placement.dim, placement.start, placement.length)

    def whole(self, name: str) -> Tensor:
        """Our whole tensor."""
        return self.piece(name, Placement(self.shape(name)))

    def _shape(self, there: Stored) -> tuple[int, ...]:
        return tuple(self._slice(there.name).get_shape())

    def _window(self, name: str, dim: int, start: int, length: int) -> Tensor:
        window: Tensor = self._slice(name)[(slice(None),) * dim + (slice(start, start + length),)]
        return window

    def _slice(self, name: str) -> Any:
        if name not in self._where:
            hint = " (or set tie_word_embeddings to true)" if name == HEAD else ""
            raise InvalidWeights(f"{self.directory.name}: tensor {name} is missing{hint}")
        own, file = self._where[name]
        return self._file(file).get_slice(own)

    def _file(self, file: str) -> Any:
        if file not in self._files:
            path = self.directory / file
            if not path.is_file():
                raise InvalidWeights(
                    f"{shown(path)} is not there; a model folder needs {SINGLE}, or {INDEX} and its pieces"
                )
            try:
                self._files[file] = self._open.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise InvalidWeights(f"{shown(path)} is damaged or cut short: {error}; fetch it again") from error
        return self._files[file]
