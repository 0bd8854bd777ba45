"""What becomes of an engine event: a row of the history, metric rows, and the job's progress.

Only for those who hold the lock of the job's row: `jobs.record` and `checkpoints.publish`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import update
from sqlalchemy.orm import Session

from core import metrics
from core.models import Checkpoint, Job, JobEvent
from core.points import POINTS
from engine.counting import counted, first_of
from engine.events import (
    CheckpointSaved,
    Choices,
    Evaluated,
    Event,
    Failed,
    Finished,
    Log,
    Outlier,
    Outliers,
    RolledBack,
    Sample,
    Samples,
    Spike,
    Started,
    Step,
)

STEP_METRICS = (
    "loss", "token_accuracy", "lr", "grad_norm", "tokens", "tokens_per_second", "step_seconds", "mfu", "hfu",
    "memory_bytes", "rewards_chosen", "rewards_rejected", "reward_margin", "reward_accuracy",
    "compute_seconds", "communication_seconds", "bubble_seconds", "data_seconds", "evaluation_seconds",
    "checkpoint_seconds",
)  # fmt: skip
"""Numbers of a step that become metrics, under their own names, where the engine tells them."""
EVALUATION_METRICS = {
    f"validation_{name}": name
    for name in (
        "loss", "token_accuracy", "rewards_chosen", "rewards_rejected", "reward_margin", "reward_accuracy",
    )
}  # fmt: skip
"""Metric name and the field of `Evaluated` it is."""
CHOICE_METRICS = {f"choice_{name}": name for name in ("accuracy", "accuracy_normalized")}
"""Likewise of `Choices`."""

Named = TypeVar("Named", Outlier, Sample)

SHOWN = 60
"""Characters of a model's answer that its event's message quotes."""
_SMOOTHING = 0.1
"""Weight of the newest step in the mean step time that the ETA is made from."""


def append(session: Session, job: Job, event: Event) -> None:
    """Write `event` to the history of a job whose row is locked; leave out what an earlier attempt already told."""
    match event:
        case Started():
            known = {"total_steps": event.total_steps, "step": job.last_step, "train_rows": event.train_rows}
            job.progress = job.progress | known
        case Step():
            if event.step <= job.last_step:
                return
            fills = event.step // POINTS > job.last_step // POINTS
            job.last_step = event.step
            metrics.append(session, job.id, event.step, {name: getattr(event, name) for name in STEP_METRICS})
            if fills:
                metrics.pack(session, job.id)
            job.progress = job.progress | _progress(job.progress, event)
        case Evaluated():
            # A run that went back validates a step anew, and goes on from what it finds then.
            best = {"best_step": event.step, "best_validation_loss": event.loss} if event.is_best else {}
            job.progress = job.progress | {"validation_loss": event.loss} | best
            if metrics.has(session, job.id, "validation_loss", event.step):
                return
            found = {name: getattr(event, of) for name, of in EVALUATION_METRICS.items()}
            metrics.insert_between(session, job.id, event.step, found)
        case Choices():
            numbers = {name: getattr(event, of) for name, of in CHOICE_METRICS.items()}
            job.progress = job.progress | numbers
            if metrics.has(session, job.id, "choice_accuracy", event.step):
                return
            metrics.insert_between(session, job.id, event.step, numbers)
        case CheckpointSaved():
            return
        case Spike():
            # It comes after its step: where that was recorded before, so was this.
            if event.step < job.last_step:
                return
        case RolledBack():
            # In the transaction that tells of it: whoever starts next goes on from none of these.
            beyond = update(Checkpoint).where(Checkpoint.job_id == job.id, Checkpoint.step > event.step)
            session.execute(beyond.values(abandoned=True))
        case Outliers():
            event = event.model_copy(update={"documents": _by_id(job, event.documents)})
        case Samples():
            event = event.model_copy(update={"samples": _by_id(job, event.samples)})
        case Finished():
            told = {"stopped_early": event.stopped_early, "exported_step": event.exported_step, "eta_seconds": 0.0}
            job.progress = job.progress | told
        case _:
            pass
    add(
        session,
        job,
        type=event.type,
        level=_level(event),
        message=_WORDS[event.type](event),
        data=event.model_dump(mode="json", exclude={"seq", "time", "type", "level"}),
        created_at=event.time or None,
    )


def add(
    session: Session,
    job: Job,
    *,
    type: str,
    message: str,
    data: dict[str, Any],
    level: str = "info",
    created_at: float | None = None,
) -> JobEvent:
    """One more event of a job whose row is locked."""
    job.last_event += 1
    event = JobEvent(
        job_id=job.id,
        seq=job.last_event,
        attempt=job.attempt,
        type=type,
        level=level,
        message=storable(message),
        data=storable(data),
    )
    if created_at is not None:
        event.created_at = created_at
    session.add(event)
    return event


def storable(value: Any) -> Any:
    """The same without NUL, which PostgreSQL has no place for; what processes print may hold anything."""
    match value:
        case str():
            return value.replace("\0", "\ufffd")
        case dict():
            return {storable(name): storable(inner) for name, inner in value.items()}
        case list():
            return [storable(inner) for inner in value]
        case _:
            return value


def _level(event: Event) -> str:
    match event:
        case Log():
            return event.level
        case Failed():
            return "error"
        case Spike():
            return "warning"
    return "info"


def _by_id(job: Job, named: tuple[Named, ...]) -> tuple[Named, ...]:
    """With the ids of files, by which those who uploaded them know them."""
    of, paths = job.spec["data"], job.run_config["data"]
    ids = dict(zip(paths["train"], of["train"], strict=True)) | {paths.get("validation"): of.get("validation")}
    return tuple(each.model_copy(update={"file": ids[each.file]}) for each in named)


def _progress(before: dict[str, Any], step: Step) -> dict[str, Any]:
    usual = before.get("step_seconds") or step.step_seconds
    seconds = usual + _SMOOTHING * (step.step_seconds - usual)
    total = before.get("total_steps")
    return {
        "step": step.step,
        "tokens": step.tokens,
        "loss": step.loss,
        "tokens_per_second": step.tokens_per_second,
        "mfu": step.mfu,
        "hfu": step.hfu,
        "step_seconds": seconds,
        "usual_step_seconds": _usual_seconds(before, step),
        "memory_bytes": step.memory_bytes,
        "percent": round(100 * step.step / total, 2) if total else None,
        "eta_seconds": round(seconds * max(0, total - step.step), 3) if total else None,
    }


def _usual_seconds(before: dict[str, Any], step: Step) -> float:
    """Of a step, validations and checkpoints left out. The first says little of others: much is made ready in it."""
    seconds = step.step_seconds - (step.evaluation_seconds or 0.0) - (step.checkpoint_seconds or 0.0)
    usual: float | None = before.get("usual_step_seconds")
    if usual is None or before.get("step", 0) < 2:
        return seconds
    return usual + _SMOOTHING * (seconds - usual)


def _quoted(text: str) -> str:
    """In a line, and no longer than one may be among others."""
    words = " ".join(text.split())
    return json.dumps(words if len(words) <= SHOWN else words[:SHOWN] + "…", ensure_ascii=False)


_WORDS: dict[str, Callable[[Any], str]] = {
    "started": lambda event: (
        f"training {event.trainable_parameters:,} of {event.parameters:,} parameters on "
        f"{counted(event.ranks, 'rank')} ({event.device}), "
        f"steps {event.start_step + 1} to {event.total_steps}"
    ),
    "step": lambda event: f"step {event.step}: loss {event.loss:.4f}",
    "evaluated": lambda event: f"step {event.step}: validation loss {event.loss:.4f}",
    "spike": lambda event: (
        f"step {event.step}: the loss, {event.loss:.4f}, lies far above that of the steps before ({event.usual:.4f})"
    ),
    "rolled_back": lambda event: f"went back from step {event.from_step} to step {event.step}",
    "outliers": lambda event: (
        "examples with the highest loss: "
        + first_of((f"{each.file} line {each.line} ({each.loss:.2f})" for each in event.documents), 3)
    ),
    "choices": lambda event: (
        f"step {event.step}: {event.accuracy:.1%} of {event.questions:,} multiple-choice questions right "
        f"({event.accuracy_normalized:.1%} normalized)"
        + (f"; {event.left_out:,} are longer than a row and were not asked" if event.left_out else "")
    ),
    "samples": lambda event: (
        f"step {event.step}: answers "
        + first_of((f"{each.file} line {each.line} with {_quoted(each.text)}" for each in event.samples), 2)
    ),
    "log": lambda event: event.message,
    "progress": lambda event: f"{event.phase}: {event.done:,} of {event.total:,} {event.unit}",
    "finished": lambda event: (
        f"{'stopped early' if event.stopped_early else 'finished'} after {counted(event.step, 'step')} and "
        f"{counted(event.tokens, 'token')}"
        + (
            ""
            if event.exported_step in (None, event.step)
            else f"; the weights are those of step {event.exported_step}"
        )
    ),
    "stopped": lambda event: f"stopped after step {event.step}",
    "failed": lambda event: event.message,
}
