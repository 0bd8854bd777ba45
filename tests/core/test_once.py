"""What several ask for within a moment is done once for all of them, and after the last of them asked."""

from __future__ import annotations

from threading import Event

from core.once import Once


def test_of_many_who_ask_within_a_moment_the_first_is_served_at_once_and_the_rest_together() -> None:
    done: list[int] = []
    once = Once(lambda: done.append(1), moment_seconds=3600)
    once.ask()
    assert len(done) == 1
    for _ in range(100):
        once.ask()
    assert len(done) == 1
    once.finish()
    assert len(done) == 2
    once.finish()
    assert len(done) == 2


def test_who_asks_within_the_moment_is_served_as_it_ends() -> None:
    served = Event()
    asked = False

    def act() -> None:
        if asked:
            served.set()

    once = Once(act, moment_seconds=0.01)
    once.ask()
    asked = True
    once.ask()
    assert served.wait(timeout=30)


def test_who_asks_while_it_is_done_is_served_anew() -> None:
    done: list[int] = []

    def act() -> None:
        done.append(1)
        if len(done) == 1:
            # What this act has looked at already may have changed since.
            once.ask()

    once = Once(act, moment_seconds=3600)
    once.ask()
    once.finish()
    assert len(done) == 2
