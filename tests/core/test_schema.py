"""The migrations and the tables say the same, up and down, with rows in them."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from alembic import op
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Connection,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    inspect,
    select,
    text,
)

from core import jobs, metrics, outbox, schema
from core.db import Database, open_engine
from core.keys import Account
from core.models import (
    Base,
    Checkpoint,
    CheckpointPermission,
    Job,
    JobEvent,
    Metric,
    MetricChunk,
    Model,
    Removal,
    database_now,
)
from core.points import POINTS
from core.states import JobState
from tests import make
from tests.conftest import _administer

BEFORE_CHUNKS = "0006"
"""The revision before points were packed."""
BEFORE_LABELS = "0015"
"""The one before labels had rows of their own."""
BEFORE_STEPS_CAME_AGAIN = "0020"
"""The one before a step could have two checkpoints."""

BEFORE_REMOVALS = "0022"
"""The one before a job could go before its history."""
BEFORE_SAVED_STEPS = "0024"
"""The one before a job knew how far it had been saved."""


@pytest.fixture
def empty_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a database without a table."""
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path}/empty.db"
        return
    server: str = request.getfixturevalue("postgresql_server")
    _administer(server, "DROP DATABASE IF EXISTS empty", "CREATE DATABASE empty")
    yield server.replace("/postgres?", "/empty?", 1)


def test_the_migrations_make_what_the_models_say(database: Database) -> None:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_a_schema_with_rows_in_it_goes_down_and_up_again(database: Database, database_url: str) -> None:
    with database.session() as session:
        make.node(session)
        make.file(session, expires_at=1.0)
        make.upload(session)
        outbox.announce(session, make.job(session, state=JobState.FAILED, project_id=make.webhook(session).project_id))
        make.model(session)
        job = make.job(session)
        make.checkpoint(session, job, 10)
    database.close()
    schema.downgrade(database_url, "base")
    assert inspect(database.engine).get_table_names() == ["alembic_version"]
    assert not schema.is_current(database.engine)
    schema.upgrade(database_url)
    assert schema.is_current(database.engine)
    assert set(Base.metadata.tables) <= set(inspect(database.engine).get_table_names())


REVISIONS = [step.revision for step in reversed([*ScriptDirectory.from_config(schema._config()).walk_revisions()])]
"""From the first to the newest."""
MOVED: dict[tuple[str, str], Callable[[dict[str, Any]], Any]] = {("models", "key"): lambda row: row["id"]}
"""Columns that a migration fills from others of the row, and with what."""
POINT = struct.pack("<qd", 7, 0.5)
AS_IT_MUST_BE: dict[tuple[str, str], Any] = {
    # One point, and its extremes: taken back, it is a row of `metrics`.
    ("metric_chunks", "points"): POINT, ("metric_chunks", "size"): 1, ("metric_chunks", "first_step"): 7,
    ("metric_chunks", "last_step"): 7, ("metric_chunks", "low"): 0.5, ("metric_chunks", "high"): 0.5,
    ("metric_chunks", "low_step"): 7, ("metric_chunks", "high_step"): 7, ("jobs", "state"): "queued",
}  # fmt: skip
"""Values that mean something to a migration."""

IDS_OF_JOBS = {(table, "job_id") for table in ("job_events", "metrics", "metric_chunks")}
"""Columns that name a job without a foreign key: what hangs on none goes on the way down."""

Rows = dict[str, dict[str, Any]]
"""By table, a row of it."""


def test_a_row_of_every_table_at_every_revision_goes_all_the_way_up_and_down_as_it_was(empty_url: str) -> None:
    """A row that was written by any earlier version is there, and the same, in any other that has its columns."""
    written: dict[str, Rows] = {}
    for revision in REVISIONS:
        schema.upgrade(empty_url, revision)
        with tables(empty_url) as (connection, found):
            assert_kept(connection, found, written, f"up to {revision}")
            written[revision] = write_rows(connection, found, revision)
    # What a later revision alone has goes with it on the way down; what stays is the same.
    for revision in reversed(REVISIONS[:-1]):
        schema.downgrade(empty_url, revision)
        written = {each: rows for each, rows in written.items() if each <= revision}
        with tables(empty_url) as (connection, found):
            assert_kept(connection, found, written, f"down to {revision}")
    schema.upgrade(empty_url)
    with tables(empty_url) as (connection, found):
        assert_kept(connection, found, written, "and up again")


def write_rows(connection: Connection, found: MetaData, revision: str) -> Rows:
    """A row of every table that there is at this revision, each hanging on the others; what was written."""
    rows: Rows = {}
    for table in found.sorted_tables:
        if table.name != "alembic_version":
            rows[table.name] = {column.name: value_of(table, column, rows, revision) for column in table.columns}
            connection.execute(table.insert().values(rows[table.name]))
    return rows


def value_of(table: Table, column: Column[Any], rows: Rows, revision: str) -> Any:
    if key := next(iter(column.foreign_keys), None):
        return rows[key.column.table.name][key.column.name]
    if (table.name, column.name) in IDS_OF_JOBS:
        return f"{revision}éjobs id"
    if (table.name, column.name) in AS_IT_MUST_BE:
        return AS_IT_MUST_BE[table.name, column.name]
    number = int(revision)
    by_kind: tuple[tuple[type, Any], ...] = (
        (Boolean, True),
        (Integer, number),
        (Float, number + 0.25),
        (JSON, {"of": [revision, None, 1.5, "é"]}),
    )
    length = getattr(column.type, "length", None)
    by_kind += ((LargeBinary, revision.encode()), (String, f"{revision}é{table.name} {column.name}"[:length]))
    return next(value for kind, value in by_kind if isinstance(column.type, kind))


def assert_kept(connection: Connection, found: MetaData, written: dict[str, Rows], when: str) -> None:
    for table in found.sorted_tables:
        keys = [column.name for column in table.primary_key]
        there = {tuple(row[key] for key in keys): row for row in connection.execute(select(table)).mappings()}
        for revision, rows in written.items():
            if (row := rows.get(table.name)) is None:
                continue
            moved = {name: fill(row) for (of, name), fill in MOVED.items() if of == table.name}
            expected = {name: value for name, value in (moved | row).items() if name in table.c}
            kept = there.get(tuple(expected[key] for key in keys))
            assert kept is not None, f"{when}: the row of {table.name} from {revision} is gone"
            assert {name: kept[name] for name in expected} == expected, f"{when}: {table.name} from {revision}"


@contextmanager
def tables(url: str) -> Iterator[tuple[Connection, MetaData]]:
    """The tables as the database itself describes them: those of an earlier revision have no classes any more."""
    engine = open_engine(url)
    found = MetaData()
    try:
        with engine.begin() as connection:
            found.reflect(connection)
            yield connection, found
    finally:
        engine.dispose()


def test_models_keep_their_names_through_the_migrations_as_far_as_names_are_unique(
    database: Database, database_url: str
) -> None:
    with database.session() as session:
        for project in ("proj-a", "proj-b"):
            make.project(session, project)
            make.model(session, "best", project_id=project)
        make.model(session, "tiny")
        keys = set(session.scalars(select(Model.key).where(Model.id == "best")))
    database.close()
    schema.downgrade(database_url, "0001")
    with database.reading() as session:
        names = set(session.scalars(text("SELECT id FROM models")))
    assert names == keys | {"tiny"}
    database.close()
    schema.upgrade(database_url)
    with database.reading() as session:
        assert {(model.key, model.id) for model in session.scalars(select(Model))} == {(name, name) for name in names}


def test_points_are_packed_by_the_migration_and_are_rows_again_when_it_is_taken_back(
    database: Database, database_url: str
) -> None:
    told = {"loss": 2 * POINTS + 3, "lr": POINTS - 1}
    values = {name: [(step, random.Random(f"{name} {step}").random()) for step in range(1, count + 1)]
              for name, count in told.items()}  # fmt: skip
    with database.session() as session:
        job_id = make.job(session).id
        for name, points in values.items():
            session.add_all(Metric(job_id=job_id, name=name, step=step, value=value) for step, value in points)
    schema.downgrade(database_url, BEFORE_CHUNKS)
    schema.upgrade(database_url)
    with database.reading() as session:
        assert metrics.series(session, job_id, max_points=None) == values
        assert metrics.series(session, job_id, max_points=9)["loss"] == metrics.thin(values["loss"], 9)
        chunks = session.scalars(select(MetricChunk)).all()
        assert [(chunk.name, chunk.size) for chunk in chunks] == [("loss", POINTS)] * 2
    schema.downgrade(database_url, BEFORE_CHUNKS)
    with database.reading() as session:
        rows = session.execute(select(Metric.step, Metric.value).where(Metric.name == "loss").order_by(Metric.step))
        assert [tuple(row) for row in rows] == values["loss"]
    schema.upgrade(database_url)


def test_jobs_that_were_there_are_found_by_their_labels_after_the_migration(
    database: Database, database_url: str, owner: Account
) -> None:
    labels = {"team": "röd", "run": "1", "": ""}
    with database.session() as session:
        found = make.job(session, labels=labels).id
        make.job(session, labels={"team": "blue"})
        bare = make.job(session).id
    schema.downgrade(database_url, BEFORE_LABELS)
    schema.upgrade(database_url)
    with database.reading() as session:
        assert [job.id for job in jobs.page(session, owner, labels=labels).data] == [found]
        assert [job.id for job in jobs.page(session, owner, unlabelled=True).data] == [bare]


def test_what_a_deleted_job_left_goes_on_the_way_down_and_what_another_has_stays(
    database: Database, database_url: str
) -> None:
    with database.session() as session:
        kept = make.job(session).id
        for job_id in (kept, "job-gone"):
            session.add(Metric(job_id=job_id, name="loss", step=1, value=0.5))
            session.add(JobEvent(job_id=job_id, seq=2, attempt=1, type="log", message="", data={}))
        session.add(Removal(job_id="job-gone"))
    schema.downgrade(database_url, BEFORE_REMOVALS)
    with database.session() as session:
        for name, rows in (("metrics", 1), ("job_events", 2)):
            assert session.scalars(text(f"SELECT job_id FROM {name}")).all() == [kept] * rows
        session.execute(text("DELETE FROM jobs"))
        assert session.scalar(text("SELECT count(*) FROM job_events")) == 0
    schema.upgrade(database_url)


def test_how_far_a_job_was_saved_is_known_from_its_checkpoints_after_going_up(
    database: Database, database_url: str
) -> None:
    with database.session() as session:
        job, other = make.job(session), make.job(session)
        for step, abandoned in ((10, False), (30, True), (20, False)):
            make.checkpoint(session, job, step, abandoned=abandoned)
        saved = {job.id: 30, other.id: 0}
    schema.downgrade(database_url, BEFORE_SAVED_STEPS)
    schema.upgrade(database_url)
    with database.reading() as session:
        assert {job.id: job.saved_step for job in session.scalars(select(Job))} == saved


def test_of_checkpoints_of_one_step_the_one_that_was_not_gone_back_from_outlives_going_down(
    database: Database, database_url: str
) -> None:
    with database.session() as session:
        job, other = make.job(session), make.project(session).id
        old, _, newer, sound = (
            make.checkpoint(session, job, step, abandoned=abandoned, created_at=at)
            for step, abandoned, at in ((1, True, 1.0), (2, True, 1.0), (2, True, 2.0), (1, False, 2.0))
        )
        for shared in (old, sound):
            session.add(CheckpointPermission(id=f"for-{shared.id}", checkpoint_id=shared.id, project_id=other))
        kept, permission = {sound.id, newer.id}, f"for-{sound.id}"
    schema.downgrade(database_url, BEFORE_STEPS_CAME_AGAIN)
    schema.upgrade(database_url)
    with database.reading() as session:
        assert set(session.scalars(select(Checkpoint.id))) == kept
        assert session.scalars(select(CheckpointPermission.id)).all() == [permission]


def test_an_empty_database_is_not_current_until_it_is_migrated(empty_url: str) -> None:
    engine = open_engine(empty_url)
    assert not schema.is_current(engine)
    schema.upgrade(empty_url)
    schema.upgrade(empty_url)
    assert schema.is_current(engine)
    engine.dispose()


def test_a_database_is_behind_until_all_migrations_of_this_version_ran_and_not_where_a_newer_one_did(
    empty_url: str,
) -> None:
    engine = open_engine(empty_url)
    assert schema.is_behind(engine)
    schema.upgrade(empty_url, "0001")
    assert schema.is_behind(engine)
    schema.upgrade(empty_url)
    assert not schema.is_behind(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    assert not schema.is_behind(engine)
    engine.dispose()


def test_processes_may_migrate_at_once(empty_url: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(schema.upgrade, [empty_url] * 3))
    engine = open_engine(empty_url)
    assert schema.is_current(engine)
    engine.dispose()


def test_a_migration_that_fails_leaves_nothing_behind(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., object] = op.create_index

    def fails_late(name: str, *arguments: object, **options: object) -> object:
        if name == "ix_slots_job_id":
            raise RuntimeError("power cut")
        return real(name, *arguments, **options)

    monkeypatch.setattr(op, "create_index", fails_late)
    with pytest.raises(RuntimeError, match="power cut"):
        schema.upgrade(empty_url)
    monkeypatch.undo()
    engine = open_engine(empty_url)
    assert inspect(engine).get_table_names() == []
    schema.upgrade(empty_url)
    engine.dispose()


def test_the_two_databases_agree_on_the_time(database: Database) -> None:
    with database.reading() as session:
        now = session.scalar(select(database_now()))
    assert now is not None
    # Within a minute: the same host, and no clock that stands still or counts days.
    assert abs(now - time.time()) < 60
