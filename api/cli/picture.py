"""What whoever watches a job knows of it: events go in; words, shares and curves come out. Nothing is drawn here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from api.cli import printable
from api.cli.curves import Curve, Point
from api.client import Event, Json

MOST_POINTS = 4096
"""More of a curve than any terminal shows; beyond, it is thinned."""
REWARDS = {
    "rewards_chosen": "chosen {:+.3f}", "rewards_rejected": "rejected {:+.3f}", "reward_margin": "margin {:+.3f}",
    "reward_accuracy": "accuracy {:.1%}",
}  # fmt: skip
SERIES = ("loss", "validation_loss", *REWARDS, *(f"validation_{name}" for name in REWARDS))
"""Metrics that a picture of a job that has run for a while begins with."""
SMOOTHING = 0.1
"""Weight of the newest step in the mean step time that the ETA is made from."""

GIVEN_UP = frozenset({"failed", "cancelled"})
"""States from which the steps that are left are not taken."""


@dataclass(frozen=True)
class Phase:
    """Work outside of the training steps."""

    name: str
    done: int
    total: int
    unit: str

    def __str__(self) -> str:
        return f"{self.name}: {self.done:,} of {self.total:,} {self.unit}"


class Picture:
    """A job so far. It may begin in the middle: with the job as it is, and its `series`."""

    def __init__(self, job: Json, series: Mapping[str, Sequence[Point]] | None = None) -> None:
        progress = job["progress"]
        self.id: str = job["id"]
        self.name: str = job["name"] or job["id"]
        self.state: str = job["state"]
        self.note: str = (job.get("queue") or {}).get("reason") or ""
        self.step: int = progress["step"]
        self.total: int | None = progress["total_steps"]
        self.loss: float | None = progress["loss"]
        self.tokens_per_second: float | None = progress["tokens_per_second"]
        self.accuracy: float | None = progress.get("choice_accuracy")
        """Share of the multiple-choice questions that were answered right, when they were last asked."""
        self.mfu: float | None = progress.get("mfu")
        self.compute: float | None = None
        """The share of the last step's time that was not spent waiting or beside training."""
        self.step_seconds: float | None = None
        if (eta := progress.get("eta_seconds")) and self.total and self.total > self.step:
            self.step_seconds = eta / (self.total - self.step)
        self.validation_loss: float | None = progress.get("validation_loss")
        self.best: tuple[int, float] | None = None
        """Step and loss of the best validation."""
        if progress.get("best_step") is not None and progress.get("best_validation_loss") is not None:
            self.best = progress["best_step"], progress["best_validation_loss"]
        self.phase: Phase | None = None
        series = series or {}
        self.losses: list[Point] = list(series.get("loss", ()))
        self.validations: list[Point] = list(series.get("validation_loss", ()))
        self.rewards: dict[str, float] = {
            name: series[name][-1][1] for name in SERIES if "reward" in name and series.get(name)
        }

    def take(self, event: Event) -> None:
        data: dict[str, Any] = event.data.get("data", {})
        message = printable.line(event.data.get("message", ""))
        match event.data.get("type"):
            case "state":
                self.state, self.note, self.phase = data["state"], message, None
            case "done":
                self.state, self.note, self.phase = event.data["job"]["state"], "", None
            case "started":
                self.total, self.phase, self.note = data["total_steps"], None, message
            case "step":
                self._step(data)
            case "evaluated":
                self._evaluated(data)
                self.note = message
            case "choices":
                self.accuracy, self.note = data["accuracy"], message
            case "progress":
                self.phase = Phase(data["phase"], data["done"], data["total"], data["unit"])
                self.note = message
            case "failed" | "finished" | "stopped":
                self.note, self.phase = message, None
            case "spike" | "rolled_back" | "outliers" | "samples" | "checkpoint" | "log" | "changed":
                self.note = message

    def _step(self, data: Mapping[str, Any]) -> None:
        self.step, self.loss, self.tokens_per_second = data["step"], data["loss"], data["tokens_per_second"]
        usual = self.step_seconds or data["step_seconds"]
        self.step_seconds = usual + SMOOTHING * (data["step_seconds"] - usual)
        self.mfu, computing = data.get("mfu"), data.get("compute_seconds")
        self.compute = None if computing is None or not data["step_seconds"] else computing / data["step_seconds"]
        self.losses = _with(self.losses, (data["step"], data["loss"]))
        self.rewards |= {name: data[name] for name in REWARDS if data.get(name) is not None}

    def _evaluated(self, data: Mapping[str, Any]) -> None:
        self.validation_loss = data["loss"]
        if data.get("is_best"):
            self.best = data["step"], data["loss"]
        self.validations = _with(self.validations, (data["step"], data["loss"]))
        self.rewards |= {f"validation_{name}": data[name] for name in REWARDS if data.get(name) is not None}

    @property
    def eta(self) -> timedelta | None:
        """None before the first step was seen, and where there will be no more."""
        if self.state in GIVEN_UP or not (self.total and self.step_seconds):
            return None
        return timedelta(seconds=round(self.step_seconds * max(0, self.total - self.step)))

    @property
    def line(self) -> str:
        """Step, loss, accuracy, tokens per second, MFU, share of compute, ETA; what isn't known is left out."""
        parts = [f"step {self.step}/{self.total}" if self.total else f"step {self.step}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.accuracy is not None:
            parts.append(f"accuracy {self.accuracy:.1%}")
        if self.tokens_per_second:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        if self.compute is not None:
            parts.append(f"compute {self.compute:.0%}")
        if self.eta is not None:
            parts.append(f"ETA {self.eta}")
        return "  ".join(parts)

    @property
    def validation_line(self) -> str:
        """Empty before the first validation."""
        if self.validation_loss is None:
            return ""
        best = f"  best {self.best[1]:.4f} at step {self.best[0]}" if self.best else ""
        return f"validation loss {self.validation_loss:.4f}{best}"

    @property
    def reward_lines(self) -> list[str]:
        """Under DPO, of the last step and of the last validation."""
        lines = []
        for prefix, of in {"": "rewards", "validation_": "validation rewards"}.items():
            told = [form.format(self.rewards[prefix + name]) for name, form in REWARDS.items()
                    if prefix + name in self.rewards]  # fmt: skip
            if told:
                lines.append("  ".join([of, *told]))
        return lines

    @property
    def curves(self) -> list[Curve]:
        pairs = {"loss": self.losses, "validation loss": self.validations}
        return [Curve(name, points) for name, points in pairs.items() if points]


def _with(points: list[Point], point: Point) -> list[Point]:
    """The curve and what comes after it; a step that is there already is not drawn again."""
    if points and point[0] <= points[-1][0]:
        return points
    points.append(point)
    return thinned(points) if len(points) > MOST_POINTS else points


def thinned(points: Sequence[Point]) -> list[Point]:
    """Half of them: of each four neighbours the lowest and the highest, so that no spike is lost."""
    kept: list[Point] = []
    for at in range(0, len(points), 4):
        four = points[at : at + 4]
        ends = {min(four, key=lambda point: point[1])[0], max(four, key=lambda point: point[1])[0]}
        kept += [point for point in four if point[0] in ends]
    return kept
