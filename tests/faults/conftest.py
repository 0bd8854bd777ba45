"""One running service for all drills on a kind of database: starting it takes longer than most of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from tests.stack import PARTS, Stack


@pytest.fixture(scope="module")
def stack_on(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Stack]]:
    """The service on this kind of database, started when it is first asked for."""
    with ExitStack() as stacks:

        @cache
        def on(kind: str) -> Stack:
            # Not pytest's folder: with its name, the broker's socket would not fit beneath it.
            folder = Path(stacks.enter_context(tempfile.TemporaryDirectory(prefix="drill-")))
            url = request.getfixturevalue("new_postgresql")(folder) if kind == "postgresql" else None
            stack = stacks.enter_context(Stack(folder / "shed", parts=tuple(PARTS), slots=4, database_url=url))
            if url is not None:
                stack.postgresql = request.getfixturevalue("postgresql")
            return stack

        yield on


@pytest.fixture
def stack(stack_on: Callable[[str], Stack]) -> Stack:
    return stack_on("sqlite")


@pytest.fixture(params=["sqlite", "postgresql"])
def each_stack(request: pytest.FixtureRequest, stack_on: Callable[[str], Stack]) -> Stack:
    """For the drills that depend on what a database promises."""
    return stack_on(request.param)
