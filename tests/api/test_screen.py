"""What a terminal shows of a job."""

import io

import pytest
from rich.console import Console

from api.cli.screen import Picture, curve, watch
from api.client import Event

JOB = {
    "id": "job-1", "name": "tiny", "state": "queued", "queue": {"reason": "no worker is online"},
    "progress": {"step": 0, "total_steps": None, "loss": None, "tokens_per_second": None},
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        pytest.param([], 10, "", id="nothing yet"),
        pytest.param([3.0], 10, "▁", id="one value"),
        pytest.param([2.0, 2.0], 10, "▁▁", id="flat"),
        pytest.param([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█", id="a bar each"),
        pytest.param([7, 7, 0, 0], 2, "█▁", id="means of shares"),
    ],
)
def test_a_curve_runs_from_its_least_to_its_greatest(values, width, expected):
    assert curve(values, width) == expected


def events():
    yield Event("state", "1", {"type": "state", "message": "placed on a", "data": {"state": "starting"}})
    yield Event("log", "2", {"type": "started", "message": "training", "data": {"total_steps": 2}})
    for step in (1, 2):
        data = {"step": step, "loss": 4.0 / step, "tokens_per_second": 1234.0, "step_seconds": 1.0}
        yield Event("metrics", str(2 + step), {"type": "step", "message": "", "data": data})
    yield Event("warning", "5", {"type": "log", "message": "[odd] rows", "data": {}})
    yield Event("done", "5-done", {"type": "done", "job": {"state": "succeeded"}})


@pytest.mark.parametrize("terminal", [True, False])
def test_watching_tells_step_loss_speed_and_eta_and_returns_the_job_as_it_ended(terminal):
    shown = io.StringIO()
    ended = watch(JOB, events(), Console(file=shown, force_terminal=terminal, width=160))
    assert ended == {"state": "succeeded"}
    assert "step 2/2  loss 2.0000  1,234 tokens/s  ETA 0:00:00" in shown.getvalue()
    assert "[odd] rows" in shown.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_how_questions_were_answered_is_told_and_stays_in_the_line(terminal):
    data = {"step": 1, "accuracy": 0.625}
    told = Event("metrics", "9", {"type": "choices", "message": "62.5% of 8 right", "data": data})
    *before, done = events()
    shown = io.StringIO()
    watch(JOB, [*before[:3], told, *before[3:], done], Console(file=shown, force_terminal=terminal, width=160))
    assert "62.5% of 8 right" in shown.getvalue()
    assert "step 2/2  loss 2.0000  accuracy 62.5%" in shown.getvalue()


def test_the_line_tells_utilisation_and_the_share_of_compute_where_the_engine_does():
    picture = Picture(JOB)
    data = {"step": 1, "loss": 4.0, "tokens_per_second": 10.0, "step_seconds": 2.0}
    told = {"mfu": 0.4125, "compute_seconds": 1.5}
    picture.take(Event("metrics", "1", {"type": "step", "message": "", "data": data | told}))
    assert picture.line.startswith("step 1")
    assert "loss 4.0000  10 tokens/s  MFU 41.2%  compute 75%" in picture.line
    picture.take(Event("metrics", "2", {"type": "step", "message": "", "data": data | dict.fromkeys(told)}))
    assert "MFU" not in picture.line
    assert "compute" not in picture.line
