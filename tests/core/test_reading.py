"""What the service looks up again and again is read along an index, however many rows lie beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event, insert, text
from sqlalchemy.orm import Session

from core import audit, shares
from core.db import Database
from core.keys import DEFAULT_PROJECT
from core.models import AuditLog, Base, Holding
from tests import make

COUNT = 2000
OTHER = "proj-other"


def standings(session: Session) -> object:
    return shares.standings(session, now=1e9, half_life=shares.DAY, counting=False)


def archiver(session: Session) -> object:
    return audit.who_archived(session, OTHER)


def holding(number: int) -> dict[str, Any]:
    """All but two were counted."""
    times = {"started_at": float(number), "ended_at": number + 1.0, "counted": number >= 2}
    return {"id": f"hold-{number}", "project_id": DEFAULT_PROJECT, "slots": 1, **times}


def entry(number: int) -> dict[str, Any]:
    """The project's jobs, which were cancelled after it was archived; what is asked for is the oldest."""
    what = {"project_id": OTHER, "object_id": OTHER if number == 0 else "job-1"}
    action = "project.archived" if number == 0 else "job.cancelled"
    key = {"actor_project_id": DEFAULT_PROJECT, "actor_key_id": "key-1", "data": {}}
    return {"id": f"audit-{number}", "action": action, "created_at": float(number), **what, **key}


LOOKS: dict[str, tuple[Callable[[Session], object], type[Base], Callable[[int], dict[str, Any]], str]] = {
    "shares": (standings, Holding, holding, "holdings_uncounted"),
    "who archived": (archiver, AuditLog, entry, "audit_logs_of_archiving"),
}


@pytest.mark.parametrize("look", LOOKS)
def test_what_is_looked_up_again_and_again_is_read_along_an_index(look: str, database: Database) -> None:
    ask, table, row, index = LOOKS[look]
    with database.session() as session:
        make.project(session, OTHER)
        session.execute(insert(table), [row(number) for number in range(COUNT)])
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    asked: list[tuple[str, Any]] = []

    def hear(_connection: Any, _cursor: Any, sql: str, values: Any, *_rest: Any) -> None:
        if table.__tablename__ in sql:
            asked.append((sql, values))

    with database.reading() as session:
        listening = session.connection()
        event.listen(listening, "before_cursor_execute", hear)
        ask(session)
        sql, given = asked[-1]
        explain = "EXPLAIN " if session.get_bind().dialect.name == "postgresql" else "EXPLAIN QUERY PLAN "
        plan = "\n".join(str(row) for row in listening.exec_driver_sql(explain + sql, given))
    assert index in plan
    assert "Seq Scan" not in plan
    assert "Sort" not in plan
