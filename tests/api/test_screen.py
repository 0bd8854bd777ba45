"""What a terminal shows of a job, and what is printed where there is none."""

from __future__ import annotations

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from api.cli.picture import Picture
from api.cli.screen import Outage, rendered, watch
from api.client import Event, Unreachable
from tests.api.test_picture import JOB, event, step


def events():
    yield Event("state", "1", {"type": "state", "message": "placed on a", "data": {"state": "starting"}})
    for done in range(0, 101, 5):
        data = {"phase": "packing", "done": done, "total": 100, "unit": "documents"}
        yield Event("log", "2", {"type": "progress", "message": f"packing: {done}", "data": data})
    yield Event("log", "3", {"type": "started", "message": "training", "data": {"total_steps": 2}})
    for number in (1, 2):
        data = {"step": number, "loss": 4.0 / number, "tokens_per_second": 1234.0, "step_seconds": 1.0}
        yield Event("metrics", str(3 + number), {"type": "step", "message": "", "data": data})
    data = {"step": 2, "loss": 2.25, "token_accuracy": 0.5, "is_best": True}
    yield Event("metrics", "6", {"type": "evaluated", "message": "validated", "data": data})
    yield Event("warning", "7", {"type": "log", "message": "[odd] rows", "data": {}})
    yield Event("done", "7-done", {"type": "done", "job": {"state": "succeeded"}})


def shown(told, *, terminal: bool, width: int = 160, color: bool = True, outage: Outage | None = None) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, height=30, no_color=not color)
    ended = watch(Picture(JOB), told, console, outage or Outage(None))
    assert ended == {"state": "succeeded"}
    return out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_watching_tells_step_loss_speed_eta_and_validation(terminal):
    said = shown(events(), terminal=terminal)
    assert "step 2/2  loss 2.0000  1,234 tokens/s  ETA 0:00:00" in said
    assert "validation loss 2.2500  best 2.2500 at step 2" in said
    assert "[odd] rows" in said


@pytest.mark.parametrize("terminal", [True, False])
def test_how_questions_were_answered_is_told_and_stays_in_the_line(terminal):
    data = {"step": 1, "accuracy": 0.625}
    told = Event("metrics", "9", {"type": "choices", "message": "62.5% of 8 right", "data": data})
    *before, done = events()
    said = shown([*before[:-4], told, *before[-4:], done], terminal=terminal)
    assert "accuracy 62.5%" in said
    assert terminal or "62.5% of 8 right" in said


def test_without_a_terminal_it_is_plain_lines_and_a_phase_tells_its_quarters():
    lines = shown(events(), terminal=False).splitlines()
    assert not any("\x1b" in line for line in lines)
    assert [line for line in lines if "packing" in line] == [
        f"packing: {done} of 100 documents" for done in (0, 25, 50, 75, 100)
    ]
    assert lines[-1] == "warning: [odd] rows"


def test_without_colour_a_terminal_still_moves():
    said = shown(events(), terminal=True, color=False)
    # Of the codes that choose a look (`m`), none chooses a colour; others move the cursor.
    looks = {look for codes in re.findall(r"\x1b\[([\d;]*)m", said) for look in codes.split(";")}
    assert not looks & {str(number) for number in [*range(30, 39), *range(40, 49), *range(90, 108)]}
    assert "\x1b[2K" in said


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b[2K" not in shown(events(), terminal=True)


@pytest.mark.parametrize(("width", "height"), [(20, 6), (40, 12), (120, 40)])
def test_the_picture_fits_the_terminal(width, height):
    picture = Picture(JOB | {"name": "a" * 64})
    picture.take(event("started", "training " * 30, total_steps=100))
    for number in range(1, 50):
        picture.take(step(number, loss=9.0 / number, reward_margin=0.5, reward_accuracy=0.5, rewards_chosen=0.1))
    picture.take(event("evaluated", "validated " * 30, step=49, loss=2.0, token_accuracy=0.5))
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=height, color_system=None)
    console.print(rendered(picture, console))
    lines = out.getvalue().splitlines()
    assert all(cell_len(line) <= width for line in lines)
    # A terminal lower than the words crops them.
    assert len(lines) <= max(height, 8)
    assert any("⠀" < character <= "⣿" for character in out.getvalue()) is (height > 6)


def test_preparing_shows_its_phase_instead_of_steps():
    picture = Picture(JOB)
    picture.take(event("progress", "reading", phase="data", done=1, total=4, unit="files"))
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, height=20, color_system=None)
    console.print(rendered(picture, console))
    assert out.getvalue().splitlines()[0] == "tiny  queued"
    assert out.getvalue().splitlines()[-1] == "data: 1 of 4 files"
    assert "step" not in out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_server_that_is_away_is_said_once_and_so_is_its_return(terminal):
    said = io.StringIO()
    outage = Outage(None if terminal else Console(file=said, width=200))

    def interrupted():
        for number, each in enumerate(events()):
            if number == 3:
                for seconds in (30.0, 29.0):
                    outage.hear(Unreachable("no route"), seconds)
                assert outage.words.startswith("The server is away (no route); trying again for 29 s.")
            yield each

    shown(interrupted(), terminal=terminal, outage=outage)
    assert outage.words == ""
    told = ["The server is away (no route); trying again for 30 s.", "It is back; nothing was missed."]
    assert said.getvalue().splitlines() == ([] if terminal else told)
