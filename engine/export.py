"""What a run leaves behind: `export/`, in the layouts of `transformers` and `peft`, with a manifest to check it by."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from engine import families, lora, weights
from engine.checkpoint import MANIFEST, sha256_of
from engine.config import RunConfig
from engine.model import DTYPES, Decoder
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
    report: Callable[[int, int], None],
    *,
    step: int,
) -> Path:
    """Write `export/` as a whole: it has its name when everything is in it. Every rank calls this together.

    `report(done, total)` counts folders; `step` is the one whose weights these are.
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
                (unfinished / MANIFEST).write_text(
                    json.dumps(manifest(run, run_dir, unfinished, step=step), indent=1) + "\n"
                )
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
            tokenizer.save(folder)

    if run.lora is None:
        return {"model": model}
    return {"adapter": adapter, **({"model": model} if run.export.merged else {})}


def describe(
    folder: Path, run: RunConfig, run_dir: Path, decoder: Decoder, tokenizer: Tokenizer, dtype: torch.dtype
) -> None:
    """Write what `transformers` wants to know beside the weights."""
    ids = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
    config = families.config_of(decoder.shape, **ids, dtype=NAMES[dtype])
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation: dict[str, Any] = {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
    if run.base is not None and (run_dir / run.base / "generation_config.json").is_file():
        # It says how the base's makers sample.
        generation = json.loads((run_dir / run.base / "generation_config.json").read_text())
    # An answer ends where a turn does, which a base that never chatted doesn't know, besides where a text does.
    ends = generation.get("eos_token_id") or []
    generation["eos_token_id"] = list(
        dict.fromkeys([*(ends if isinstance(ends, list) else [ends]), *tokenizer.stop_ids])
    )
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.save(folder)


def dtype_of(run: RunConfig, run_dir: Path) -> torch.dtype:
    """The type of the exported weights."""
    if run.export.dtype != "keep":
        return DTYPES[run.export.dtype]
    if run.base is not None:
        return weights.read_dtype(run_dir / run.base)
    return DTYPES[run.training.precision]


def manifest(run: RunConfig, run_dir: Path, folder: Path, *, step: int) -> dict[str, Any]:
    """Every file below `folder` with its hash, and what it was made from."""
    data = [path for path in (*run.data.train, run.data.validation) if isinstance(path, Path)]
    return {
        "files": [
            {"path": file.relative_to(folder).as_posix(), "bytes": file.stat().st_size, "sha256": sha256_of(file)}
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        ],
        "run": run.model_dump(mode="json"),
        "step": step,
        "code_version": code_version(),
        "torch": torch.__version__,
        "seed": run.training.seed,
        "data": [{"path": path.as_posix(), "sha256": sha256_of(run_dir / path)} for path in data],
        "layout": run.parallel.model_dump(),
    }


def code_version() -> str:
    try:
        return metadata.version("trainshed")
    except metadata.PackageNotFoundError:
        # A checkout that was never installed trains as well.
        return "unknown"
