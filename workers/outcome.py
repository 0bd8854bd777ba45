"""What becomes of a job when its attempt has ended: a pure decision. Acting on it is the supervisor's business."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

from core import failures
from core.failures import failure
from core.preemption import MAKES_WAY
from engine.events import NO_ROOM, ErrorCode, Event, Failed, Finished, Stopped


class Wish(IntEnum):
    """What a running attempt is told to do before it is done. Of two wishes the greater counts."""

    DRAIN = 1
    """The host goes down: save, and let another continue."""
    MAKE_WAY = 2
    """For a job of higher priority: save, and go on later."""
    PAUSE = 3
    TIME_IS_UP = 4
    """`max_runtime` has passed."""
    CANCEL = 5
    LOST = 6
    """The lease belongs to someone else: touch nothing more."""


class Action(Enum):
    """What the supervisor does with the job."""

    PUBLISH = "publish"
    FAIL = "fail"
    CANCEL = "cancel"
    PAUSE = "pause"
    REQUEUE = "requeue"
    LINE_UP = "line_up"
    """Queue the job again, behind those that wait."""
    LOSE = "lose"
    """The attempt is lost; the job tries again, or fails when it has lost too many."""
    ABANDON = "abandon"
    """Someone else decides; write nothing."""


@dataclass(frozen=True)
class Outcome:
    action: Action
    reason: str
    error: dict[str, Any] | None = None
    """`{code, message, param, rank, hint}`; present with FAIL and LOSE."""


TRANSIENT: frozenset[ErrorCode] = frozenset({"rank_lost", "stalled", "disk_full", "lease_lost", "internal"})
"""Failures that another attempt may not meet again. The others would come back with the same data and model.

`internal` is one of them: when a rank dies, another's broken connection can be the first thing that is reported.
"""

WISHED: dict[Wish, Outcome] = {
    Wish.DRAIN: Outcome(Action.REQUEUE, "its host is going down"),
    Wish.MAKE_WAY: Outcome(Action.REQUEUE, MAKES_WAY),
    Wish.PAUSE: Outcome(Action.PAUSE, "paused"),
    Wish.CANCEL: Outcome(Action.CANCEL, "cancelled"),
    Wish.LOST: Outcome(Action.ABANDON, "another attempt took over"),
}


def decide(
    last: Event | None,
    *,
    exit_code: int | None,
    wish: Wish | None,
    max_runtime: float | None = None,
    lines_up: bool = False,
    has_progressed: bool = True,
) -> Outcome:
    """What to do, from the last event, else the exit code, in the light of the wish.

    `exit_code` None means that the engine never started. Whoever lost the lease, or was cancelled, has no say beyond
    that; a run that finished all the same is a success, however it was told to stop. `lines_up`: once `max_runtime` has
    passed it goes on later, if it saved its state and `has_progressed` in that time.
    """
    if wish in (Wish.LOST, Wish.CANCEL):
        return WISHED[wish]
    match last:
        case Finished():
            return Outcome(Action.PUBLISH, "finished")
        case Failed():
            action = Action.LOSE if last.code in TRANSIENT else Action.FAIL
            return Outcome(action, last.message, failures.of_event(last))
        case Stopped() if wish is None:
            return Outcome(Action.REQUEUE, "the engine was told to stop by something outside")
    if wish is Wish.TIME_IS_UP and lines_up and has_progressed and isinstance(last, Stopped):
        return Outcome(Action.LINE_UP, f"it ran for {max_runtime or 0:g} seconds, its max_runtime, and lines up again")
    if wish is Wish.TIME_IS_UP:
        return Outcome(Action.FAIL, "max_runtime", out_of_time(max_runtime))
    if wish is not None:
        return WISHED[wish]
    if exit_code == NO_ROOM:
        message = "the disk is full: the engine had no room to say how it ended"
        return Outcome(Action.LOSE, message, failure("disk_full", message))
    message = f"the engine ended without saying why ({describe(exit_code)})"
    return Outcome(Action.LOSE, message, failure("rank_lost", message))


def out_of_time(max_runtime: float | None) -> dict[str, Any]:
    limit = "its limit" if max_runtime is None else f"{max_runtime:g} seconds"
    return failure(
        "max_runtime",
        f"the job ran for {limit}, its max_runtime, and was stopped",
        hint="Its newest checkpoint is kept: retry the job and it goes on from there for as long again, or submit one"
        " with a longer max_runtime or fewer steps.",
        param="max_runtime",
    )


def describe(exit_code: int | None) -> str:
    """An exit code in words: negative is a signal, as `subprocess` has it."""
    if exit_code is None:
        return "it never started"
    return f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
