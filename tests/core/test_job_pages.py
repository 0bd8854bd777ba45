"""What is asked of the table of jobs most often is read along an index, however many jobs there are."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.orm import Session

from core import jobs, scheduler, tries
from core.db import Database
from core.keys import Account
from core.models import Job
from core.states import JobState
from core.tries import Try
from tests import make

Look = Callable[[Session, Account, Job], object]
LOOKS: dict[str, tuple[Look, str]] = {
    "page": (lambda session, owner, _: jobs.page(session, owner), "jobs_by_project"),
    "next page": (lambda session, owner, job: jobs.page(session, owner, after=job.id), "jobs_by_project"),
    "state": (
        lambda session, owner, job: jobs.page(session, owner, states=[JobState.FAILED], after=job.id),
        "jobs_by_project_and_state",
    ),
    "kind": (
        lambda session, owner, job: jobs.page(session, owner, kind="finetune", after=job.id),
        "jobs_by_project_and_kind",
    ),
    "state and kind": (
        lambda session, owner, job: jobs.page(session, owner, states=[JobState.FAILED], kind="finetune", after=job.id),
        "jobs_by_project_state_and_kind",
    ),
    "name": (lambda session, owner, job: jobs.page(session, owner, name="b", after=job.id), "jobs_by_project_and_name"),
    "label": (
        lambda session, owner, job: jobs.page(session, owner, labels={"team": "b"}, after=job.id),
        "job_labels_by_project",
    ),
    "labels": (
        lambda session, owner, job: jobs.page(session, owner, labels={"team": "b", "run": "1"}, after=job.id),
        "job_labels_by_project",
    ),
    "unlabelled": (
        lambda session, owner, job: jobs.page(session, owner, unlabelled=True, after=job.id),
        "jobs_without_labels",
    ),
    "from a base": (
        lambda session, owner, job: jobs.page(session, owner, from_base=True, after=job.id),
        "jobs_from_a_base",
    ),
    # Before each create of a job: by what was asked, and not through all that was asked lately.
    "earlier try": (
        lambda session, owner, _: tries.made_before(session, owner, Try(digest="digest-of-none", number=1)),
        "jobs_by_request",
    ),
    "first try of a retry": (
        lambda session, owner, _: tries.made_before(session, owner, Try(digest="digest-1", came_at=monotonic())),
        "jobs_that_owe_a_try",
    ),
    "position": (lambda session, _, job: scheduler.position(session, job), "jobs_in_line"),
}
COUNT = 2000


@pytest.mark.parametrize("look", LOOKS)
def test_a_page_and_a_place_in_the_line_are_read_along_an_index(look: str, database: Database, owner: Account) -> None:
    ask, index = LOOKS[look]
    with database.session() as session:
        first = make.job(session, project_id=owner.project_id, labels={"team": "a", "run": "1"}, name="a")
        columns = [column.name for column in Job.__table__.columns]
        # One state, one kind: nothing but the right index finds out early that there are no others.
        others = {"id": "'job-' || n", "created_at": "jobs.created_at + n", "request_digest": "'digest-' || n"}
        values = ", ".join(others.get(name, f'jobs."{name}"') for name in columns)
        names = ", ".join(f'"{name}"' for name in columns)
        session.execute(
            text(
                f"WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {COUNT}) "
                f"INSERT INTO jobs ({names}) SELECT {values} FROM jobs, numbers WHERE jobs.id = :first"
            ),
            {"first": first.id},
        )
        session.execute(
            text(
                "INSERT INTO job_labels (job_id, name, value, project_id, created_at) "
                "SELECT jobs.id, label.name, label.value, jobs.project_id, jobs.created_at "
                "FROM jobs, job_labels AS label WHERE label.job_id = :first AND jobs.id <> :first"
            ),
            {"first": first.id},
        )
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    asked: list[tuple[str, Any]] = []

    def hear(_connection: Any, _cursor: Any, sql: str, values: Any, *_rest: Any) -> None:
        asked.append((sql, values))

    with database.reading() as session:
        listening = session.connection()
        event.listen(listening, "before_cursor_execute", hear)
        ask(session, owner, first)
        sql, given = asked[-1]
        explain = "EXPLAIN " if session.get_bind().dialect.name == "postgresql" else "EXPLAIN QUERY PLAN "
        plan = "\n".join(str(row) for row in listening.exec_driver_sql(explain + sql, given))
    assert f" {index} " in plan
    assert look != "position" or "COVERING INDEX" in plan or "Index Only Scan" in plan
    assert "TEMP B-TREE" not in plan
    assert "Sort" not in plan
    assert "Seq Scan on job" not in plan
    assert "SCAN jobs USING" not in plan


def test_a_page_of_several_states_reads_of_each_no_more_than_it_could_need(database: Database, owner: Account) -> None:
    states = [JobState.FAILED, JobState.CANCELLED, JobState.SUCCEEDED]
    with database.session() as session:
        made = [make.job(session, state=states[n % 3], created_at=float(n // 2)) for n in range(12)]
        for _ in range(3):
            make.job(session)
        newest = sorted(made, key=lambda job: (job.created_at, job.id), reverse=True)
    asked: list[tuple[str, Any]] = []
    with database.reading() as session:
        event.listen(session.connection(), "before_cursor_execute", lambda *given: asked.append((given[2], given[3])))
        pages, after = [], None
        while not pages or pages[-1].has_more:
            pages.append(jobs.page(session, owner, states=states, after=after, limit=5))
            after = pages[-1].data[-1].id
    assert [job.id for page in pages for job in page.data] == [job.id for job in newest]
    assert [len(page.data) for page in pages] == [5, 5, 2]
    beginnings = [sql for sql, _ in asked if "UNION ALL" in sql]
    assert len(beginnings) == 3
    assert all(sql.count("LIMIT") == 3 for sql in beginnings)
