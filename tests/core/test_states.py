"""No state is for ever: each that is not an end has somebody who moves the job on, and a time by which."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from core import jobs, scheduler
from core.models import Slot
from core.settings import Settings
from core.spec import TrainingAsk
from core.states import HELD, LIMITS, MOVES, TERMINAL, JobState
from tests import make


def test_every_state_that_is_not_an_end_has_an_owner_and_a_limit() -> None:
    assert set(LIMITS) == set(JobState) - TERMINAL
    assert all(limit.owner and limit.within for limit in LIMITS.values())


def test_a_state_in_which_a_job_holds_slots_says_what_follows_silence_and_the_moves_allow_it() -> None:
    assert {state: limit.then for state, limit in LIMITS.items() if limit.then} == {
        JobState.STARTING: JobState.QUEUED,
        JobState.RUNNING: JobState.QUEUED,
        JobState.PAUSING: JobState.PAUSED,
        JobState.CANCELLING: JobState.CANCELLED,
    }
    assert {state for state, limit in LIMITS.items() if limit.then} == HELD
    # A silent holder's pause has come true some other way than by a checkpoint, which is as good.
    assert all(limit.then in MOVES[state] for state, limit in LIMITS.items() if limit.then)


def test_the_limits_are_settings_and_constants_that_there_are() -> None:
    named = {name for limit in LIMITS.values() for name in re.findall(r"[\w.]*_seconds\b", limit.within)}
    assert named - set(Settings.model_fields) == {"stall_seconds"}
    assert "stall_seconds" in TrainingAsk.model_fields
    assert scheduler.CLAIM_WITHIN
    assert jobs._LONGEST_BACK_OFF


@pytest.mark.parametrize("state", sorted(HELD))
def test_a_job_whose_owner_fell_silent_moves_on_and_frees_its_slots(session: Session, state: JobState) -> None:
    make.node(session, num_slots=1)
    job = make.job(session, state=state, lease_expires_at=1.0)
    (moved,) = jobs.reclaim(session, max_losses=5)
    assert (moved.id, moved.state, moved.holder) == (job.id, LIMITS[state].then, None)
    assert session.scalars(select(Slot.job_id)).all() == [None]
