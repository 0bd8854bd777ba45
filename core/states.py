"""The states of a job and the moves between them: data, read by the one function that moves (`jobs.move`)."""

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
RETRIABLE = frozenset(state for state in TERMINAL if S.QUEUED in MOVES[state])
UNDER_WAY = frozenset({S.VALIDATING, S.QUEUED, S.STARTING, S.RUNNING})
"""States of a job that runs, or will as soon as it can."""
HELD = frozenset({S.STARTING, S.RUNNING, S.PAUSING, S.CANCELLING})
"""States in which a job holds slots."""


def sources(to: JobState) -> frozenset[JobState]:
    """The states from which a job may move to `to`."""
    return frozenset(state for state, onward in MOVES.items() if to in onward)
