"""A whole model, as a finished run exports it, from a run and one of its checkpoints, or its adapter.

Of any layout, in one process on the host: `python -m engine export RUN_JSON --checkpoint DIR --into DIR`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from engine import checkpoint, lora, mesh, weights
from engine.config import RunConfig
from engine.export import describe, dtype_of
from engine.failure import RunFailure
from engine.model import Decoder
from engine.optimizer import Piece
from engine.pieces import Rectangle
from engine.placement import placement_of
from engine.tokenizer import Tokenizer

Kind = Literal["checkpoint", "adapter"]


def main(run_file: Path, kind: Kind, part: Path, into: Path) -> None:
    """Write the model of `part` to the folder `into`. Raises ValueError where that can't be done."""
    run = RunConfig.model_validate_json(run_file.read_text(encoding="utf-8"))
    try:
        assemble(run, run_file.parent, kind, part, into)
    except RunFailure as failure:
        raise ValueError(str(failure)) from failure


def assemble(run: RunConfig, run_dir: Path, kind: Kind, part: Path, into: Path) -> None:
    """As `main`; the base, where the run has one, lies in `run_dir` as it did for the run."""
    shape = run.model if run.base is None else weights.read_shape(run_dir / run.base)
    assert shape is not None
    decoder = Decoder(shape, mesh.alone(torch.device("cpu")))
    if run.lora is not None:
        lora.adapt(decoder, run.lora, seed=0)
    if kind == "adapter":
        if run.lora is None:
            raise ValueError("the run trained all weights, so it has no adapter")
        lora.load_adapter(decoder, part)
        tokenizer = Tokenizer.load(part)
    else:
        _load(decoder, run, run_dir, part)
        tokenizer = Tokenizer.load(part / "tokenizer")
    if run.lora is not None and run.base is not None:
        state = lora.merged_state(decoder, run_dir / run.base)
    else:
        state = weights.whole_state(decoder)
    dtype = dtype_of(run, run_dir)
    weights.write(decoder, into, state, dtype)
    describe(into, run, run_dir, decoder, tokenizer, dtype)


def _load(decoder: Decoder, run: RunConfig, run_dir: Path, part: Path) -> None:
    """Fill what the run trains from a checkpoint, without the optimizer's state."""
    checkpoint.verify(part)
    index = json.loads((part / checkpoint.INDEX).read_text(encoding="utf-8"))
    base = checkpoint.fingerprint(run_dir / run.base) if run.lora is not None and run.base else None
    if index["base"] != base:
        raise checkpoint.BadCheckpoint(part, "it was made on other base weights")
    checkpoint.fill(part, index["pieces"], _pieces(decoder))


def _pieces(decoder: Decoder) -> Iterator[Piece]:
    for name, parameter in decoder.named_parameters():
        if parameter.requires_grad:
            placement = placement_of(parameter)
            box = Rectangle((0,) * len(placement.shape), placement.shape)
            yield Piece(name, box, {"weight": placement.true_part(parameter.detach())}, is_kept=True)
