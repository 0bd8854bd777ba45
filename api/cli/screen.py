"""A job on the screen of whoever watches it: a live bar with a loss curve, or lines where nothing can move."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from itertools import pairwise
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from api.client import Event, Json

CURVE_WIDTH = 60
BARS = "▁▂▃▄▅▆▇█"
LINES_PER_RUN = 20
"""Steps that plain output tells of, over a whole run."""


class Picture:
    """What is known of a job so far; events go in, words and a curve come out."""

    def __init__(self, job: Json) -> None:
        self.name = job["name"] or job["id"]
        self.state: str = job["state"]
        self.note: str = (job.get("queue") or {}).get("reason") or ""
        self.step: int = job["progress"]["step"]
        self.total: int | None = job["progress"]["total_steps"]
        self.loss: float | None = job["progress"]["loss"]
        self.tokens_per_second: float | None = job["progress"]["tokens_per_second"]
        self.accuracy: float | None = job["progress"].get("choice_accuracy")
        """Share of the multiple-choice questions that were answered right, when they were last asked."""
        self.step_seconds: float | None = None
        self.mfu: float | None = None
        self.compute: float | None = None
        """The share of the last step's time that was not spent waiting or beside training."""
        self.losses: deque[float] = deque(maxlen=100_000)

    def take(self, event: Event) -> None:
        data: dict[str, Any] = event.data.get("data", {})
        match event.data.get("type"):
            case "state":
                self.state, self.note = data["state"], event.data["message"]
            case "started":
                self.total = data["total_steps"]
            case "step":
                self.step, self.loss, self.tokens_per_second = data["step"], data["loss"], data["tokens_per_second"]
                usual = self.step_seconds or data["step_seconds"]
                self.step_seconds = usual + 0.1 * (data["step_seconds"] - usual)
                self.losses.append(data["loss"])
                self.mfu, computing = data.get("mfu"), data.get("compute_seconds")
                self.compute = None if computing is None else computing / data["step_seconds"]
            case "choices":
                self.accuracy, self.note = data["accuracy"], event.data["message"]
            case "progress" | "evaluated" | "outliers" | "samples" | "checkpoint" | "log":
                self.note = event.data["message"]
            case "finished" | "stopped" | "failed":
                self.note = event.data["message"]

    @property
    def eta(self) -> timedelta | None:
        """None before the first step was seen."""
        if not (self.total and self.step_seconds):
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
    def curve(self) -> str:
        return curve(list(self.losses), CURVE_WIDTH)


def curve(values: list[float], width: int) -> str:
    """`values` as a row of bars, each the mean of its share, from the least to the greatest of them."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def watch(job: Json, events: Iterable[Event], console: Console) -> Json:
    """Show the job until it ends; returns it as it ended."""
    picture = Picture(job)
    return (_live if console.is_terminal else _plain)(picture, events, console)


def _live(picture: Picture, events: Iterable[Event], console: Console) -> Json:
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[line]}"),
        console=console,
    )  # fmt: skip
    task = bar.add_task(picture.name, total=picture.total, line=picture.line)
    curve_, note = Text(style="cyan"), Text(style="dim")
    with Live(Group(bar, curve_, note), console=console, refresh_per_second=8):
        for event in events:
            if event.name == "done":
                return _job(event)
            if event.name == "warning":
                console.print(event.data["message"], style="yellow", markup=False)
            picture.take(event)
            bar.update(task, completed=picture.step, total=picture.total, line=picture.line)
            curve_.plain = f"loss {picture.curve}" if picture.losses else ""
            note.plain = picture.state if picture.note == picture.state else f"{picture.state}  {picture.note}"
    raise AssertionError("a stream ends with `done`")


def _plain(picture: Picture, events: Iterable[Event], console: Console) -> Json:
    for event in events:
        if event.name == "done":
            return _job(event)
        picture.take(event)
        if event.data.get("type") == "step":
            if picture.step == picture.total or not picture.step % max(1, (picture.total or 1) // LINES_PER_RUN):
                console.out(picture.line, highlight=False)
        elif event.name != "metrics" or event.data.get("type") == "choices":
            console.out(f"{event.name}: {event.data['message']}", highlight=False)
    raise AssertionError("a stream ends with `done`")


def _job(event: Event) -> Json:
    job: Json = event.data["job"]
    return job
