"""A job on the screen of whoever watches it: live bar and curves in a terminal, or lines where nothing can move."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from api.cli import printable
from api.cli.curves import draw
from api.cli.picture import Picture
from api.client import Event, Json

LINES_PER_RUN = 20
"""Steps that plain output tells of, over a whole run."""
TALLEST_CURVE = 14
OTHER_LINES = 9
"""Of the live picture, beside the curve."""
AWAY_SECONDS = 12.0
"""A failed attempt to reach the server is news for so long; the next would have come by then."""


class Outage:
    """Whether the server is away, as the client tells it; what it hears is put in words once for each time away."""

    def __init__(self, console: Console | None) -> None:
        self.console = console
        """Where the words go; None says nothing, for whoever shows `words`."""
        self.since: float | None = None
        self.said = ""

    def hear(self, error: Exception, seconds: float) -> None:
        self.said = f"The server is away ({error}); trying again for {seconds:.0f} s."
        if self.since is None and self.console:
            self.console.print(self.said, style="yellow", markup=False, highlight=False, soft_wrap=True)
        self.since = time.monotonic()

    def over(self) -> None:
        if self.since is not None and self.console:
            self.console.print("It is back; nothing was missed.", style="yellow", highlight=False)
        self.since = None

    @property
    def words(self) -> str:
        away = self.since is not None and time.monotonic() - self.since < AWAY_SECONDS
        return self.said if away else ""


def watch(picture: Picture, events: Iterable[Event], console: Console, outage: Outage) -> Json:
    """Show the job until it ends; returns it as it ended."""
    return (_live if moves(console) else _plain)(picture, events, console, outage)


def moves(console: Console) -> bool:
    """Whether what was written can be written over."""
    return console.is_terminal and not console.is_dumb_terminal


def _live(picture: Picture, events: Iterable[Event], console: Console, outage: Outage) -> Json:
    shown = lambda: rendered(picture, console, away=outage.words)  # noqa: E731
    with Live(get_renderable=shown, console=console, refresh_per_second=4, vertical_overflow="crop"):
        for event in events:
            outage.over()
            picture.take(event)
            if event.name == "done":
                return _job(event)
            if event.name == "warning":
                console.print(printable.text(event.data["message"]), style="yellow", markup=False, highlight=False)
    raise AssertionError("a stream ends with `done`")


def rendered(picture: Picture, console: Console, *, away: str = "") -> RenderableType:
    """The whole picture, in as many columns and lines as there are."""
    title = Text(f"{picture.name}  {picture.state}", style="bold")
    lines: list[RenderableType] = [_short(title)]
    phase = picture.phase
    if phase is not None:
        lines += [_bar(phase.done, phase.total), _short(Text(str(phase)))]
    if picture.step or phase is None:
        lines += [_bar(picture.step, picture.total), _short(Text(picture.line))]
    for line in (picture.validation_line, *picture.reward_lines):
        if line:
            lines.append(_short(Text(line)))
    height = min(TALLEST_CURVE, console.height - OTHER_LINES)
    if picture.curves and height > 2:
        lines.append(draw(picture.curves, width=console.width, height=height, ascii_only=console.options.ascii_only))
    if away:
        lines.append(_short(Text(away, style="yellow")))
    elif phase is None and picture.note != picture.state:
        lines.append(_short(Text(picture.note, style="dim")))
    return Group(*lines)


def _bar(done: int, total: int | None) -> RenderableType:
    # A bar by itself does not end its line.
    return Padding(ProgressBar(total=max(1, total or 1), completed=done), 0)


def _short(text: Text) -> Text:
    """In one line, whatever the width."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _plain(picture: Picture, events: Iterable[Event], console: Console, outage: Outage) -> Json:
    told: tuple[str, int] | None = None
    for event in events:
        outage.over()
        if event.name == "done":
            return _job(event)
        picture.take(event)
        match event.data.get("type"):
            case "step":
                if picture.step == picture.total or not picture.step % max(1, (picture.total or 1) // LINES_PER_RUN):
                    _say(console, "  ".join([picture.line, *picture.reward_lines[:1]]))
            case "evaluated":
                _say(console, "  ".join([f"step {event.data['data']['step']}", picture.validation_line]))
            case "progress" if picture.phase is not None:
                # A phase tells of itself often; its quarters are enough.
                quarter = picture.phase.name, 4 * picture.phase.done // max(1, picture.phase.total)
                if quarter != told:
                    _say(console, str(picture.phase))
                told = quarter
            case _:
                _say(console, f"{event.name}: {event.data['message']}")
    raise AssertionError("a stream ends with `done`")


def _say(console: Console, line: str) -> None:
    console.out(printable.line(line), highlight=False)


def _job(event: Event) -> Json:
    job: Json = event.data["job"]
    return job
