"""Bases come from a hub in the background: whole, checked, once, and through the death of whoever fetches them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from threading import enumerate as enumerate_threads
from typing import Any

import pytest
from sqlalchemy import select, update

from core import catalog, downloads, quotas
from core.backup import backup
from core.errors import InvalidSpec, NotReady, QuotaExceeded
from core.keys import Account
from core.models import HubDownload, Model, database_now
from core.services import Services
from tests import make
from tests.core.test_catalog import CONFIG, WHOLE
from tests.fakes.hub import COMMIT, FakeHub, hub
from tests.make import tokenizer, weights
from tests.workers.test_lease import until
from workers import fetcher
from workers.duties import END_SECONDS
from workers.fetcher import SPARE_BYTES, Fetcher
from workers.orders import Orders
from workers.outcome import Wish
from workers.staging import stage_model

WEIGHTS = "model.safetensors"
FILES = {
    "config.json": json.dumps(CONFIG).encode(), "tokenizer.json": tokenizer(260), WEIGHTS: weights(WHOLE),
}  # fmt: skip
TOTAL = sum(map(len, FILES.values()))
DEADLINE_SECONDS = 60
CUT = 20_000
"""Bytes of the weights, of 37,551."""


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    with hub("org/tiny", FILES, large=frozenset({WEIGHTS})) as fake:
        yield fake


@pytest.fixture
def asking(services: Services, fake: FakeHub) -> Services:
    services.settings = services.settings.model_copy(update={"hf_endpoint": fake.url})
    return services


def begin(services: Services, owner: Account, name: str = "tiny") -> str:
    """Register the twin's repository; the model's key."""
    found = downloads.find(services.settings, owner, "hf://org/tiny@v1.0")
    with services.db.session() as session:
        return downloads.begin(session, owner, name, found, models=services.settings.models).key


def look(services: Services, orders: Orders | None = None) -> None:
    Fetcher(services).look(orders or Orders())


def row(services: Services, key: str) -> HubDownload:
    with services.db.reading() as session:
        return session.get_one(HubDownload, key)


def due(services: Services, key: str) -> None:
    """As if the wait, or the hold of a process that died, were over."""
    with services.db.session() as session:
        session.execute(update(HubDownload).where(HubDownload.model_key == key).values(due_at=0.0))


def asked_from(fake: FakeHub) -> list[str | None]:
    """From where on each request wanted the weights."""
    return [one.headers.get("range") for one in fake.of(f"/cdn/{WEIGHTS}")]


def test_a_base_comes_and_is_there_for_jobs_on_any_host(
    asking: Services, fake: FakeHub, owner: Account, tmp_path: Path
) -> None:
    key = begin(asking, owner)
    with asking.db.reading() as session, pytest.raises(NotReady, match=f"0 of {TOTAL:,} bytes"):
        catalog.facts(session, owner, "tiny", models=asking.settings.models)
    look(asking)
    found = row(asking, key)
    assert (found.status, found.done_bytes, found.due_at, found.commit_hash) == ("ready", TOTAL, None, COMMIT)
    with asking.db.reading() as session:
        assert catalog.facts(session, owner, "tiny", models=asking.settings.models).shape.hidden_size == 16
        source = catalog.source_of(session, key)
    assert source is not None
    stage_model(asking, source, tmp_path / "staged")
    assert {path.name: path.read_bytes() for path in (tmp_path / "staged").iterdir()} == FILES
    assert not list(asking.settings.downloads.iterdir())
    assert backup(asking.settings, tmp_path / "backup").objects == len(FILES)
    # By the commit, whatever the revision is by then.
    assert {one.path.split("/")[4] for one in fake.of("/resolve/")} == {COMMIT}


def test_a_download_that_breaks_off_goes_on_from_there(asking: Services, fake: FakeHub, owner: Account) -> None:
    key, fake.cut_after = begin(asking, owner), CUT
    look(asking)
    found = row(asking, key)
    assert (found.status, found.failures) == ("downloading", 1)
    assert "connection failed" in (found.reason or "")
    assert found.done_bytes >= CUT
    look(asking)
    assert asked_from(fake) == [None], "not before its wait is over"
    due(asking, key)
    look(asking)
    assert row(asking, key).status == "ready"
    assert asked_from(fake) == [None, f"bytes={CUT}-"]


def test_a_process_takes_no_base_that_it_is_at_still(
    asking: Services, fake: FakeHub, owner: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where the database is away for longer than a hold lasts, and an idle thread finds it back first.
    monkeypatch.setattr(fetcher, "BEAT_SECONDS", DEADLINE_SECONDS)
    key, fake.halt_after = begin(asking, owner), CUT
    both = Fetcher(asking)
    first = Thread(target=both.look, args=(Orders(),), daemon=True)
    first.start()
    assert fake.halted.wait(DEADLINE_SECONDS)
    due(asking, key)
    both.look(Orders())
    assert row(asking, key).attempts == 1
    fake.go_on.set()
    first.join(DEADLINE_SECONDS)
    assert row(asking, key).status == "ready"
    assert asked_from(fake) == [None]


def test_who_has_lost_a_base_unnoticed_and_who_has_it_now_do_not_write_to_one_file(
    asking: Services, fake: FakeHub, owner: Account, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As above, in two processes.
    monkeypatch.setattr(fetcher, "BEAT_SECONDS", DEADLINE_SECONDS)
    key, fake.halt_after = begin(asking, owner), CUT
    first = Thread(target=look, args=(asking,), daemon=True)
    first.start()
    assert fake.halted.wait(DEADLINE_SECONDS)
    due(asking, key)
    look(asking)
    found = row(asking, key)
    assert (found.status, found.attempts) == ("downloading", 2)
    assert found.reason == "an earlier attempt on this host is not over yet"
    assert found.failures == 0, "it counts for no longer wait"
    fake.go_on.set()
    first.join(DEADLINE_SECONDS)
    due(asking, key)
    look(asking)
    assert row(asking, key).status == "ready"
    assert asked_from(fake) == [None], "what the first brought was whole"
    stage_model(asking, f"storage:{downloads.prefix_of(key)}", tmp_path / "staged")
    assert {path.name: path.read_bytes() for path in (tmp_path / "staged").iterdir()} == FILES


def test_a_hub_that_knows_no_ranges_begins_again(asking: Services, fake: FakeHub, owner: Account) -> None:
    key, fake.cut_after, fake.whole_only = begin(asking, owner), CUT, True
    look(asking)
    due(asking, key)
    look(asking)
    found = row(asking, key)
    assert (found.status, found.done_bytes) == ("ready", TOTAL)


@pytest.mark.parametrize("name", FILES)
def test_what_is_not_what_the_hub_said_is_never_used_and_is_fetched_anew(
    asking: Services, fake: FakeHub, owner: Account, name: str
) -> None:
    fake.damaged = None
    key = begin(asking, owner)
    fake.damaged = name
    look(asking)
    found = row(asking, key)
    assert (found.status, found.reason) == (
        "downloading", f"{name} is not what the hub says it is: its size or hash differs",
    )  # fmt: skip
    assert not list(asking.storage.list(downloads.PREFIX))
    fake.damaged = None
    due(asking, key)
    look(asking)
    assert row(asking, key).status == "ready"


@pytest.mark.parametrize(
    ("outage", "words"),
    [({"answers": [503]}, r"it answered 503\."), ({"pages": 1}, r"a sign-in page may stand between, or HF_ENDPOINT")],
    ids=["away", "a proxy's page"],
)
def test_an_outage_however_long_is_waited_out_and_told_meanwhile(
    asking: Services, fake: FakeHub, owner: Account, outage: dict[str, Any], words: str
) -> None:
    key = begin(asking, owner)
    for _ in range(2 * max(len(downloads.WAITS), downloads.MOST_DAMAGES)):
        vars(fake).update(deepcopy(outage))
        due(asking, key)
        look(asking)
        assert row(asking, key).status == "downloading"
    with (
        asking.db.reading() as session,
        pytest.raises(NotReady, match=rf"in the way last: the hub \S+ can't be reached: .*{words}"),
    ):
        catalog.facts(session, owner, "tiny", models=asking.settings.models)
    due(asking, key)
    look(asking)
    assert row(asking, key).status == "ready"


def test_what_comes_damaged_again_and_again_is_given_up_soon_with_the_reason(
    asking: Services, fake: FakeHub, owner: Account
) -> None:
    key = begin(asking, owner)
    fake.damaged = WEIGHTS
    for left in reversed(range(downloads.MOST_DAMAGES)):
        due(asking, key)
        look(asking)
        found = row(asking, key)
        assert found.status == ("downloading" if left else "failed")
        # What was whole stays, and nothing else counts as here.
        assert found.done_bytes == TOTAL - len(FILES[WEIGHTS])
    assert len(fake.of(f"/cdn/{WEIGHTS}")) == downloads.MOST_DAMAGES
    words = rf"{WEIGHTS} is not what the hub says it is: .*, {downloads.MOST_DAMAGES} times in a row\. Delete it"
    with asking.db.reading() as session, pytest.raises(NotReady, match=words):
        catalog.facts(session, owner, "tiny", models=asking.settings.models)


def test_a_file_that_went_from_the_hub_is_the_end_of_it(asking: Services, fake: FakeHub, owner: Account) -> None:
    key = begin(asking, owner)
    del fake.files[WEIGHTS]
    look(asking)
    found = row(asking, key)
    assert (found.status, found.due_at) == ("failed", None)
    assert f"has no hf://org/tiny@{COMMIT}/{WEIGHTS}" in (found.reason or "")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        pytest.param(401, "HF_TOKEN", id="it became private"),
        pytest.param(403, "accepted its terms", id="it became gated"),
        pytest.param(410, "look at its name and revision there", id="it is gone"),
    ],
)
def test_what_the_hub_refuses_is_given_up_at_once_with_what_to_do(
    asking: Services, fake: FakeHub, owner: Account, status: int, words: str
) -> None:
    key = begin(asking, owner)
    fake.answers = [status]
    look(asking)
    found = row(asking, key)
    assert (found.status, found.attempts) == ("failed", 1)
    assert words in (found.reason or "")


def test_weights_of_another_model_are_found_once_they_are_here(asking: Services, fake: FakeHub, owner: Account) -> None:
    fake.files[WEIGHTS] = weights({"x": ("F32", (1,))})
    key = begin(asking, owner)
    look(asking)
    found = row(asking, key)
    assert found.status == "failed"
    assert "tensor x is not part of the model" in (found.reason or "")
    Fetcher(asking).tidy()
    assert not list(asking.settings.downloads.iterdir())


@contextmanager
def upkeep(services: Services) -> Iterator[subprocess.Popen[bytes]]:
    """The process that fetches, as `serve` starts it."""
    variables = os.environ | services.settings.environment()
    process = subprocess.Popen(
        [sys.executable, "-m", "workers.upkeep"], env=variables, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_SECONDS)


def test_the_death_of_whoever_fetches_costs_no_byte_that_had_come(
    asking: Services, fake: FakeHub, owner: Account
) -> None:
    key, fake.halt_after = begin(asking, owner), CUT
    with upkeep(asking) as process:
        assert fake.halted.wait(DEADLINE_SECONDS)
        work = asking.settings.downloads / key / "tiny" / f".{WEIGHTS}.part"
        until(lambda: work.exists() and work.stat().st_size > 0)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_SECONDS)
    fake.go_on.set()
    come = work.stat().st_size
    look(asking)
    assert row(asking, key).status == "downloading", "another holds it, for all that anybody knows"
    due(asking, key)
    look(asking)
    assert row(asking, key).status == "ready"
    assert asked_from(fake)[-1] == f"bytes={come}-"


def test_who_is_told_to_end_leaves_it_to_the_next_at_once(asking: Services, fake: FakeHub, owner: Account) -> None:
    key, orders = begin(asking, owner), Orders()
    orders.give(Wish.DRAIN)
    look(asking, orders)
    assert row(asking, key).status == "downloading"
    look(asking)
    assert row(asking, key).status == "ready"


def test_the_end_waits_for_no_hub_and_what_comes_is_let_go_as_soon_as_that_speaks(
    asking: Services, fake: FakeHub, owner: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.fetcher.LOOK_SECONDS", 0.02)
    monkeypatch.setattr("workers.fetcher.LAST_SECONDS", 0.1)
    running = Running(asking)
    running.thread.start()
    keys = []
    for number in range(fetcher.AT_ONCE):
        fake.halted.clear()
        fake.halt_after = CUT
        keys.append(begin(asking, owner, f"base-{number}"))
        assert fake.halted.wait(DEADLINE_SECONDS)
    running.orders.give(Wish.DRAIN)
    running.thread.join(END_SECONDS)
    assert not running.thread.is_alive()
    fake.go_on.set()
    until(lambda: all(is_anybodys(asking, key) for key in keys))
    assert {row(asking, key).status for key in keys} == {"downloading"}


def is_anybodys(services: Services, key: str) -> bool:
    with services.db.reading() as session:
        is_due = (HubDownload.model_key == key) & (HubDownload.due_at <= database_now())
        return session.scalars(select(HubDownload).where(is_due)).one_or_none() is not None


def test_a_base_that_was_deleted_meanwhile_leaves_nothing(asking: Services, owner: Account) -> None:
    models = asking.settings.models
    key = begin(asking, owner)
    look(asking)
    assert len(list(asking.storage.list(downloads.PREFIX))) == len(FILES)
    assert downloads.sweep(asking.db, asking.storage, age=timedelta()) == []
    with asking.db.session() as session:
        catalog.delete(session, owner, "tiny", models=models)
    assert downloads.sweep(asking.db, asking.storage, age=timedelta()) == [key]
    assert not list(asking.storage.list(downloads.PREFIX))
    gone = begin(asking, owner)
    with asking.db.session() as session:
        errand = downloads.take(session)
        catalog.delete(session, owner, "tiny", models=models)
    assert errand is not None
    Fetcher(asking).bring(errand, Orders())
    with asking.db.reading() as session:
        assert session.get(Model, gone) is None
    Fetcher(asking).tidy()
    assert not list(asking.settings.downloads.iterdir())


def test_a_disk_without_room_for_it_is_told_and_waited_for(
    asking: Services, fake: FakeHub, owner: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = begin(asking, owner)
    monkeypatch.setattr("workers.fetcher.SPARE_BYTES", 2**60)
    look(asking)
    found = row(asking, key)
    assert found.status == "downloading"
    assert "free space on it" in (found.reason or "")
    assert not fake.of("/cdn/")


def test_a_base_of_a_project_is_part_of_what_it_may_store_and_gets_no_token(
    asking: Services, fake: FakeHub, owner: Account
) -> None:
    member = Account(project_id="proj-other", key_id="key-other", scopes=frozenset({"admin"}))
    with asking.db.session() as session:
        make.project(session).storage_bytes = TOTAL
    asking.settings = asking.settings.model_copy(update={"hf_token": "hf_secret"})
    key = begin(asking, member)
    look(asking)
    assert row(asking, key).status == "ready"
    assert not [one for one in fake.asked if "authorization" in one.headers]
    with asking.db.reading() as session:
        assert quotas.storage_left(session, member.project_id) == 0
    with pytest.raises(QuotaExceeded):
        begin(asking, member, "once-more")
    begin(asking, owner)
    assert fake.asked[-1].headers["authorization"] == "Bearer hf_secret"


def test_a_name_that_is_taken_is_refused(asking: Services, owner: Account) -> None:
    begin(asking, owner)
    with pytest.raises(InvalidSpec, match="taken"):
        begin(asking, owner)


def test_a_server_that_was_taken_off_the_net_asks_nothing_and_says_so_until_it_is_back(
    asking: Services, fake: FakeHub, owner: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = begin(asking, owner)
    monkeypatch.setattr("workers.fetcher.LOOK_SECONDS", 0.02)
    before, settings = len(fake.asked), asking.settings
    asking.settings = settings.model_copy(update={"hf_hub_offline": True})
    look(asking)
    found = row(asking, key)
    assert (found.status, found.attempts, len(fake.asked)) == ("downloading", 0, before)
    assert "HF_HUB_OFFLINE is set" in (found.reason or "")
    asking.settings, fake.halt_after = settings, CUT
    with Running(asking):
        assert fake.halted.wait(DEADLINE_SECONDS)
        assert row(asking, key).reason is None
        fake.go_on.set()
        until(lambda: row(asking, key).status == "ready")


class Running:
    """A fetcher at work in this process."""

    def __init__(self, services: Services) -> None:
        self.fetcher, self.orders = Fetcher(services), Orders()
        self.thread = Thread(target=self.fetcher.run, args=(self.orders,), daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.orders.give(Wish.DRAIN)
        self.thread.join(DEADLINE_SECONDS)


def test_a_base_that_comes_slowly_keeps_no_other_waiting(
    asking: Services, fake: FakeHub, owner: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.fetcher.LOOK_SECONDS", 0.02)
    slow, fake.halt_after = begin(asking, owner), CUT
    with Running(asking):
        assert fake.halted.wait(DEADLINE_SECONDS)
        others = [begin(asking, owner, name) for name in ("second", "third")]
        until(lambda: all(row(asking, key).status == "ready" for key in others))
        assert row(asking, slow).status == "downloading"
        fake.go_on.set()
        until(lambda: row(asking, slow).status == "ready")


def test_two_that_fit_alone_and_not_together_come_one_after_the_other(
    asking: Services, fake: FakeHub, owner: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Storage lies on the same disk, so each needs its size twice.
    usage = shutil.disk_usage(asking.settings.data_dir)
    room = 3 * TOTAL + SPARE_BYTES
    monkeypatch.setattr("workers.fetcher.shutil.disk_usage", lambda _: usage._replace(free=room))
    begin(asking, owner)
    with asking.db.session() as session:
        first = downloads.take(session)
    second = begin(asking, owner, "second")
    assert first is not None
    fake.halt_after, fetcher = CUT, Fetcher(asking)
    thread = Thread(target=fetcher.bring, args=(first, Orders()), daemon=True)
    thread.start()
    assert fake.halted.wait(DEADLINE_SECONDS)
    fetcher.look(Orders())
    found = row(asking, second)
    assert (found.status, found.done_bytes, found.failures) == ("downloading", 0, 0)
    assert "needed with what comes beside it: it waits until that is here" in (found.reason or "")
    fake.go_on.set()
    thread.join(DEADLINE_SECONDS)
    due(asking, second)
    fetcher.look(Orders())
    assert row(asking, second).status == row(asking, first.key).status == "ready"


def test_what_is_stored_already_takes_no_room_from_others(
    asking: Services, owner: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A disk for each base twice, as storage lies on it too. The first is there twice, and not over yet.
    usage, size = shutil.disk_usage(asking.settings.data_dir), 4 * TOTAL + SPARE_BYTES

    def left(_: Path) -> object:
        places = [asking.settings.downloads, asking.storage.folder or Path()]
        used = sum(path.stat().st_size for place in places for path in place.rglob("*") if path.is_file())
        return usage._replace(free=size - used)

    monkeypatch.setattr("workers.fetcher.shutil.disk_usage", left)
    keys, put, is_stored, go_on = [begin(asking, owner)], asking.storage.put_stream, Event(), Event()

    def slowly(key: str, chunks: Iterable[bytes]) -> int:
        size = put(key, chunks)
        if key == f"{downloads.prefix_of(keys[0])}/{WEIGHTS}":
            is_stored.set()
            go_on.wait(DEADLINE_SECONDS)
        return size

    monkeypatch.setattr(asking.storage, "put_stream", slowly)
    fetcher = Fetcher(asking)
    first = Thread(target=fetcher.look, args=(Orders(),), daemon=True)
    first.start()
    assert is_stored.wait(DEADLINE_SECONDS)
    keys.append(begin(asking, owner, "second"))
    fetcher.look(Orders())
    assert row(asking, keys[1]).reason is None
    assert [row(asking, key).status for key in keys] == ["downloading", "ready"]
    go_on.set()
    first.join(DEADLINE_SECONDS)
    assert row(asking, keys[0]).status == "ready"


def test_a_base_stays_whose_it_is_while_a_slow_disk_writes_it_down(
    asking: Services, fake: FakeHub, owner: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.fetcher.BEAT_SECONDS", 0.02)
    key, waited = begin(asking, owner), []

    def slowly(number: int) -> None:
        if not waited:
            waited.append(number)
            # The hold is over if nobody says more while this goes on.
            due(asking, key)
            until(lambda: (row(asking, key).due_at or 0) > 0)
            Fetcher(asking).look(Orders())

    monkeypatch.setattr("workers.fetcher.os.fsync", slowly)
    look(asking)
    assert waited
    assert (row(asking, key).status, row(asking, key).attempts) == ("ready", 1)
    assert asked_from(fake) == [None]


def test_a_base_is_left_to_others_where_a_disk_hangs(
    asking: Services, fake: FakeHub, owner: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.fetcher.BEAT_SECONDS", 0.02)
    monkeypatch.setattr("workers.fetcher.MOTIONLESS_SECONDS", 0.2)
    key, hung = begin(asking, owner), list[int]()

    def hang(number: int) -> None:
        if not hung:
            hung.append(number)
            until(lambda: not any(thread.name == "hold" for thread in enumerate_threads()))
            due(asking, key)

    monkeypatch.setattr("workers.fetcher.os.fsync", hang)
    look(asking)
    # Whoever hung has nothing more to say of it.
    found = row(asking, key)
    assert (found.status, found.reason, found.attempts) == ("downloading", None, 1)
    look(asking)
    assert (row(asking, key).status, row(asking, key).attempts) == ("ready", 2)


def test_what_is_here_already_counts_from_the_first_moment_of_another_try(
    asking: Services, fake: FakeHub, owner: Account
) -> None:
    key, fake.cut_after = begin(asking, owner), CUT
    look(asking)
    come = TOTAL - len(FILES[WEIGHTS]) + CUT
    assert row(asking, key).done_bytes == come
    fake.answers = [503]
    due(asking, key)
    look(asking)
    assert row(asking, key).done_bytes == come


def test_more_than_the_hub_has_is_thrown_away_and_fetched_anew(asking: Services, fake: FakeHub, owner: Account) -> None:
    """A mirror that has changed: what is asked for begins behind its end."""
    key, fake.cut_after, content = begin(asking, owner), CUT, FILES[WEIGHTS]
    look(asking)
    fake.files[WEIGHTS] = content[: CUT - 1]
    due(asking, key)
    look(asking)
    found = row(asking, key)
    assert (found.status, found.damages) == ("downloading", 1)
    fake.files[WEIGHTS] = content
    due(asking, key)
    look(asking)
    assert row(asking, key).status == "ready"
    assert asked_from(fake) == [None, f"bytes={CUT}-", None, None]
