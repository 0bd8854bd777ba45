"""Sessions: what is asked for happens after the commit, and only then."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import psutil
import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.exc import IntegrityError

from core import db
from core.db import AWAY, Database, after_commit, directly, lock
from core.keys import DEFAULT_PROJECT
from core.models import Project
from tests import make


def test_a_session_commits_at_its_end_and_then_does_what_was_asked(database: Database) -> None:
    done: list[str] = []
    with database.session() as session:
        make.project(session, "proj-new")
        after_commit(session, lambda: done.append("first"))
        after_commit(session, lambda: done.append("second"))
        assert done == []
    assert done == ["first", "second"]
    with database.reading() as session:
        assert session.get(Project, "proj-new") is not None


def test_what_has_one_key_is_done_once(database: Database) -> None:
    done: list[int] = []
    with database.session() as session:
        for number in range(3):
            after_commit(session, lambda number=number: done.append(number), key="nudge")  # type: ignore[misc]
    assert len(done) == 1


def test_an_exception_throws_everything_away(database: Database) -> None:
    done: list[str] = []

    def fails() -> None:
        with database.session() as session:
            make.project(session, "proj-new")
            after_commit(session, lambda: done.append("never"))
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert done == []
    with database.reading() as session:
        assert session.get(Project, "proj-new") is None


def test_what_fails_after_the_commit_does_not_undo_it_nor_stop_the_rest(database: Database) -> None:
    done: list[str] = []
    with database.session() as session:
        make.project(session, "proj-new")
        after_commit(session, lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        after_commit(session, lambda: done.append("second"))
    assert done == ["second"]
    with database.reading() as session:
        assert session.get(Project, "proj-new") is not None


def test_a_statement_without_objects_goes_where_its_session_is(database: Database) -> None:
    renamed = update(Project).where(Project.id == DEFAULT_PROJECT)
    names = select(Project.name).where(Project.id == DEFAULT_PROJECT)
    with database.session() as session:
        before = directly(session, names).scalar_one()
        directly(session, renamed.values(name="kept"))
        savepoint = session.begin_nested()
        directly(session, renamed.values(name="undone"))
        assert directly(session, names).scalar_one() == "undone"
        savepoint.rollback()
        assert directly(session, names).scalar_one() == "kept"
        session.commit()
        # The next transaction of the same session.
        directly(session, renamed.values(name="undone"))
        session.rollback()
    with database.reading() as session:
        assert (before, directly(session, names).scalar_one()) == ("default", "kept")


def test_a_reader_does_not_wait_for_a_writer(database: Database) -> None:
    with database.session() as writing:
        make.project(writing, "proj-new")
        with database.reading() as reading:
            assert "proj-new" not in reading.scalars(select(Project.id)).all()


def test_a_lock_lets_one_transaction_past_at_a_time(database: Database) -> None:
    order: list[str] = []
    inside = Event()

    def first() -> None:
        with database.session() as session:
            # SQLite takes its write lock with the first statement, whatever that is.
            session.execute(text("SELECT 1"))
            lock(session, "scheduler")
            inside.set()
            order.append("first")

    def second() -> None:
        assert inside.wait(30)
        with database.session() as session:
            session.execute(text("SELECT 1"))
            lock(session, "scheduler")
            # Whatever is decided here must see what the first one committed.
            assert order == ["first"]
            order.append("second")

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(first), pool.submit(second)]:
            future.result(60)
    assert order == ["first", "second"]


@pytest.fixture
def hasty(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """A second process on `database`, that gives up and is given up after a moment."""
    monkeypatch.setattr(db, "BUSY_SECONDS", 0.2)
    hasty = Database(database_url)
    with hasty.reading() as session:
        session.execute(text("SELECT 1"))
    monkeypatch.undo()
    yield hasty
    hasty.close()


RENAME = update(Project).where(Project.id == DEFAULT_PROJECT).values(name="renamed")


def test_who_waits_too_long_for_a_lock_is_told_that_the_database_is_busy(database: Database, hasty: Database) -> None:
    with database.session() as session:
        session.execute(RENAME)
        with pytest.raises(AWAY), hasty.session() as waiting:
            waiting.execute(RENAME)


def test_a_process_that_is_gone_amid_a_transaction_keeps_nobody_out(
    kind: str, database: Database, hasty: Database
) -> None:
    if kind == "sqlite":
        pytest.skip("on SQLite the lock ends with the process, which is on this host")

    def vanishes() -> None:
        with hasty.session() as gone:
            gone.execute(RENAME)
            # It says nothing more. This waits for its lock, which nobody but the server can take from it.
            with database.session() as session:
                session.execute(RENAME)

    with pytest.raises(AWAY):
        vanishes()


def test_an_error_does_not_tell_what_was_written(database: Database) -> None:
    with pytest.raises(IntegrityError) as refusal, database.session() as session:
        session.add(Project(id=DEFAULT_PROJECT, name="a secret"))
    assert "a secret" not in str(refusal.value)


def test_what_is_closed_keeps_no_connection(database_url: str) -> None:
    before = psutil.Process().num_fds()
    hasty = Database(database_url)
    for _ in range(2):
        with hasty.session() as session, hasty.reading() as reading:
            session.scalar(select(func.count()).select_from(Project))
            reading.scalar(select(func.count()).select_from(Project))
        hasty.close()
    assert psutil.Process().num_fds() <= before
