"""What a request reads does not grow with what else its project has: it is as quick in the tenth month as in the first.

Each route of the OpenAPI document is asked with some rows of every kind beside those that it is about, and with many.
SQLite counts the instructions that it runs meanwhile, which nothing else on the machine changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from sqlalchemy import event, text
from sqlalchemy.orm import Session

from core.models import Base
from tests.api.conftest import Live
from tests.api.test_isolation import Operation, Side, known, operations, page, side
from workers.expiry import Expiry
from workers.upkeep import Upkeep

__all__ = ["known", "operations", "page"]
SOME, MANY = 200, 2000
"""Things of each kind. Of some, too, a page can't show all."""
GRAIN = 10
"""Instructions after which SQLite lets itself be counted."""
NO_GROWTH = 1000
"""Instructions: what an index of one level more takes, and what upkeep of the process did meanwhile."""
TOLD_APART = {
    "api_keys": ("id",),
    "audit_logs": ("id",),
    "visits": ("id",),
    "files": ("id",),
    "uploads": ("id",),
    "upload_parts": ("id",),
    "jobs": ("id",),
    "job_events": ("seq",),
    "metrics": ("step",),
    "holdings": ("id",),
    "checkpoints": ("id", "step"),
    "models": ("key", "id"),
    "webhook_endpoints": ("id",),
    "webhook_deliveries": ("id",),
}
"""What there may be much of, and by which columns two rows of it that hang on the same differ."""
FEW = {
    "projects", "nodes", "slots", "shares", "queue_places", "job_labels", "artifacts", "metric_chunks", "hub_downloads",
    "checkpoint_permissions", "removals",
}  # fmt: skip
"""What there is little of: of an organisation, of a cluster, of a job, at a time."""
BY_NOW = {
    "holdings": {"ended_at": "1", "counted": "true"},
    "webhook_deliveries": {"due_at": "NULL"},
}
"""What has become of the others: slots were given back, messages have arrived."""
TELLS_OF_ALL = {"/v1/models", "/v1/jobs/{job_id}/metrics", "/v1/projects", "/v1/projects/{project_id}"}
"""Those without pages, as OpenAI's; points that are not packed yet; and the sum of all that a project stores."""
SELDOM = {"forget webhooks"}
"""Every ten minutes, what was delivered a week ago is looked for among all that was."""
ENDLESS = ("/stream",)


@pytest.fixture(scope="module")
def ours(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    yield from side(live, tmp_path_factory.mktemp("growth"))


@contextmanager
def counted(live: Live) -> Iterator[Callable[[], int]]:
    """How many instructions the service's connections have run since the block began."""
    looks = 0

    def look() -> int:
        nonlocal looks
        looks += 1
        return 0

    def attend(connection: Any, *_: Any) -> None:
        connection.set_progress_handler(look, GRAIN)

    def leave(connection: Any, *_: Any) -> None:
        connection.set_progress_handler(None, GRAIN)

    listening = {"checkout": attend, "checkin": leave}
    for name, heard in listening.items():
        event.listen(live.services.db.engine, name, heard)
    try:
        yield lambda: GRAIN * looks
    finally:
        for name, heard in listening.items():
            event.remove(live.services.db.engine, name, heard)


def multiply(session: Session, ours: Side, numbers: range) -> None:
    """Of each kind as many more, alike and each a little older than the one before."""
    for table in (table for table in Base.metadata.sorted_tables if table.name not in FEW):
        values = {column.name: f'one."{column.name}"' for column in table.columns}
        for name in TOLD_APART[table.name]:
            is_text = table.c[name].type.python_type is str
            values[name] += " || '-' || n" if is_text else " + 100 * n"
        if "created_at" in values:
            values["created_at"] += " - n / 1000.0"
        values |= BY_NOW.get(table.name, {})
        names = ", ".join(f'"{name}"' for name in values)
        one = f'SELECT * FROM "{table.name}" WHERE {_ours(table.columns.keys())} LIMIT 1'
        session.execute(
            text(
                f"WITH RECURSIVE numbers(n) AS (SELECT {numbers.start} UNION ALL SELECT n + 1 FROM numbers "
                f'WHERE n + 1 < {numbers.stop}) INSERT INTO "{table.name}" ({names}) '
                f"SELECT {', '.join(values.values())} FROM ({one}) AS one, numbers"
            ),
            {"job": ours.ids["jobs"], "id": ours.ids.get(table.name)},
        )


def _ours(columns: list[str]) -> str:
    return "id = :id" if "id" in columns else "job_id = :job"


def asked(live: Live, ours: Side, operations: list[Operation], known: dict[tuple[str, ...], Any]) -> dict[Any, int]:
    """Instructions that each route takes which answers."""
    took = {}
    with counted(live) as instructions:
        for operation in operations:
            names = tuple(operation.path_names)
            if operation.method != "get" or operation.path.endswith(ENDLESS):
                continue
            for kinds in known.get(names, ()) if names else [()]:
                before = instructions()
                url, pages = operation.url(tuple(ours.ids[kind] for kind in kinds)), operation.has("limit")
                answer = ours.http.get(url, params={"limit": 20} if pages else {})
                assert answer.status_code < 500, answer.text
                took[operation.method, operation.path] = instructions() - before
        for route, change in CHANGES.items():
            before = instructions()
            answer = change(ours)
            assert answer.is_success, answer.text
            took[route] = instructions() - before
    return took


def _job(side: Side) -> httpx.Response:
    body = {"kind": "finetune", "model": {"base": "isolation-base"}, "data": {"train": [side.ids["files"]]}}
    return side.http.post("/v1/jobs", json=body)


def _file(side: Side) -> httpx.Response:
    return side.http.post(
        "/v1/files", data={"purpose": "pretrain"}, files={"file": ("a.txt", b"To be, or not to be.\n")}
    )


def _upload(side: Side) -> httpx.Response:
    body = {"purpose": "pretrain", "filename": "a.txt", "bytes": 10, "mime_type": "text/plain"}
    return side.http.post("/v1/uploads", json=body)


def _no_file(side: Side) -> httpx.Response:
    return side.http.delete(f"/v1/files/{_file(side).json()['id']}")


CHANGES: dict[tuple[str, str], Callable[[Side], httpx.Response]] = {
    ("post", "/v1/jobs"): _job,
    ("post", "/v1/files"): _file,
    ("post", "/v1/uploads"): _upload,
    ("delete", "/v1/files/{file_id}"): _no_file,
}


def done(live: Live) -> dict[str, int]:
    """Instructions that each duty takes: what a process does every few seconds, year in, year out."""
    took = {}
    with counted(live) as instructions:
        for duty in (*Upkeep(live.services).duties, *Expiry(live.services).duties):
            before = instructions()
            duty.do()
            took[duty.name] = instructions() - before
    return took


Counts = dict[Any, int]


@pytest.fixture(scope="module")
def counts(
    live: Live, ours: Side, operations: list[Operation], known: dict[tuple[str, ...], Any]
) -> tuple[Counts, Counts]:
    """By route and by duty, what each took with some and with many."""

    def all_of_them() -> Counts:
        return asked(live, ours, operations, known) | done(live)

    # What is there to be done once is not counted.
    done(live)
    with live.services.db.session() as session:
        multiply(session, ours, range(1, SOME))
    some = all_of_them()
    with live.services.db.session() as session:
        multiply(session, ours, range(SOME, MANY))
    return some, all_of_them()


def grown(counts: tuple[Counts, Counts]) -> set[Any]:
    """What took more where there was more."""
    some, many = counts
    return {what for what in many if many[what] > 2 * some[what] + NO_GROWTH}


def test_no_answer_reads_more_the_more_there_is(counts: tuple[Counts, Counts]) -> None:
    assert len(counts[0]) > 40
    assert not {what for what in grown(counts) if isinstance(what, tuple) and what[1] not in TELLS_OF_ALL}


def test_no_duty_reads_more_the_more_has_been(counts: tuple[Counts, Counts]) -> None:
    assert {what for what in grown(counts) if isinstance(what, str)} <= SELDOM
