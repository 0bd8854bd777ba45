"""First tries that were answered with a 5xx, and how long that is known."""

from __future__ import annotations

import pytest

from api import failed_tries
from api.failed_tries import FailedTries
from core.tries import RETRY_WINDOW


def test_a_first_try_is_known_to_have_failed_for_as_long_as_its_retries_are_known_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(failed_tries, "monotonic", lambda: now)
    failed = FailedTries()
    failed.note("of this body and key")
    now += RETRY_WINDOW.total_seconds() - 1
    assert "of this body and key" in failed
    assert "another" not in failed
    now += 2
    assert "of this body and key" not in failed


def test_the_last_ones_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_tries, "MOST", 2)
    failed = FailedTries()
    for digest in ("first", "second", "first", "third"):
        failed.note(digest)
    assert [digest in failed for digest in ("first", "second", "third")] == [True, False, True]
