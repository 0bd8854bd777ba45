"""What is known of a watched job, from its events or from the middle of its life."""

from __future__ import annotations

from datetime import timedelta

import pytest

from api.cli.picture import MOST_POINTS, Picture, thinned
from api.client import Event

JOB = {
    "id": "job-1", "name": "tiny", "state": "queued", "queue": {"reason": "no worker is online"},
    "progress": {"step": 0, "total_steps": None, "loss": None, "tokens_per_second": None},
}  # fmt: skip


def event(type: str, message: str = "", **data: object) -> Event:
    return Event("", "1", {"type": type, "message": message, "data": data})


def step(number: int, loss: float = 4.0, **more: object) -> Event:
    known = {"step": number, "loss": loss, "tokens_per_second": 10.0, "step_seconds": 2.0}
    return event("step", **known | more)


def test_the_line_tells_utilisation_and_the_share_of_compute_where_the_engine_does():
    picture = Picture(JOB)
    told = {"mfu": 0.4125, "compute_seconds": 1.5}
    picture.take(step(1, **told))
    assert picture.line == "step 1  loss 4.0000  10 tokens/s  MFU 41.2%  compute 75%"
    picture.take(step(2, **dict.fromkeys(told)))
    assert picture.line == "step 2  loss 4.0000  10 tokens/s"


def test_preparing_is_a_phase_with_a_share_until_training_begins():
    picture = Picture(JOB)
    assert picture.note == "no worker is online"
    picture.take(event("progress", phase="packing", done=1500, total=3000, unit="documents"))
    assert str(picture.phase) == "packing: 1,500 of 3,000 documents"
    picture.take(event("started", "training", total_steps=4))
    assert (picture.phase, picture.total, picture.note) == (None, 4, "training")


def test_validations_and_the_best_of_them_are_told():
    picture = Picture(JOB)
    assert picture.validation_line == ""
    picture.take(event("evaluated", step=10, loss=2.0, token_accuracy=0.5, is_best=True))
    picture.take(event("evaluated", step=20, loss=2.5, token_accuracy=0.5))
    assert picture.validation_line == "validation loss 2.5000  best 2.0000 at step 10"
    assert [(curve.name, curve.points) for curve in picture.curves] == [("validation loss", [(10, 2.0), (20, 2.5)])]


def test_rewards_are_told_under_dpo_alone():
    picture = Picture(JOB)
    picture.take(step(1))
    assert picture.reward_lines == []
    rewards = {"rewards_chosen": 0.25, "rewards_rejected": -0.5, "reward_margin": 0.75, "reward_accuracy": 0.875}
    picture.take(step(2, **rewards))
    picture.take(event("evaluated", step=2, loss=0.5, token_accuracy=0.5, reward_margin=0.5))
    assert picture.reward_lines == [
        "rewards  chosen +0.250  rejected -0.500  margin +0.750  accuracy 87.5%",
        "validation rewards  margin +0.500",
    ]


def test_a_picture_may_begin_in_the_middle_and_hear_again_what_it_knows():
    progress = {"step": 3, "total_steps": 10, "loss": 1.0, "tokens_per_second": 5.0, "eta_seconds": 14.0,
                "validation_loss": 2.0, "best_step": 2, "best_validation_loss": 2.0}  # fmt: skip
    series = {"loss": [[1, 3.0], [2, 2.0], [3, 1.0]], "validation_loss": [[2, 2.0]], "reward_margin": [[3, 0.5]]}
    picture = Picture(JOB | {"progress": progress}, series)
    assert picture.eta == timedelta(seconds=14)
    assert picture.line.startswith("step 3/10  loss 1.0000")
    assert picture.validation_line == "validation loss 2.0000  best 2.0000 at step 2"
    assert picture.reward_lines == ["rewards  margin +0.500"]
    for number in (2, 3, 4):
        picture.take(step(number, loss=9.0))
    assert [point[0] for point in picture.losses] == [1, 2, 3, 4]


def test_a_long_curve_is_thinned_and_loses_no_spike():
    assert thinned([(1, 5.0), (2, 1.0), (3, 9.0), (4, 2.0), (5, 0.0)]) == [(2, 1.0), (3, 9.0), (5, 0.0)]
    picture = Picture(JOB)
    for number in range(1, 2 * MOST_POINTS):
        picture.take(step(number, loss=100.0 if number == 777 else 1.0))
    assert len(picture.losses) <= MOST_POINTS
    assert (777, 100.0) in picture.losses


def test_a_job_whose_last_steps_are_not_taken_has_no_time_to_go():
    progress = {"step": 3, "total_steps": 10, "loss": 1.0, "tokens_per_second": 5.0, "eta_seconds": 14.0}
    states = ("running", "paused", "failed", "cancelled")
    told = {state: "ETA" in Picture(JOB | {"progress": progress, "state": state}).line for state in states}
    assert told == {"running": True, "paused": True, "failed": False, "cancelled": False}


@pytest.mark.parametrize("state", ["running", "cancelled"])
def test_a_change_of_state_is_told_with_its_reason(state):
    picture = Picture(JOB)
    picture.take(event("state", "because", state=state))
    assert (picture.state, picture.note) == (state, "because")
