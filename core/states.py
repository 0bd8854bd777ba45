"""The states of a job and the moves between them: data, read by the one function that moves (`jobs.move`)."""

from dataclasses import dataclass
from enum import StrEnum


class JobState(StrEnum):
    VALIDATING = "validating"
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


S = JobState

MOVES: dict[JobState, frozenset[JobState]] = {
    S.VALIDATING: frozenset({S.QUEUED, S.FAILED, S.CANCELLED}),
    S.QUEUED: frozenset({S.STARTING, S.PAUSED, S.CANCELLED, S.FAILED}),
    # A start that never reached a supervisor goes back to the queue or ends at once: nothing runs yet.
    S.STARTING: frozenset({S.RUNNING, S.QUEUED, S.PAUSING, S.PAUSED, S.CANCELLING, S.CANCELLED, S.FAILED}),
    S.RUNNING: frozenset({S.SUCCEEDED, S.FAILED, S.QUEUED, S.PAUSING, S.CANCELLING}),
    # The last step may end before the wish to pause arrives.
    S.PAUSING: frozenset({S.PAUSED, S.CANCELLING, S.SUCCEEDED, S.FAILED}),
    S.PAUSED: frozenset({S.QUEUED, S.CANCELLED}),
    S.CANCELLING: frozenset({S.CANCELLED}),
    # Only for who asks for it: a job that has ended stays so by itself.
    S.CANCELLED: frozenset({S.QUEUED}),
    S.FAILED: frozenset({S.QUEUED}),
    S.SUCCEEDED: frozenset(),
}

TERMINAL = frozenset({S.CANCELLED, S.SUCCEEDED, S.FAILED})
"""States in which a job has ended: nothing happens to it unless somebody retries it."""
UNENDED = frozenset(S) - TERMINAL
"""The others. A query names them: no index tells quickly who is in none of three states."""
RETRIABLE = frozenset(state for state in TERMINAL if S.QUEUED in MOVES[state])
UNDER_WAY = frozenset({S.VALIDATING, S.QUEUED, S.STARTING, S.RUNNING})
"""States of a job that runs, or will as soon as it can."""
HELD = frozenset({S.STARTING, S.RUNNING, S.PAUSING, S.CANCELLING})
"""States in which a job holds slots."""


@dataclass(frozen=True)
class Limit:
    """Why a job does not stay in a state for ever."""

    owner: str
    """Who moves it on."""
    within: str
    """By when, as the setting or the constant that says so."""
    then: JobState | None = None
    """What it becomes where the owner is silent by then; None: nothing is held, and nothing has to happen."""


LIMITS: dict[JobState, Limit] = {
    S.VALIDATING: Limit("the request that creates the job", "its transaction: no row is ever committed so"),
    S.QUEUED: Limit("the scheduler", "upkeep.TICK_SECONDS, and jobs._LONGEST_BACK_OFF after a loss"),
    S.STARTING: Limit("its node, and once it is claimed its supervisor", "scheduler.CLAIM_WITHIN, then lease_seconds"
                      " while data is brought within transfer_seconds", S.QUEUED),
    S.RUNNING: Limit("its supervisor", "lease_seconds, while a step takes stall_seconds and results transfer_seconds",
                     S.QUEUED),
    S.PAUSING: Limit("its supervisor", "lease_seconds, while the run has stop_grace_seconds", S.PAUSED),
    S.PAUSED: Limit("whoever paused it", "their pleasure"),
    S.CANCELLING: Limit("its supervisor", "lease_seconds, while the run has cancel_grace_seconds", S.CANCELLED),
}  # fmt: skip
"""Of each state that a job leaves by itself or by somebody's wish. Terminal ones have none."""


def sources(to: JobState) -> frozenset[JobState]:
    """The states from which a job may move to `to`."""
    return frozenset(state for state, onward in MOVES.items() if to in onward)
