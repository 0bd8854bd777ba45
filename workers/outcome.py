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
    TIME_IS_UP = 3
    """`max_runtime` has passed."""
    PAUSE = 4
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
    yields: bool = False
    """A pause that was asked for meanwhile comes true instead."""


@dataclass(frozen=True)
class Progress:
    """How far an attempt came, and how much of that outlives it."""

    began: int = 0
    """Steps that were done before it."""
    reached: int = 0
    """Its last step."""
    listed: int | None = None
    """Step of the checkpoint that it published last; None: none, whatever was saved on its disk."""

    @property
    def is_any(self) -> bool:
        return self.reached > self.began

    @property
    def newest(self) -> int:
        """Step that the next attempt goes on from."""
        return self.began if self.listed is None else self.listed

    @property
    def is_lost(self) -> bool:
        """Another attempt like this one would come no further than to do the same again."""
        return self.is_any and self.newest != self.reached and self.newest <= self.began


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

NO_PROGRESS = Progress()


def decide(
    last: Event | None,
    *,
    exit_code: int | None,
    wish: Wish | None,
    max_runtime: float | None = None,
    lines_up: bool = False,
    progress: Progress = NO_PROGRESS,
) -> Outcome:
    """What to do, from the last event, else the exit code, in the light of the wish.

    `exit_code` None means that the engine never started. Whoever lost the lease, or was cancelled, has no say beyond
    that; a run that finished all the same is a success, however it was told to stop. One that stopped, and whose state
    could not be stored, is a loss, as it would else do the same steps for ever. `lines_up`: once `max_runtime` has
    passed it goes on later, if it saved its state and came further in that time.
    """
    if wish in (Wish.LOST, Wish.CANCEL):
        return WISHED[wish]
    match last:
        case Finished():
            return Outcome(Action.PUBLISH, "finished")
        case Failed():
            action = Action.LOSE if last.code in TRANSIENT else Action.FAIL
            return Outcome(action, last.message, failures.of_event(last))
        case Stopped():
            return stopped(wish, max_runtime=max_runtime, lines_up=lines_up, progress=progress)
    if wish is Wish.TIME_IS_UP:
        return Outcome(Action.FAIL, "max_runtime", out_of_time(max_runtime))
    if wish is Wish.PAUSE:
        return paused(progress)
    if wish is not None:
        return WISHED[wish]
    if exit_code == NO_ROOM:
        message = "the disk is full: the engine had no room to say how it ended"
        return Outcome(Action.LOSE, message, failure("disk_full", message))
    message = f"the engine ended without saying why ({describe(exit_code)})"
    return Outcome(Action.LOSE, message, failure("rank_lost", message))


def stopped(wish: Wish | None, *, max_runtime: float | None, lines_up: bool, progress: Progress) -> Outcome:
    """What to do with a run that was told to stop and has done so, its state saved on its disk."""
    if wish is Wish.PAUSE:
        return paused(progress)
    if wish is Wish.TIME_IS_UP and not (lines_up and progress.is_any):
        return Outcome(Action.FAIL, "max_runtime", out_of_time(max_runtime), yields=True)
    if progress.is_lost:
        message = f"it stopped after step {progress.reached}, and no checkpoint since step {progress.began} was stored"
        hint = "Look at the storage: warnings before this tell why it took none."
        return Outcome(Action.LOSE, message, failure("internal", message, hint=hint))
    if wish is Wish.TIME_IS_UP:
        return Outcome(Action.LINE_UP, f"it ran for {max_runtime or 0:g} seconds, its max_runtime, and lines up again")
    if wish is None:
        return from_outside("the engine", progress)
    return WISHED[wish]


def from_outside(whom: str, progress: Progress) -> Outcome:
    """Of one that somebody told to end who has no say: it goes on, but not without limit where it comes no further."""
    kept = f"; its newest stored checkpoint is that of step {progress.newest}" if progress.newest else ""
    message = f"{whom} was told to stop by something outside{kept}"
    hint = "Look on that host for what sends SIGTERM to processes that it did not start, then retry the job."
    return Outcome(Action.LOSE, message, failure("rank_lost", message, hint=hint))


def paused(progress: Progress) -> Outcome:
    """Paused as was wished, and said from where it will go on where that is not where it is."""
    if progress.newest >= progress.reached:
        return WISHED[Wish.PAUSE]
    newest = f"the newest checkpoint that is stored is that of step {progress.newest}"
    from_where = newest if progress.newest else "no checkpoint is stored, and it will begin anew"
    return Outcome(Action.PAUSE, f"paused after step {progress.reached}; {from_where}")


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
