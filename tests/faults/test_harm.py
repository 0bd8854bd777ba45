"""A job is put through drills, one after another, and at its end nobody can tell."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.faults.drills import DRILLS, SHORT, Drill
from tests.faults.watched import Watched
from tests.stack import Stack

EVERY = 10
STEPS = 200
"""Enough of them that all drills of a job are over before it is."""


def put_through(stack: Stack, drills: Sequence[Drill]) -> Watched:
    """A job that has met all of these; it has not ended yet."""
    job = Watched(stack, steps=STEPS, checkpoint_every=EVERY)
    for drill in drills:
        job.meet(drill)
    return job


@pytest.mark.parametrize("each_stack", list(SHORT), indirect=True)
def test_nobody_can_tell_what_was_killed_while_a_job_ran(each_stack: Stack) -> None:
    job = put_through(each_stack, [DRILLS[name] for name in SHORT[each_stack.kind]])
    job.assert_whole()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(DRILLS))
@pytest.mark.parametrize("each_stack", ["sqlite", "postgresql"], indirect=True)
def test_nobody_can_tell_from_a_job_that(each_stack: Stack, name: str) -> None:
    drill = DRILLS[name]
    if drill.only not in {None, each_stack.kind}:
        pytest.skip(f"needs {drill.only}")
    job = put_through(each_stack, [drill])
    job.assert_whole()
