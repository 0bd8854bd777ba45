"""Fixtures for `core` alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.settings import Settings


@pytest.fixture
def tmp_settings(tmp_path: Path) -> Settings:
    """Settings for functions that look at folders only."""
    return Settings(data_dir=tmp_path)
