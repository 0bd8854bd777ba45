"""Packages that some tests need and no installation of ours has: fetched once and kept, like what pip keeps."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

KEPT = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trainshed-tests"


def packages(*requirements: str, dependencies: bool = False) -> Path:
    """A folder to put before others on PYTHONPATH. The test is skipped where no package index is in reach."""
    kept = KEPT / "+".join(requirements)
    if not kept.is_dir():
        part = kept.with_name(f"{kept.name}.{os.getpid()}")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(part)]
        pip += [*(() if dependencies else ("--no-deps",)), *requirements]
        if subprocess.run(pip, check=False, capture_output=True, timeout=300).returncode:
            shutil.rmtree(part, ignore_errors=True)
            pytest.skip(f"{', '.join(requirements)} can't be fetched: no package index is in reach")
        try:
            part.rename(kept)
        except OSError:
            # Another run was first.
            shutil.rmtree(part)
    return kept
