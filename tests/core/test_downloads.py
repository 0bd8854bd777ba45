"""A base on its way from a hub is one process's at a time, on either database."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import update

from core import catalog, downloads, schema
from core.db import Database
from core.errors import NotReady
from core.hub import HubFile, Repo
from core.keys import Account
from core.models import HubDownload, Model
from core.storage import Storage
from tests import make

FILE = HubFile("model.safetensors", 10, sha256="0" * 64)
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
        assert not downloads.failed(session, late, "x", for_good=True)
        assert downloads.beat(session, again, 5)
        assert downloads.arrived(session, again)
    with database.reading() as session:
        row, model = session.get_one(HubDownload, again.key), session.get_one(Model, again.key)
        assert (row.status, row.done_bytes, row.due_at, model.source) == ("ready", 10, None, f"storage:hub/{again.key}")
        assert catalog.usable(session, model) is model
        assert downloads.wanted(session) == keys - {again.key}


def test_a_base_that_came_outlives_going_back_to_before_there_were_hubs(
    database: Database, database_url: str, owner: Account, storage: Storage
) -> None:
    key = begin(database, owner)
    with database.session() as session:
        errand = downloads.take(session)
        assert errand is not None
        assert downloads.arrived(session, errand)
    stored = f"{downloads.prefix_of(key)}/config.json"
    storage.put_bytes(stored, b"{}")
    schema.downgrade(database_url, "0018")
    schema.upgrade(database_url)
    assert downloads.sweep(database, storage, age=timedelta(0)) == []
    with database.reading() as session:
        model = session.get_one(Model, key)
        assert catalog.usable(session, model) is model
    assert [found.key for found in storage.list(downloads.PREFIX)] == [stored]


def test_failures_without_a_byte_more_end_it_and_a_byte_more_begins_their_count_anew(
    database: Database, owner: Account
) -> None:
    key = begin(database, owner)

    def fail(done: int) -> bool:
        due(database)
        with database.session() as session:
            errand = downloads.take(session)
            assert errand is not None
            assert downloads.beat(session, errand, done)
            return downloads.failed(session, errand, "it answered 503")

    most = len(downloads.WAITS)
    assert [fail(0) for _ in range(most)] == [True] * most
    assert fail(3)
    assert [fail(3) for _ in range(most)] == [True] * (most - 1) + [False]
    with database.reading() as session:
        model = session.get_one(Model, key)
        with pytest.raises(NotReady, match="it answered 503"):
            catalog.usable(session, model)
    with database.session() as session:
        catalog.delete(session, owner, "tiny", models=Path("nowhere"))
    with database.reading() as session:
        assert session.get(HubDownload, key) is None
