"""What a run leaves behind: `export/`, in the layouts of `transformers` and `peft`, with a manifest to check it by."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine import families, lora, manifest, weights
from engine.config import RunConfig
from engine.data.prepare import Prepared
from engine.model import DTYPES, Decoder
from engine.selfcheck import Subject, checks_of
from engine.together import together
from engine.tokenizer import Tokenizer

FOLDER = "export"
NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float16: "float16"}
"""As `config.json` spells them."""


def export(
    run: RunConfig,
    run_dir: Path,
    decoder: Decoder,
    tokenizer: Tokenizer,
    prepared: Prepared,
    *,
    report: Callable[[int, int], None],
    warn: Callable[[str], None],
    step: int,
) -> Path:
    """Write `export/` as a whole: it has its name when everything is in it. Every rank calls this together.

    `report(done, total)` counts folders; `warn` is told of each self-check that fails;
    `step` is the one whose weights these are.
    """
    mesh = decoder.mesh
    unfinished, path = run_dir / f".{FOLDER}.unfinished", run_dir / FOLDER
    parts = parts_of(run, run_dir, decoder, tokenizer)
    try:
        with together(mesh):
            if mesh.world_rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
        for done, (name, write) in enumerate(parts.items()):
            report(done, len(parts))
            with together(mesh):
                write(unfinished / name)
        report(len(parts), len(parts))
        with together(mesh):
            if mesh.world_rank == 0:
                went_on = mesh.stopwatch.whereabouts.go_on
                checks = list(checks_of(Subject(run, run_dir, unfinished, decoder.shape, prepared, went_on)))
                for check in checks:
                    if not check.passed:
                        warn(f"self-check {check.name} of the export failed: {check.message}")
                manifest.write(run, run_dir, unfinished, data=prepared.files, checks=checks, step=step)
                shutil.rmtree(path, ignore_errors=True)
                unfinished.rename(path)
    except BaseException:
        if mesh.world_rank == 0:
            # A full disk must have room to say so.
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return path


def parts_of(
    run: RunConfig, run_dir: Path, decoder: Decoder, tokenizer: Tokenizer
) -> dict[str, Callable[[Path], None]]:
    """The folders that the run asks for, and how each is written."""

    def model(folder: Path) -> None:
        dtype = dtype_of(run, run_dir)
        if run.lora is None or run.base is None:
            state = weights.whole_state(decoder)
        else:
            state = lora.merged_state(decoder, run_dir / run.base)
        weights.write(decoder, folder, state, dtype)
        if decoder.mesh.world_rank == 0:
            describe(folder, run, run_dir, decoder, tokenizer, dtype)

    def adapter(folder: Path) -> None:
        assert run.lora is not None
        lora.save_adapter(decoder, run.lora, folder, base_name=run.export.base_name or str(run.base))
        if decoder.mesh.world_rank == 0:
            describe_text(folder, run, run_dir, tokenizer)

    def one_file(folder: Path) -> None:
        if decoder.mesh.world_rank == 0:
            # Few runs need what this imports.
            from engine import gguf_file

            went_on = decoder.mesh.stopwatch.whereabouts.go_on
            gguf_file.write(folder.parent / "model", folder / gguf_file.NAME, went_on=went_on)

    written = {
        "adapter": (adapter, run.lora is not None),
        "model": (model, run.lora is None or run.export.merged),
        "gguf": (one_file, run.export.gguf),
    }
    return {name: write for name, (write, asked) in written.items() if asked}


def describe(
    folder: Path, run: RunConfig, run_dir: Path, decoder: Decoder, tokenizer: Tokenizer, dtype: torch.dtype
) -> None:
    """Write what `transformers` wants to know beside the weights."""
    ids = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
    config = families.config_of(decoder.shape, **ids, dtype=NAMES[dtype])
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    describe_text(folder, run, run_dir, tokenizer)


def describe_text(folder: Path, run: RunConfig, run_dir: Path, tokenizer: Tokenizer) -> None:
    """Write the tokenizer with its template, and where and how generation begins, samples and ends."""
    own: dict[str, Any] = {
        name: identity
        for name, identity in (("bos_token_id", tokenizer.bos_id), ("pad_token_id", tokenizer.pad_id))
        if identity is not None
    }
    base = {} if run.base is None else generation_of(run_dir / run.base)
    if run.tokenizer.type != "base":
        # Other ids than the base's.
        base = {name: value for name, value in base.items() if not name.endswith("_token_id")}
    ends = base.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    generation = own | {name: value for name, value in base.items() if value is not None}
    # An answer ends where a turn does, which a base that never chatted doesn't know, besides where a text does.
    generation["eos_token_id"] = list(dict.fromkeys([*ends, *tokenizer.stop_ids]))
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(folder)


def generation_of(base: Path) -> dict[str, Any]:
    """How the base's makers say that text of it begins, is sampled and ends; ids may stand in `config.json` alone."""
    config: dict[str, Any]
    generation: dict[str, Any]
    config, generation = (
        json.loads(path.read_text(encoding="utf-8")) if (path := base / name).is_file() else {}
        for name in ("config.json", "generation_config.json")
    )
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    # Some write -1 for none.
    return {name: config[name] for name in ids if config.get(name) not in (None, -1)} | generation


def dtype_of(run: RunConfig, run_dir: Path) -> torch.dtype:
    """The type of the exported weights."""
    if run.export.dtype != "keep":
        return DTYPES[run.export.dtype]
    if run.base is not None:
        return weights.read_dtype(run_dir / run.base)
    return DTYPES[run.training.precision]
