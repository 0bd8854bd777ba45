"""Every road on which an attempt can end, and what becomes of the job."""

from __future__ import annotations

import pytest

from engine.events import NO_ROOM, Event, Failed, Finished, Stopped
from workers.outcome import Action, Progress, Wish, decide

FINISHED = Finished(step=10, tokens=100)
STOPPED = Stopped(step=4)
BAD_DATA = Failed(code="invalid_data", message="line 7 is empty", param="data.train")
LOST_RANK = Failed(code="rank_lost", message="rank 1 was killed by SIGKILL", rank=1)
SIGKILLED = -9


@pytest.mark.parametrize(
    ("last", "exit_code", "wish", "action"),
    [
        pytest.param(FINISHED, 0, None, Action.PUBLISH, id="it finished"),
        pytest.param(FINISHED, 1, None, Action.PUBLISH, id="the event counts more than the exit code"),
        pytest.param(FINISHED, 0, Wish.PAUSE, Action.PUBLISH, id="it finished before the pause reached it"),
        pytest.param(FINISHED, 0, Wish.DRAIN, Action.PUBLISH, id="it finished before the drain reached it"),
        pytest.param(FINISHED, 0, Wish.TIME_IS_UP, Action.PUBLISH, id="it finished in the last moment"),
        pytest.param(FINISHED, 0, Wish.CANCEL, Action.CANCEL, id="whoever cancelled wants no result"),
        pytest.param(BAD_DATA, 1, None, Action.FAIL, id="what would fail again fails"),
        pytest.param(BAD_DATA, 1, Wish.PAUSE, Action.FAIL, id="a pause would only hide it"),
        pytest.param(LOST_RANK, 1, None, Action.LOSE, id="what may not happen again is tried again"),
        pytest.param(LOST_RANK, 1, Wish.CANCEL, Action.CANCEL, id="killed ranks after a cancel are a cancel"),
        pytest.param(STOPPED, 0, Wish.PAUSE, Action.PAUSE, id="it saved and paused"),
        pytest.param(STOPPED, 0, Wish.DRAIN, Action.REQUEUE, id="it saved and lets another host continue"),
        pytest.param(STOPPED, 0, Wish.MAKE_WAY, Action.REQUEUE, id="it saved and makes way for another job"),
        pytest.param(STOPPED, 0, Wish.TIME_IS_UP, Action.FAIL, id="its time was up"),
        pytest.param(STOPPED, 0, Wish.CANCEL, Action.CANCEL, id="it saved, but was cancelled"),
        pytest.param(STOPPED, 0, None, Action.LOSE, id="somebody else stopped it, cleanly, and may do so for ever"),
        pytest.param(None, SIGKILLED, Wish.PAUSE, Action.PAUSE, id="it did not save within its grace"),
        pytest.param(None, SIGKILLED, Wish.DRAIN, Action.REQUEUE, id="it did not save before the host went"),
        pytest.param(None, SIGKILLED, Wish.TIME_IS_UP, Action.FAIL, id="it did not save when its time was up"),
        pytest.param(None, SIGKILLED, None, Action.LOSE, id="it vanished"),
        pytest.param(None, 0, None, Action.LOSE, id="it ended well but finished nothing"),
        pytest.param(None, None, None, Action.LOSE, id="it never started"),
        pytest.param(
            FINISHED, 0, Wish.LOST, Action.ABANDON, id="a finished run of a lost lease is not ours to publish"
        ),
        pytest.param(BAD_DATA, 1, Wish.LOST, Action.ABANDON, id="nor is a failed one ours to fail"),
        pytest.param(None, SIGKILLED, Wish.LOST, Action.ABANDON, id="the lease is lost"),
    ],
)
def test_what_becomes_of_a_job(last: Event | None, exit_code: int | None, wish: Wish | None, action: Action) -> None:
    assert decide(last, exit_code=exit_code, wish=wish).action is action


@pytest.mark.parametrize(
    ("last", "progress", "action"),
    [
        pytest.param(STOPPED, Progress(2, 4, 4), Action.LINE_UP, id="it saved"),
        pytest.param(STOPPED, Progress(2, 4, 3), Action.LINE_UP, id="some of it is stored"),
        pytest.param(STOPPED, Progress(2, 4, None), Action.LOSE, id="nothing of it could be stored"),
        pytest.param(STOPPED, Progress(4, 4, None), Action.FAIL, id="it would never get any further"),
        pytest.param(None, Progress(2, 4, None), Action.FAIL, id="it did not save"),
        pytest.param(FINISHED, Progress(2, 10, None), Action.PUBLISH, id="it finished in the last moment"),
    ],
)
def test_a_job_that_lines_up_when_its_time_is_up_does_so_if_it_got_further(
    last: Event | None, progress: Progress, action: Action
) -> None:
    outcome = decide(last, exit_code=0, wish=Wish.TIME_IS_UP, max_runtime=90, lines_up=True, progress=progress)
    assert outcome.action is action


@pytest.mark.parametrize("wish", [Wish.DRAIN, Wish.MAKE_WAY])
def test_a_run_that_stopped_and_could_not_store_its_state_is_a_loss(wish: Wish | None) -> None:
    outcomes = [
        decide(STOPPED, exit_code=0, wish=wish, progress=Progress(began, 4, listed))
        for began, listed in ((2, None), (2, 3), (2, 4), (4, None))
    ]
    assert [outcome.action for outcome in outcomes] == [Action.LOSE, *[Action.REQUEUE] * 3]
    assert outcomes[0].error is not None
    assert outcomes[0].error["message"] == "it stopped after step 4, and no checkpoint since step 2 was stored"


@pytest.mark.parametrize(
    ("progress", "says"),
    [
        (Progress(2, 4, 4), "paused"),
        (Progress(4, 4, None), "paused"),
        (Progress(2, 4, 3), "paused after step 4; the newest checkpoint that is stored is that of step 3"),
        (Progress(2, 4, None), "paused after step 4; the newest checkpoint that is stored is that of step 2"),
        (Progress(0, 4, None), "paused after step 4; no checkpoint is stored, and it will begin anew"),
    ],
)
def test_a_paused_run_says_from_where_it_will_go_on_where_that_is_not_where_it_is(
    progress: Progress, says: str
) -> None:
    outcome = decide(STOPPED, exit_code=0, wish=Wish.PAUSE, progress=progress)
    assert (outcome.action, outcome.reason) == (Action.PAUSE, says)


def test_a_pause_comes_before_the_end_of_its_time() -> None:
    assert max(Wish.PAUSE, Wish.TIME_IS_UP) is Wish.PAUSE
    assert decide(STOPPED, exit_code=0, wish=Wish.TIME_IS_UP, max_runtime=90).yields
    assert not decide(None, exit_code=SIGKILLED, wish=Wish.TIME_IS_UP, max_runtime=90).yields


def test_the_engines_own_words_reach_the_user() -> None:
    outcome = decide(BAD_DATA, exit_code=1, wish=None)

    assert outcome.error is not None
    assert (outcome.error["code"], outcome.error["message"]) == ("invalid_data", "line 7 is empty")
    assert outcome.error["param"] == "data.train"
    assert outcome.error["hint"], "the code's own hint stands in where the engine gave none"


def test_running_out_of_time_says_how_to_go_on() -> None:
    outcome = decide(STOPPED, exit_code=0, wish=Wish.TIME_IS_UP, max_runtime=90)

    assert outcome.error is not None
    assert outcome.error["code"] == "max_runtime"
    assert "90 seconds" in outcome.error["message"]
    assert "longer max_runtime" in outcome.error["hint"]


def test_a_run_without_a_last_word_is_told_by_its_signal() -> None:
    outcome = decide(None, exit_code=SIGKILLED, wish=None)

    assert outcome.error is not None
    assert outcome.error["code"] == "rank_lost"
    assert "killed by signal 9" in outcome.error["message"]


def test_a_run_whose_last_word_found_no_room_is_told_by_its_exit_code() -> None:
    outcome = decide(None, exit_code=NO_ROOM, wish=None)

    assert outcome.action is Action.LOSE
    assert outcome.error is not None
    assert outcome.error["code"] == "disk_full"
