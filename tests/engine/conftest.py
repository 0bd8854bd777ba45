"""Fixtures for the engine: worlds of ranks that stay up for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.worlds import World


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Sums of one and of two threads differ in the last bit; the ranks of a world have one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def world2() -> Iterator[World]:
    """Two ranks."""
    world = World(2)
    yield world
    world.close()


@pytest.fixture(scope="session")
def world4() -> Iterator[World]:
    """Four ranks."""
    world = World(4)
    yield world
    world.close()


@pytest.fixture(scope="session")
def world8() -> Iterator[World]:
    """Eight ranks."""
    world = World(8)
    yield world
    world.close()
