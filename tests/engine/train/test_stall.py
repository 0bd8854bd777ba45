"""When a run has stalled, and which rank the others wait for, by plain values."""

import pytest

from engine.stacks import main_stack
from engine.stall import Found, Stillness, awaited, verdict
from engine.whereabouts import Place, Whereabouts, read


def place(step=3, *, moves=1, waits=5, waiting=False, phase="step"):
    return Place(moves=moves, waits=waits, step=step, waiting=waiting, phase=phase)


WAITS = place(waiting=True)
STACK = main_stack('Current thread 0x1 (most recent call first):\n  File "/a/engine/comm.py", line 7 in wait\n')


def test_a_run_stalls_when_no_rank_has_gone_on_for_so_long():
    stillness = Stillness(10)
    assert stillness.interval == 0.5
    for moment in range(40):
        # One rank that goes on is enough.
        assert not stillness.is_too_long([WAITS, place(moves=moment)], moment / 2)
    still = [stillness.is_too_long([WAITS, place(moves=39)], 19.5 + moment / 2) for moment in range(1, 21)]
    assert still == [False] * 19 + [True]


def test_time_in_which_the_launcher_did_not_look_does_not_count():
    stillness = Stillness(10)
    stillness.is_too_long([WAITS], 0)
    # The host slept for an hour; an interval of half a second, and one second that it may be late, are counted.
    assert not stillness.is_too_long([WAITS], 3600)
    assert stillness.seconds == 1.5


def test_a_run_that_was_still_for_long_before_may_be_so_again():
    stillness = Stillness(10)
    looks = [stillness.is_too_long([place(moves=moves)], moment / 2) for moves in (1, 2) for moment in range(19)]
    assert not any(looks)
    assert [stillness.is_too_long([place(moves=2)], 9 + moment / 2) for moment in range(1, 40)].index(True) == 35


@pytest.mark.parametrize("long_call", [None, place(0, phase="start"), place(0, phase="tokenizer")])
def test_what_a_library_does_in_one_call_may_take_an_hour(long_call):
    stillness = Stillness(10)
    seen = [stillness.is_too_long([WAITS, long_call], moment / 2) for moment in range(7202)]
    assert seen.index(True) == 7200


def test_a_rank_that_has_not_gone_on_yet_is_read_as_starting(tmp_path):
    path = tmp_path / "whereabouts" / "rank-0"
    whereabouts = Whereabouts(path)
    assert read(path) == Place(moves=0, waits=0, step=0, waiting=False, phase="start")
    whereabouts.go_on("meeting")
    assert read(path) == Place(moves=1, waits=0, step=0, waiting=False, phase="meeting")


def test_a_long_call_says_nothing_of_how_long_a_step_may_take():
    stillness = Stillness(10)
    assert not any(stillness.is_too_long([place(0, phase="start")], moment / 2) for moment in range(100))
    assert [stillness.is_too_long([WAITS], 50 + moment / 2) for moment in range(40)].index(True) == 20


def seconds_until_stalled(stillness, *, step_seconds):
    """After some steps of that length, how long the next one may stand still."""
    steps = max(20, int(60 / step_seconds))
    looks = int(steps * step_seconds / stillness.interval)
    for look in range(looks):
        moment = look * stillness.interval
        at = place(1 + int(moment / step_seconds), moves=look, waiting=True)
        assert not stillness.is_too_long([at, at], moment)
    begun = looks * stillness.interval
    still = place(1 + steps, moves=looks, waiting=True)
    for look in range(10_000):
        if stillness.is_too_long([still, still], begun + look * stillness.interval):
            return stillness.seconds
    return None


@pytest.mark.parametrize(
    ("step_seconds", "seconds"),
    # Fifty steps, but a minute at least, and never longer than was asked for.
    [(0.1, 60), (1.0, 60), (3.0, 150), (6.0, 300), (30.0, 600)],
)
def test_a_step_stalls_by_what_steps_of_this_run_usually_take(step_seconds, seconds):
    assert seconds_until_stalled(Stillness(600), step_seconds=step_seconds) == pytest.approx(seconds, rel=0.2)


def test_what_is_no_step_has_all_of_the_time_that_was_asked_for():
    stillness = Stillness(600)
    for moment in range(100):
        stillness.is_too_long([place(moment, moves=moment)], 5 * moment)
    export = place(99, moves=100, phase="export")
    looks = [stillness.is_too_long([export], 500 + 5 * look) for look in range(200)]
    assert looks.index(True) == 120


RANKS = {
    "frozen-within-a-wait": [Found(WAITS, STACK), Found(WAITS, [], "T"), Found(place(), STACK)],
    "the-one-that-does-not-wait": [Found(WAITS, STACK), Found(place(), STACK), Found(WAITS, STACK)],
    "all-wait-and-one-is-a-step-behind": [Found(place(4, waits=1, waiting=True), STACK), Found(WAITS, STACK)],
    "all-wait-in-one-step": [Found(place(waits=9, waiting=True), STACK), Found(place(waits=8, waiting=True), STACK)],
    "one-never-said-where-it-is": [Found(WAITS, STACK), Found(None, [])],
}


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS.keys())
def test_the_rank_that_the_others_wait_for_is_found(ranks):
    assert awaited(ranks) == 1


def test_the_verdict_names_the_rank_and_where_it_stands():
    stuck = main_stack(
        'Thread 0x1 (most recent call first):\n  File "/usr/lib/threading.py", line 1 in run\n\n'
        'some other line\nCurrent thread 0x2 (most recent call first):\n  File "/x/hooks.py", line 4 in rest\n'
        '  File "/x/engine/trainer.py", line 9 in take_step\n'
    )
    failed = verdict([Found(WAITS, STACK), Found(place(), stuck)], seconds=600.0)
    assert (failed.code, failed.rank) == ("stalled", 1)
    assert failed.message == (
        "the run has not gone on for 600 seconds, in step 3: the others wait for rank 1 of 2, which stands in "
        "rest (x/hooks.py:4), called from take_step (engine/trainer.py:9)"
    )
    frozen = verdict([Found(WAITS, STACK), Found(place(phase="model"), [], "T")], seconds=2.5)
    assert frozen.message == (
        "the run has not gone on for 2.5 seconds, in phase 'model': rank 1 of 2 is frozen and does not answer "
        "(it was stopped by a signal)"
    )
    alone = verdict([Found(place(), STACK)], seconds=1)
    assert alone.message.endswith("in step 3: it stands in wait (engine/comm.py:7)")
