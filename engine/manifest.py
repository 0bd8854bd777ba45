"""What an export is and what made it: `manifest.json`, the last file of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint import MANIFEST, sha256_of
from engine.config import RunConfig
from engine.data.prepare import FileRead
from engine.selfcheck import Check

SPEC = "spec.json"
"""In the run directory, if whoever made the run has something to say of it: any JSON, which is taken over as it is."""


def write(
    run: RunConfig, run_dir: Path, folder: Path, *, data: Sequence[FileRead], checks: Sequence[Check], **more: Any
) -> None:
    """Describe every file below `folder` in `folder/manifest.json`."""
    spec = run_dir / SPEC
    described = {
        "files": [
            {"path": file.relative_to(folder).as_posix(), "bytes": file.stat().st_size, "sha256": sha256_of(file)}
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        ],
        "checks": [asdict(check) for check in checks],
        "data": [asdict(file) for file in data],
        "spec": json.loads(spec.read_text(encoding="utf-8")) if spec.is_file() else None,
        "run": run.model_dump(mode="json"),
        **more,
        "code_version": code_version(),
        "code_sha256": code_sha256(),
        "torch": torch.__version__,
        "seed": run.training.seed,
        "layout": run.parallel.model_dump(),
    }
    (folder / MANIFEST).write_text(json.dumps(described, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def code_version() -> str:
    try:
        return metadata.version("trainshed")
    except metadata.PackageNotFoundError:
        # A checkout that was never installed trains as well.
        return "unknown"


def code_sha256() -> str:
    """Of the engine's sources, by name and content: two of one version may differ."""
    package, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
