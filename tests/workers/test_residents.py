"""Models that stay loaded, what requests to them share, and what one gets when a model does not answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any

import pytest
from psutil import pid_exists

from workers.residents import Failed, Residents

FAKE = (sys.executable, str(Path(__file__).parents[1] / "fakes" / "serve.py"))
DEADLINE_SECONDS = 30


def soon() -> float:
    return monotonic() + DEADLINE_SECONDS


def copy_nothing(model: str, folder: Path) -> None:
    if model == "absent":
        raise Failed("there is no model 'absent'", code="not_found")
    folder.mkdir()
    if model in {"broken", "dies"}:
        (folder / model).touch()


@pytest.fixture
def residents(tmp_path: Path) -> Iterator[Residents]:
    residents = Residents(tmp_path / "sampler", copy_nothing, limit=2, command=FAKE)
    yield residents
    residents.close()
    assert not list((tmp_path / "sampler").glob("*")), "what was staged is cleared away"


def ask(residents: Residents, model: str, name: str, prompt: str = "x", **options: Any) -> str:
    """The text of the answer."""
    lines = list(residents.lines(model, {"id": name, "prompt": prompt}, **{"deadline": soon(), **options}))
    assert all(line["id"] == name for line in lines)
    return "".join(choice["text"] for line in lines for choice in line.get("choices", ()))


def process_of(text: str) -> str:
    return text.split()[2]


def test_a_model_stays_loaded_between_requests(residents: Residents) -> None:
    first, second = ask(residents, "a", "1", "hello"), ask(residents, "a", "2", "again")
    assert first.startswith("hello from")
    assert process_of(first) == process_of(second)


def test_requests_to_a_model_are_under_way_together(residents: Residents) -> None:
    ask(residents, "a", "0")
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(ask, residents, "a", str(number), "wait") for number in range(3)]
        answers: list[str] = []
        deadline = soon()
        while not all(one.done() for one in waiting):
            assert monotonic() < deadline
            ask(residents, "a", "go", "go")
        answers = [one.result() for one in waiting]
    assert answers == ["at last"] * 3


def test_the_model_unused_for_longest_makes_room(residents: Residents) -> None:
    a, b = ask(residents, "a", "1"), ask(residents, "b", "2")
    ask(residents, "a", "3")
    ask(residents, "c", "4")
    assert process_of(ask(residents, "a", "5")) == process_of(a)
    assert process_of(ask(residents, "b", "6")) != process_of(b)


def test_a_model_that_was_deleted_is_let_go_with_its_files_once_no_request_is_under_way(
    residents: Residents, tmp_path: Path
) -> None:
    kept, gone = (process_of(ask(residents, model, "r1")) for model in ("kept", "gone"))
    with closing(residents.lines("gone", {"id": "last", "prompt": "endless"}, deadline=soon())) as lines:
        next(lines)
        residents.let_go(lambda model: model == "gone")
        assert process_of(ask(residents, "gone", "r2")) == gone
    residents.let_go(lambda model: model == "gone")
    assert len([*tmp_path.glob("**/model-*")]) == 1
    assert process_of(ask(residents, "kept", "r3")) == kept


def test_a_model_that_answers_is_not_taken_away_and_who_comes_later_waits_for_the_next(residents: Residents) -> None:
    begun, go_on = Event(), Event()

    def endless(model: str) -> None:
        lines = residents.lines(model, {"id": model, "prompt": "endless"}, deadline=soon())
        assert next(lines)["choices"]
        begun.set()
        assert go_on.wait(DEADLINE_SECONDS)
        lines.close()

    threads = [Thread(target=endless, args=(model,)) for model in ("a", "b")]
    for thread in threads:
        thread.start()
    assert begun.wait(DEADLINE_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(ask, residents, "c", "3", "hello")
        with pytest.raises(Failed, match="busy with other models"):
            ask(residents, "d", "4", deadline=monotonic() + 0.2)
        assert not third.done()
        go_on.set()
        assert third.result(DEADLINE_SECONDS).startswith("hello from")
    for thread in threads:
        thread.join(DEADLINE_SECONDS)


def test_a_model_that_dies_fails_all_its_requests_and_is_started_anew_for_the_next(residents: Residents) -> None:
    before = ask(residents, "a", "0")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, residents, "a", "1", "wait")
        ask(residents, "a", "2")
        with pytest.raises(Failed, match="has died"):
            ask(residents, "a", "3", "die")
        with pytest.raises(Failed, match="has died"):
            waiting.result(DEADLINE_SECONDS)
    assert process_of(ask(residents, "a", "4")) != process_of(before)


def test_an_answer_that_takes_too_long_is_given_up_and_the_model_told(residents: Residents) -> None:
    ask(residents, "a", "0")
    with pytest.raises(Failed, match="too long") as caught:
        ask(residents, "a", "late", "wait", deadline=monotonic() + 0.5)
    assert caught.value.code == "timeout"
    assert ask(residents, "a", "1", "who was cancelled?") == "late"


@pytest.fixture
def hanging(residents: Residents, monkeypatch: pytest.MonkeyPatch) -> str:
    """The process of a model that was given a text that it takes for ever over, which nobody waits for any more."""
    process = process_of(ask(residents, "a", "0"))
    with pytest.raises(Failed, match="nobody waits"):
        ask(residents, "a", "1", "sleep", is_wanted=lambda: False)
    monkeypatch.setattr("workers.residents.HANGS_SECONDS", 0.0)
    return process


def test_a_model_that_hangs_is_started_anew_for_the_next(residents: Residents, hanging: str) -> None:
    assert process_of(ask(residents, "a", "2")) != hanging


def test_a_model_that_hangs_is_ended_though_nobody_asks_it(residents: Residents, hanging: str) -> None:
    assert pid_exists(int(hanging))
    residents.let_go(lambda model: False)
    assert not pid_exists(int(hanging))


def test_a_model_that_hears_what_is_given_up_does_not_hang(
    residents: Residents, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = process_of(ask(residents, "a", "0"))
    with pytest.raises(Failed, match="nobody waits"):
        ask(residents, "a", "1", "wait", is_wanted=lambda: False)
    assert ask(residents, "a", "2", "who was cancelled?") == "1"
    monkeypatch.setattr("workers.residents.HANGS_SECONDS", 0.0)
    residents.let_go(lambda model: False)
    assert process_of(ask(residents, "a", "3")) == process


def test_an_answer_that_nobody_wants_is_given_up_and_the_model_told(residents: Residents) -> None:
    with pytest.raises(Failed, match="nobody waits"):
        ask(residents, "a", "unwanted", "wait", is_wanted=lambda: False)
    lines = residents.lines("a", {"id": "left", "prompt": "endless"}, deadline=soon())
    next(lines)
    lines.close()
    assert ask(residents, "a", "1", "who was cancelled?") == "unwanted left"


@pytest.mark.parametrize(
    ("model", "says", "code"),
    [
        ("broken", "weights are missing", "invalid_model"),
        ("dies", "died while it loaded", "unavailable"),
        ("absent", "no model 'absent'", "not_found"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_told(residents: Residents, model: str, says: str, code: str) -> None:
    for _ in range(2):
        with pytest.raises(Failed, match=says) as caught:
            ask(residents, model, "1")
        assert caught.value.code == code
