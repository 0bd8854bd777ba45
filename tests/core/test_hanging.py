"""What may hang is waited for so long and no longer, and left alone while it hangs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from threading import enumerate as threads

import pytest

from core import hanging
from core.hanging import CrowdedError, HangsError, Patient, meanwhile
from tests.workers.test_lease import until

DEADLINE_SECONDS = 60
MANY = 30


@pytest.fixture
def go_on() -> Iterator[Event]:
    """Until it is set, what waits for it hangs."""
    event = Event()
    yield event
    event.set()


def fail(error: Exception) -> None:
    raise error


def left_behind() -> int:
    return sum(thread.name == "patient" for thread in threads())


def hang(patient: Patient, what: Hashable, call: Callable[[], object]) -> type[HangsError] | None:
    """How asking failed; None where there was an answer."""
    try:
        patient.ask(what, call)
    except HangsError as error:
        return type(error)
    return None


@pytest.mark.parametrize("error", [ValueError("x"), TimeoutError("the file system's own")], ids=str)
def test_what_answers_is_as_if_it_had_been_called(error: Exception) -> None:
    patient = Patient(seconds=60, most=1, waiting=1)
    assert patient.ask("a", lambda: 7) == 7
    with pytest.raises(type(error), match=str(error)):
        patient.ask("a", lambda: fail(error))
    assert patient.ask("a", lambda: 8) == 8


def test_what_hangs_is_not_asked_again_before_it_answers_and_the_rest_is(go_on: Event) -> None:
    patient, asked = Patient(seconds=0.01, most=2, waiting=1), list[str]()

    def ask() -> bool:
        asked.append("hangs")
        return go_on.wait()

    assert [hang(patient, "hangs", ask) for _ in range(3)] == [HangsError] * 3
    assert asked == ["hangs"]
    patient.seconds = 60
    assert patient.ask("another", lambda: 7) == 7
    go_on.set()
    until(lambda: not patient._under_way)
    assert patient.ask("hangs", ask)


def test_however_many_ask_at_once_few_threads_are_left_behind(go_on: Event) -> None:
    patient, one, before = Patient(seconds=0.2, most=4, waiting=8), Event(), left_behind()
    with ThreadPoolExecutor(MANY) as askers:
        assert list(askers.map(lambda _: hang(patient, "same", one.wait), range(MANY))) == [HangsError] * MANY
        assert left_behind() - before == 1
        assert set(askers.map(lambda what: hang(patient, what, go_on.wait), range(MANY))) == {HangsError, CrowdedError}
        assert left_behind() - before == 4
        # One that comes back makes room for one.
        one.set()
        until(lambda: left_behind() - before == 3)
        assert None not in set(askers.map(lambda what: hang(patient, what, go_on.wait), range(MANY)))
        assert left_behind() - before == 4


def test_who_asks_what_is_being_asked_gets_the_same_answer(go_on: Event) -> None:
    patient, asked = Patient(seconds=60, most=1, waiting=MANY), list[int]()

    def ask(number: int) -> int:
        asked.append(number)
        go_on.wait()
        return number

    with ThreadPoolExecutor(MANY) as askers:
        answers = [askers.submit(patient.ask, "what", lambda number=number: ask(number)) for number in range(MANY)]
        until(lambda: patient._waiting._value == 0)  # type: ignore[attr-defined]
        go_on.set()
        assert {answer.result() for answer in answers} == set(asked)
    assert len(asked) == 1


def test_who_finds_no_room_waits_for_it(go_on: Event) -> None:
    patient = Patient(seconds=60, most=1, waiting=2)
    with ThreadPoolExecutor(2) as askers:
        first = askers.submit(patient.ask, "first", go_on.wait)
        until(lambda: bool(patient._under_way))
        second = askers.submit(patient.ask, "second", lambda: 7)
        until(lambda: patient._waiting._value == 0)  # type: ignore[attr-defined]
        assert not second.done()
        go_on.set()
        assert (first.result(), second.result()) == (True, 7)


def test_few_wait_for_longer_than_a_moment_and_they_let_go_of_what_others_need(
    go_on: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient, aside, told = Patient(seconds=60, most=2, waiting=1), Event(), list[str]()

    @contextmanager
    def let_go() -> Iterator[None]:
        aside.set()
        yield
        told.append("taken back")

    def ask() -> bool:
        meanwhile.set(let_go)
        monkeypatch.setattr(hanging, "A_MOMENT", 60)
        assert patient.ask("quick", lambda: 7) == 7
        assert not aside.is_set()
        monkeypatch.setattr(hanging, "A_MOMENT", 0.01)
        return patient.ask("hangs", go_on.wait)

    with ThreadPoolExecutor(1) as asker:
        waits = asker.submit(ask)
        assert aside.wait(DEADLINE_SECONDS)
        assert hang(patient, "hangs", go_on.wait) is HangsError
        assert not waits.done()
        go_on.set()
        assert waits.result()
    assert told == ["taken back"]


def test_of_many_asked_together_those_that_answer_do(go_on: Event) -> None:
    patient = Patient(seconds=1.0, most=2, waiting=1)
    calls: dict[str, Callable[[], object]] = {"hangs": go_on.wait, **{str(n): lambda n=n: n for n in range(9)}}
    for _ in range(2):
        assert {what: answer.result() for what, answer in patient.ask_all(calls).items()} == {
            str(n): n for n in range(9)
        }
