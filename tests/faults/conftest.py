"""One running service for all drills on a database: starting it takes longer than most of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import Stack


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    # Not pytest's folder: with its name, the broker's socket would not fit beneath it.
    with tempfile.TemporaryDirectory(prefix="drill-") as folder, Stack(Path(folder) / "shed") as stack:
        yield stack
