"""A key has a minute's worth of requests, which comes back evenly; without a broker nobody is held up."""

from __future__ import annotations

from pathlib import Path

import pytest

from core import broker
from core.settings import Settings
from core.throttle import Throttle, bucket


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    settings = Settings(data_dir=tmp_path_factory.mktemp("throttle"))
    with broker.running(settings):
        yield settings.redis


def test_a_key_may_ask_so_often_at_once_and_then_waits_for_its_next_token(url: str) -> None:
    throttle = Throttle(url, per_minute=3)
    verdicts = [throttle.take("key-a") for _ in range(4)]
    assert [verdict.allowed for verdict in verdicts if verdict] == [True, True, True, False]
    assert [verdict.remaining for verdict in verdicts if verdict] == [2, 1, 0, 0]
    refused = verdicts[-1]
    assert refused is not None
    # A token comes every 20 seconds, three in a minute.
    assert 0 < refused.retry_after <= 20
    assert 40 < refused.full_in <= 60
    other = throttle.take("key-b")
    assert other is not None
    assert other.allowed
    throttle.close()


def test_tokens_come_back_evenly_and_never_beyond_a_minutes_worth(url: str) -> None:
    throttle = Throttle(url, per_minute=60)
    client = throttle._client
    seconds, _ = client.time()
    client.hset(bucket("key-c"), mapping={"tokens": "0", "at": str(seconds - 10)})
    verdict = throttle.take("key-c")
    assert verdict is not None
    assert verdict.tokens == pytest.approx(9, abs=1.5)
    client.hset(bucket("key-c"), mapping={"tokens": "0", "at": str(seconds - 10_000)})
    verdict = throttle.take("key-c")
    assert verdict is not None
    assert verdict.tokens == 59
    throttle.close()


def test_it_is_known_for_two_minutes_that_a_key_was_refused(url: str) -> None:
    throttle = Throttle(url, per_minute=1)
    client = throttle._client

    def again(*, after: int) -> bool | None:
        """Whether it is known when there is a token again, so many seconds later."""
        refused_at = float(client.hget(bucket("key-d"), "refused_at"))
        client.hset(bucket("key-d"), mapping={"tokens": "1", "refused_at": str(refused_at - after)})
        verdict = throttle.take("key-d")
        return verdict and verdict.refused_lately

    verdicts = [throttle.take("key-d") for _ in range(3)]
    assert [verdict.refused_lately for verdict in verdicts if verdict] == [False, False, True]
    assert again(after=60)
    assert again(after=61) is False
    throttle.close()


def test_without_a_broker_or_a_limit_nobody_counts(tmp_path: Path, url: str) -> None:
    away = Throttle(f"unix://{tmp_path}/nobody.sock", per_minute=1)
    assert [away.take("key-a") for _ in range(3)] == [None] * 3
    away.close()
    unlimited = Throttle(url, per_minute=0)
    assert unlimited.take("key-a") is None
    unlimited.close()
