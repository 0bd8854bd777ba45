"""How long somebody leaves alone what others need."""

from __future__ import annotations

from contextlib import suppress

import pytest

from workers import rest
from workers.rest import Rest


@pytest.mark.parametrize(
    ("took", "rests"),
    [(0.01, 0.0), (0.1, 0.4), (0.5, 2.0), (9.0, 2.0)],
    ids=["a moment", "four times as long", "at most", "no longer"],
)
@pytest.mark.parametrize("error", [None, ValueError])
def test_who_worked_for_long_rests_and_who_did_not_goes_on(
    monkeypatch: pytest.MonkeyPatch, took: float, rests: float, error: type[Exception] | None
) -> None:
    now = 100.0
    monkeypatch.setattr(rest, "monotonic", lambda: now)
    between = Rest(times=4.0, unless_seconds=0.025, most_seconds=2.0)
    assert between.seconds_left == 0
    with suppress(ValueError), between.after():
        now += took
        if error is not None:
            raise error
    assert between.seconds_left == pytest.approx(rests)
    now += rests / 2
    assert between.seconds_left == pytest.approx(rests / 2)
    now += rests
    assert between.seconds_left == 0
