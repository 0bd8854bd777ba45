"""A base on its way from a hub is one process's at a time, on either database."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
from sqlalchemy import select, text, update

from core import catalog, downloads, schema
from core.db import Database
from core.downloads import Fault
from core.errors import NotFound, NotReady
from core.hub import HubFile, Repo
from core.keys import Account
from core.models import HubDownload, Model
from core.storage import Storage
from tests import make
from tests.core.conftest import waiting_for_locks
from tests.workers.test_lease import until

FILE = HubFile("model.safetensors", 10, sha256="0" * 64)
DEADLINE_SECONDS = 60
FOUND = downloads.Found(Repo("org/tiny", "5" * 40, (FILE,)), (FILE,), make.shape())


def begin(database: Database, owner: Account, name: str = "tiny") -> str:
    with database.session() as session:
        return downloads.begin(session, owner, name, FOUND, models=Path("nowhere")).key


def due(database: Database) -> None:
    """As if every wait, and every hold, were over."""
    with database.session() as session:
        session.execute(update(HubDownload).where(HubDownload.due_at.is_not(None)).values(due_at=0.0))


def test_each_is_taken_once_until_its_hold_is_over_and_who_lost_it_says_nothing_more(
    database: Database, owner: Account
) -> None:
    keys = {begin(database, owner), begin(database, owner, "another")}
    with database.session() as session:
        first = downloads.take(session)
    with database.session() as session:
        second = downloads.take(session)
        assert downloads.take(session) is None
    assert first is not None
    assert second is not None
    assert {first.key, second.key} == keys
    assert (first.files, first.for_everyone, first.source) == ((FILE,), True, FOUND.repo.source)
    due(database)
    with database.session() as session:
        again = downloads.take(session)
    assert again is not None
    late = next(errand for errand in (first, second) if errand.key == again.key)
    with database.session() as session:
        assert not downloads.beat(session, late, 1)
        assert not downloads.arrived(session, late)
        assert not downloads.failed(session, late, "x", Fault.LASTING, brought_a_file=False)
        assert downloads.beat(session, again, 5)
        assert downloads.arrived(session, again)
    with database.reading() as session:
        row, model = session.get_one(HubDownload, again.key), session.get_one(Model, again.key)
        assert (row.status, row.done_bytes, row.due_at, model.source) == ("ready", 10, None, f"storage:hub/{again.key}")
        assert catalog.usable(session, model) is model
        assert downloads.wanted(session) == keys - {again.key}


def test_of_bases_those_that_came_outlive_going_back_to_before_there_were_hubs(
    database: Database, database_url: str, owner: Account, storage: Storage
) -> None:
    """What was still to come, or did not, is understood by nobody there, and what it stored is swept later."""
    came = begin(database, owner)
    with database.session() as session:
        errand = downloads.take(session)
        assert errand is not None
        assert downloads.arrived(session, errand)
    coming, lost = begin(database, owner, "coming"), begin(database, owner, "lost")
    with database.session() as session:
        errands = [downloads.take(session), downloads.take(session)]
        gone = next(errand for errand in errands if errand is not None and errand.key == lost)
        assert not downloads.failed(session, gone, "it is gone", Fault.LASTING, brought_a_file=False)
    for key in (came, coming, lost):
        storage.put_bytes(f"{downloads.prefix_of(key)}/config.json", b"{}")
    schema.downgrade(database_url, "0018")
    with database.reading() as session:
        assert session.execute(text("SELECT key, source FROM models")).all() == [(came, f"storage:hub/{came}")]
    schema.upgrade(database_url)
    assert downloads.sweep(database, storage, age=timedelta(0)) == sorted([coming, lost])
    with database.reading() as session:
        model = session.get_one(Model, came)
        assert catalog.usable(session, model) is model
        assert not session.scalars(select(HubDownload)).all()
    assert [found.key for found in storage.list(downloads.PREFIX)] == [f"{downloads.prefix_of(came)}/config.json"]
    # Its name is free for another try.
    begin(database, owner, "coming")


def test_who_brings_a_base_waits_for_who_holds_its_model_with_nothing_in_his_hands(
    database: Database, owner: Account
) -> None:
    """So arrivals, jobs and deletions wait for one another in one order: the model's row, then the download's."""
    key = begin(database, owner)
    with database.session() as session:
        errand = downloads.take(session)
    assert errand is not None
    said: list[bool] = []

    def arrive() -> None:
        with database.session() as session:
            said.append(downloads.arrived(session, errand))

    threads = [Thread(target=arrive, daemon=True) for _ in range(2)]
    with database.session() as session:
        # As a job that wants it does, but for it not being there yet.
        session.execute(select(Model.key).where(Model.key == key).with_for_update(read=True))
        for thread in threads:
            thread.start()
        if not database.has_one_writer:
            until(lambda: waiting_for_locks(database) == 2)
            assert not said
            session.execute(select(HubDownload.model_key).with_for_update(nowait=True))
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert sorted(said) == [False, True], "and it arrives once"


@pytest.mark.parametrize(
    ("fault", "failures", "damages", "wait"),
    [
        pytest.param(Fault.PASSING, 1, 0, 5.0, id="the line broke"),
        pytest.param(Fault.PASSING, 3, 0, 120.0, id="and again"),
        pytest.param(Fault.PASSING, 10_000, 3, 1800.0, id="for months"),
        pytest.param(Fault.DAMAGE, 1, 1, 5.0, id="another byte"),
        pytest.param(Fault.DAMAGE, 3, 3, 120.0, id="three times"),
        pytest.param(Fault.DAMAGE, 1, 4, None, id="four times, with a byte more between"),
        pytest.param(Fault.LASTING, 1, 0, None, id="it is not there"),
    ],
)
def test_what_may_pass_is_waited_for_at_most_half_an_hour_at_a_time_and_the_rest_is_given_up(
    fault: Fault, failures: int, damages: int, wait: float | None
) -> None:
    assert downloads.wait_after(fault, failures=failures, damages=damages) == wait


def fail(database: Database, done: int, fault: Fault, *, brought_a_file: bool = False) -> bool:
    """A try that ended with so many bytes here; whether there will be another."""
    due(database)
    with database.session() as session:
        errand = downloads.take(session)
        assert errand is not None
        assert downloads.beat(session, errand, done)
        return downloads.failed(session, errand, "it came damaged", fault, brought_a_file=brought_a_file)


def test_damage_without_a_file_more_ends_it_whatever_fails_between(database: Database, owner: Account) -> None:
    key = begin(database, owner)
    damaged = [True] * (downloads.MOST_DAMAGES - 1)
    assert [fail(database, 4, Fault.DAMAGE) for _ in damaged] == damaged
    assert fail(database, 8, Fault.PASSING, brought_a_file=True), "a file more begins their count anew"
    assert fail(database, 5, Fault.DAMAGE)
    # Some bytes of a file that then is damaged again are no file more.
    tried = [(fail(database, 9, Fault.PASSING), fail(database, 5, Fault.DAMAGE)) for _ in damaged]
    assert tried == [*[(True, True)] * (len(damaged) - 1), (True, False)]
    with database.reading() as session:
        model = session.get_one(Model, key)
        with pytest.raises(NotReady, match=r"it came damaged, 4 times in a row\. Delete it"):
            catalog.usable(session, model)
    with database.session() as session:
        catalog.delete(session, owner, "tiny", models=Path("nowhere"))
    with database.reading() as session:
        assert session.get(HubDownload, key) is None


def test_a_base_that_comes_or_goes_while_somebody_looks_is_there_or_gone(database: Database, owner: Account) -> None:
    key = begin(database, owner)
    with database.reading() as looking, database.reading() as late:
        models = [session.get_one(Model, key) for session in (looking, late)]
        # Each statement may see a later state of the rows than the one before it.
        looking.commit()
        late.commit()
        with database.session() as session:
            errand = downloads.take(session)
            assert errand is not None
            assert downloads.arrived(session, errand)
        assert catalog.usable(looking, models[0]).source == f"storage:hub/{key}"
        assert late.get_one(HubDownload, key).status == "ready"
        late.commit()
        with database.session() as session:
            catalog.delete(session, owner, "tiny", models=Path("nowhere"))
        with pytest.raises(NotFound, match="just deleted"):
            catalog.usable(late, models[1])
