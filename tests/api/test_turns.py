"""What many projects want at once: one that wants very much of it waits for itself alone."""

from __future__ import annotations

import asyncio

import pytest

from api.turns import Turns
from core.errors import Unavailable


def test_a_project_waits_for_its_own_and_another_for_nobody():
    async def scenario() -> list[str]:
        turns, gate, said = Turns(2), asyncio.Event(), []

        async def work(project: str) -> None:
            async with turns.taken(project):
                said.append(project)
                if project == "greedy":
                    await gate.wait()

        greedy = [asyncio.create_task(work("greedy")) for _ in range(5)]
        while len(said) < 2:
            await asyncio.sleep(0)
        await work("modest")
        gate.set()
        await asyncio.gather(*greedy)
        assert turns._places == {}
        return said

    assert asyncio.run(scenario()) == ["greedy", "greedy", "modest", "greedy", "greedy", "greedy"]


def test_lines_hold_a_turn_until_they_end_or_are_left():
    async def endless():
        while True:
            yield "and so on"

    async def scenario() -> None:
        turns = Turns(1, patience_seconds=0.01)
        lines = turns.lines("p", endless())
        assert await anext(lines) == "and so on"
        with pytest.raises(Unavailable, match="more than 1 at once"):
            await anext(turns.lines("p", endless()))
        await lines.aclose()
        last = turns.lines("p", endless())
        assert await anext(last) == "and so on"
        await last.aclose()

    asyncio.run(scenario())
