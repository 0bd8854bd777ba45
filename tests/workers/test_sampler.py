"""Models that stay loaded, and what a request gets when one of them does not answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any

import pytest

from core import broker
from core.errors import Unavailable
from core.models import Model
from core.sampling import ALIVE, REQUESTS, Sampler
from core.services import Services
from core.settings import Settings
from workers.orders import Orders
from workers.outcome import Wish
from workers.sampler import Counter, Failed, Residents, bring, connect

FAKE = (sys.executable, str(Path(__file__).parents[1] / "fakes" / "serve.py"))
DEADLINE_SECONDS = 30


def soon() -> float:
    return monotonic() + DEADLINE_SECONDS


def copy_nothing(model: str, folder: Path) -> None:
    if model == "absent":
        raise Failed("there is no model 'absent'")
    folder.mkdir()
    if model == "broken":
        (folder / "broken").touch()


@pytest.fixture
def residents(tmp_path: Path) -> Iterator[Residents]:
    residents = Residents(tmp_path / "sampler", copy_nothing, limit=2, command=FAKE)
    yield residents
    residents.close()
    assert not list((tmp_path / "sampler").glob("*")), "what was staged is cleared away"


def process_of(answer: dict[str, str]) -> str:
    return answer["text"].split()[2]


def test_a_model_stays_loaded_between_requests(residents: Residents) -> None:
    first = residents.ask("a", {"id": "1", "prompt": "hello"}, deadline=soon())
    second = residents.ask("a", {"id": "2", "prompt": "again"}, deadline=soon())

    assert (first["id"], second["id"]) == ("1", "2")
    assert process_of(first) == process_of(second)


def test_the_model_unused_for_longest_makes_room(residents: Residents) -> None:
    a = residents.ask("a", {"id": "1", "prompt": "x"}, deadline=soon())
    b = residents.ask("b", {"id": "2", "prompt": "x"}, deadline=soon())
    residents.ask("a", {"id": "3", "prompt": "x"}, deadline=soon())
    residents.ask("c", {"id": "4", "prompt": "x"}, deadline=soon())

    assert process_of(residents.ask("a", {"id": "5", "prompt": "x"}, deadline=soon())) == process_of(a)
    assert process_of(residents.ask("b", {"id": "6", "prompt": "x"}, deadline=soon())) != process_of(b)


@pytest.mark.parametrize(
    ("prompt", "seconds", "says"), [("die", DEADLINE_SECONDS, "has died"), ("hang", 1, "too long")]
)
def test_a_model_that_does_not_answer_is_started_anew_for_the_next_request(
    residents: Residents, prompt: str, seconds: float, says: str
) -> None:
    before = residents.ask("a", {"id": "0", "prompt": "x"}, deadline=soon())

    with pytest.raises(Failed, match=says):
        residents.ask("a", {"id": "1", "prompt": prompt}, deadline=monotonic() + seconds)

    after = residents.ask("a", {"id": "2", "prompt": "x"}, deadline=soon())
    assert after["id"] == "2"
    assert process_of(after) != process_of(before)


@pytest.mark.parametrize(("model", "says"), [("broken", "has died"), ("absent", "no model 'absent'")])
def test_a_model_that_cannot_be_loaded_is_told(residents: Residents, model: str, says: str) -> None:
    with pytest.raises(Failed, match=says):
        residents.ask(model, {"id": "1", "prompt": "x"}, deadline=soon())


def test_a_request_goes_through_the_broker_and_back(services: Services, residents: Residents) -> None:
    settings = Settings(data_dir=services.settings.data_dir)
    orders = Orders()
    with broker.running(settings), connect(settings) as client:
        asking = Sampler(settings.redis)
        with pytest.raises(Unavailable):
            asking.ask({"model": "a", "prompt": "hello"}, timeout=1)
        counter = Counter(client, residents)
        thread = Thread(target=counter.run, args=(orders,))
        thread.start()
        try:
            deadline, pause = soon(), Event()
            while not asking.is_alive():
                assert monotonic() < deadline
                pause.wait(0.02)
            good = asking.ask({"model": "a", "prompt": "hello"}, timeout=DEADLINE_SECONDS)
            bad = asking.ask({"model": "absent", "prompt": "hello"}, timeout=DEADLINE_SECONDS)
        finally:
            orders.give(Wish.DRAIN)
            thread.join(DEADLINE_SECONDS)

    assert good["text"].startswith("hello from")
    assert good["text"].endswith("['id', 'prompt']"), "the process sees what is its business"
    assert bad["error"] == "there is no model 'absent'"
    assert not thread.is_alive()


def test_a_request_that_cannot_be_begun_is_left_for_others(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.sampler.REQUESTS_AT_ONCE", 1)
    begun, go_on = Event(), Event()

    class Busy(Residents):
        def ask(self, model: str, request: dict[str, Any], *, deadline: float) -> dict[str, Any]:
            begun.set()
            assert go_on.wait(DEADLINE_SECONDS)
            return {}

    settings = Settings(data_dir=services.settings.data_dir)
    orders = Orders()
    with broker.running(settings), connect(settings) as client, connect(settings) as other:
        thread = Thread(target=Counter(client, Busy(settings.data_dir, bring(services))).run, args=(orders,))
        thread.start()
        try:
            other.lpush(REQUESTS, json.dumps({"id": "1", "model": "a"}))
            assert begun.wait(DEADLINE_SECONDS)
            other.lpush(REQUESTS, json.dumps({"id": "2", "model": "a"}))
            # Twice around, so that it had every chance to take it.
            for _ in range(2):
                other.delete(ALIVE)
                deadline, pause = soon(), Event()
                while not other.exists(ALIVE):
                    assert monotonic() < deadline
                    pause.wait(0.02)
            assert other.llen(REQUESTS) == 1
        finally:
            go_on.set()
            orders.give(Wish.DRAIN)
            thread.join(DEADLINE_SECONDS)


def test_a_base_on_this_host_is_linked_and_a_result_is_fetched(services: Services, tmp_path: Path) -> None:
    (services.settings.models / "base").mkdir(parents=True)
    (services.settings.models / "base" / "config.json").write_text("{}")
    services.storage.put_bytes("jobs/job-1/1/artifacts/model/config.json", json.dumps({"a": 1}).encode())
    with services.db.session() as session:
        session.add(Model(id="base", source="dir:base", shape={}))
        session.add(Model(id="result", source="storage:jobs/job-1/1/artifacts/model", shape={}))
        session.add(Model(id="moved", source="dir:moved", shape={}))
    bringing = bring(services)

    bringing("base", tmp_path / "one")
    bringing("result", tmp_path / "two")

    assert (tmp_path / "one").is_symlink()
    assert json.loads((tmp_path / "two" / "config.json").read_text()) == {"a": 1}
    with pytest.raises(Failed, match="no model 'nobody'"):
        bringing("nobody", tmp_path / "three")
    with pytest.raises(Failed, match="'moved' is not in this host's models directory"):
        bringing("moved", tmp_path / "four")
