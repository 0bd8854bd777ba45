"""A sampler at the broker: requests taken and answered line by line, and given up when nobody waits for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any

import pytest

from core import broker, sampling
from core.errors import ContextTooLong, DomainError, NotFound, TimedOut, Unavailable
from core.models import Model
from core.sampling import ALIVE, REQUESTS, Line, Patience, Sampler, alive, wanted
from core.services import Services
from core.settings import Settings
from tests.workers.test_residents import DEADLINE_SECONDS, FAKE, copy_nothing
from workers.orders import Orders
from workers.outcome import Wish
from workers.residents import Failed, Residents
from workers.sampler import Counter, bring, connect

PATIENCE = Patience(begin=DEADLINE_SECONDS, end=DEADLINE_SECONDS)


class Serving:
    """A broker, a sampler in a thread of its own, and who asks."""

    def __init__(self, settings: Settings, residents: Residents) -> None:
        self.client = connect(settings)
        self.counter = Counter(connect(settings), residents)
        self.asking = Sampler(settings.redis)
        self.orders = Orders()
        self.thread = Thread(target=self.counter.run, args=(self.orders,))

    def start(self) -> None:
        self.thread.start()
        until(lambda: self.asking.is_alive())

    def stop(self) -> None:
        self.orders.give(Wish.DRAIN)
        if self.thread.ident is not None:
            self.thread.join(DEADLINE_SECONDS)
            assert not self.thread.is_alive()

    def ask(self, model: str, prompt: str, patience: Patience = PATIENCE) -> list[Line]:
        async def all_lines() -> list[Line]:
            async with aclosing(self.asking.ask({"model": model, "prompt": prompt}, patience)) as lines:
                return [line async for line in lines]

        return asyncio.run(all_lines())


def until(claim: Any) -> None:
    deadline, pause = monotonic() + DEADLINE_SECONDS, Event()
    while not claim():
        assert monotonic() < deadline
        pause.wait(0.02)


@pytest.fixture
def serving(services: Services, tmp_path: Path) -> Iterator[Serving]:
    settings = Settings(data_dir=services.settings.data_dir)
    residents = Residents(tmp_path / "sampler", copy_nothing, command=FAKE)
    with broker.running(settings):
        made = Serving(settings, residents)
        yield made
        made.stop()
        residents.close()
        made.client.close()
        made.counter.client.close()


def test_a_request_goes_through_the_broker_and_its_lines_back(serving: Serving) -> None:
    with pytest.raises(Unavailable, match="No sampler is online"):
        serving.ask("a", "hello")
    serving.start()
    lines = serving.ask("a", "hello")
    text = "".join(choice["text"] for line in lines for choice in line["choices"])
    assert text.startswith("hello from")
    assert text.endswith("['id', 'prompt']"), "the process sees what is its business"
    assert lines[-1]["usage"] == {"prompt_tokens": 1, "completion_tokens": 2}
    for model, prompt, kind, says in (
        ("absent", "x", NotFound, "no model 'absent'"),
        ("a", "refuse", ContextTooLong, "long"),
        ("a", "die", Unavailable, "has died"),
    ):
        with pytest.raises(DomainError, match=says) as caught:
            serving.ask(model, prompt)
        assert type(caught.value) is kind
    with pytest.raises(TimedOut):
        serving.ask("a", "wait", Patience(end=1.0))
    assert serving.client.keys("trainshed:sample:*") == []


def test_who_leaves_is_worked_for_no_longer(serving: Serving) -> None:
    serving.start()

    async def leave() -> None:
        async with aclosing(serving.asking.ask({"model": "a", "prompt": "endless"}, PATIENCE)) as lines:
            await anext(lines)

    asyncio.run(leave())
    until(lambda: serving.ask("a", "who was cancelled?")[-1]["choices"][0]["text"])


def test_a_request_that_nobody_wants_any_more_is_not_begun(serving: Serving) -> None:
    serving.client.lpush(REQUESTS, json.dumps({"id": "left", "model": "a", "prompt": "endless"}))
    serving.start()
    until(lambda: not serving.client.llen(REQUESTS))
    assert serving.ask("a", "who was cancelled?")[-1]["choices"][0]["text"] == ""
    assert not serving.client.exists(sampling.answers("left"))


def test_the_death_of_the_sampler_that_has_a_request_is_told(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_LOOK_SECONDS", 0.1)
    serving.client.set(ALIVE, b"1")
    serving.client.set(alive("mortal"), b"1")

    def take() -> None:
        _, raw = serving.client.brpop([REQUESTS], timeout=DEADLINE_SECONDS)  # type: ignore[misc]
        name = json.loads(raw)["id"]
        assert serving.client.exists(wanted(name))
        serving.client.rpush(sampling.answers(name), json.dumps({"taken": "mortal"}))
        serving.client.delete(alive("mortal"))

    thread = Thread(target=take)
    thread.start()
    with pytest.raises(Unavailable, match="has died; ask again"):
        serving.ask("a", "hello")
    thread.join(DEADLINE_SECONDS)


def test_a_request_that_cannot_be_begun_is_left_for_others(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.sampler.REQUESTS_AT_ONCE", 1)
    begun, go_on = Event(), Event()

    def busy(id_: str, request: Line) -> None:
        begun.set()
        assert go_on.wait(DEADLINE_SECONDS)

    monkeypatch.setattr(serving.counter, "answer", busy)
    serving.start()
    other = serving.client
    other.set(wanted("1"), b"1")
    try:
        other.lpush(REQUESTS, json.dumps({"id": "1", "model": "a"}))
        assert begun.wait(DEADLINE_SECONDS)
        other.lpush(REQUESTS, json.dumps({"id": "2", "model": "a"}))
        # Twice around, so that it had every chance to take it.
        for _ in range(2):
            other.delete(ALIVE)
            until(lambda: other.exists(ALIVE))
        assert other.llen(REQUESTS) == 1
    finally:
        go_on.set()


def test_a_base_on_this_host_is_linked_and_a_result_is_fetched(services: Services, tmp_path: Path) -> None:
    (services.settings.models / "base").mkdir(parents=True)
    (services.settings.models / "base" / "config.json").write_text("{}")
    services.storage.put_bytes("jobs/job-1/1/artifacts/model/config.json", json.dumps({"a": 1}).encode())
    with services.db.session() as session:
        session.add(Model(key="base", id="base", source="dir:base", shape={}))
        session.add(Model(key="result", id="result", source="storage:jobs/job-1/1/artifacts/model", shape={}))
        session.add(Model(key="moved", id="moved", source="dir:moved", shape={}))
        session.add(Model(key="orphan", id="orphan", source="adapter:job-gone:jobs/job-gone/1/artifacts", shape={}))
    bringing = bring(services)

    bringing("base", tmp_path / "one")
    bringing("result", tmp_path / "two")

    assert (tmp_path / "one").is_symlink()
    assert json.loads((tmp_path / "two" / "config.json").read_text()) == {"a": 1}
    with pytest.raises(Failed, match="no such model"):
        bringing("nobody", tmp_path / "three")
    with pytest.raises(Failed, match="'moved' is not in the models directory of the host"):
        bringing("moved", tmp_path / "four")
    with pytest.raises(Failed, match="the job job-gone was deleted, and the adapter that it made with it"):
        bringing("orphan", tmp_path / "five")
