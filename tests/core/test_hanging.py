"""What may hang is waited for so long and no longer, and left alone while it hangs."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import pytest

from core.hanging import HangsError, Patient
from tests.workers.test_lease import until


@pytest.fixture
def go_on() -> Iterator[Event]:
    """Until it is set, what waits for it hangs."""
    event = Event()
    yield event
    event.set()


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("error", [ValueError("x"), TimeoutError("the file system's own")], ids=str)
def test_what_answers_is_as_if_it_had_been_called(error: Exception) -> None:
    patient = Patient(seconds=60, most=1)
    assert patient.ask("a", lambda: 7) == 7
    with pytest.raises(type(error), match=str(error)):
        patient.ask("a", lambda: fail(error))
    assert patient.ask("a", lambda: 8) == 8


def test_what_hangs_is_not_asked_again_before_it_answers_and_the_rest_is(go_on: Event) -> None:
    patient, asked = Patient(seconds=0.01, most=2), list[str]()

    def hang() -> bool:
        asked.append("hangs")
        return go_on.wait()

    for _ in range(3):
        with pytest.raises(HangsError):
            patient.ask("hangs", hang)
    assert asked == ["hangs"]
    patient.seconds = 60
    assert patient.ask("another", lambda: 7) == 7
    go_on.set()
    until(lambda: not patient._hanging)
    assert patient.ask("hangs", hang)


def test_where_many_hang_nothing_more_is_left_behind(go_on: Event) -> None:
    patient = Patient(seconds=0.01, most=2)
    for what in ("first", "second", "third"):
        with pytest.raises(HangsError):
            patient.ask(what, go_on.wait if what != "third" else lambda: pytest.fail("asked"))
