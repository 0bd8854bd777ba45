"""How a run goes on from a loss or a gradient that is not finite: not at all, without that step, or from a checkpoint.

All ranks find the same numbers, and so do the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine import checkpoint
from engine.course import Course
from engine.culprits import NonFinite
from engine.events import RolledBack
from engine.makings import ready_model
from engine.spikes import Spikes

if TYPE_CHECKING:
    from engine.trainer import Work


def recover(work: Work, trouble: NonFinite) -> bool:
    """Do as the run says about a step without an update; whether it counts as taken. Raises `trouble` to stop."""
    policy = work.run.training.non_finite
    if policy == "stop":
        raise trouble
    if policy == "roll_back":
        roll_back(work, trouble, rows=work.loader.taken(work.step + 1))
        return False
    count = count_recovery(work, trouble)
    work.step += 1
    work.warn(f"{trouble}: the step made no update ({count})")
    return True


def overlook(work: Work, trouble: NonFinite) -> bool:
    """Do as the run says about a validation without a loss; False where it went back. Raises `trouble` to stop."""
    policy = work.run.training.non_finite
    # An update that broke the weights can't be skipped any more.
    if policy == "stop" or (policy == "skip" and trouble.weights):
        raise trouble
    if trouble.weights:
        roll_back(work, trouble, rows=work.loader.taken(work.step))
        return False
    work.warn(f"{trouble}: there is no validation loss, and training goes on (training.non_finite)")
    return True


def roll_back(work: Work, trouble: NonFinite, *, rows: int) -> None:
    """Go back, and go on with what follows the first `rows` rows."""
    count = count_recovery(work, trouble)
    # The one under way counts, on whichever disk: all layouts go back to the same step.
    work.await_save()
    from_step = work.step
    go_back(work)
    work.loader.go_on(step=work.step, rows=rows)
    # Whoever keeps its checkpoints must know even if it comes to no further one.
    work.emit(RolledBack(step=work.step, from_step=from_step, rows=rows))
    work.warn(f"{trouble}: the run went back to step {work.step}, and leaves out the rows since ({count})")


def count_recovery(work: Work, trouble: NonFinite) -> str:
    """Once more, in words; raises `trouble` where that is too often."""
    work.recoveries += 1
    most = work.run.training.max_recoveries
    if work.recoveries > most:
        raise trouble
    return f"training.non_finite, {work.recoveries} of {most}"


def go_back(work: Work) -> None:
    """By as many checkpoints as the run says, to the oldest where there are fewer; without any, to the beginning."""
    work.saves = work.saves[: max(1, len(work.saves) + 1 - work.run.training.roll_back_checkpoints)]
    if not work.saves:
        fresh = ready_model(work.run, work.run_dir, work.mesh, work.tokenizer)
        work.optimizer.restart(dict(fresh.named_parameters()))
        work.step = work.tokens = 0
        work.course = Course()
    else:
        facts = checkpoint.load(work.saves[-1], work.optimizer, base=work.base, scale=work.scale)
        # A later one that was gone back from has rows in it that this time are left out: it is saved anew.
        work.wish.safe_step = facts.step
        work.step, work.tokens, work.course = facts.step, facts.tokens, facts.course
    # What was usual in the steps that are left behind says nothing of those to come.
    work.spikes = Spikes()
