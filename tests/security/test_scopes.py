"""What a key may not do it may do on no route. Routes come from the OpenAPI document, so that new ones are covered."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.api.conftest import Live
from tests.api.test_requests import envelope

READS = {
    ("post", "/v1/plans"), ("post", "/v1/files/{file_id}/preview"), ("post", "/v1/completions"),
    ("post", "/v1/chat/completions"), ("post", "/v1/visits"), ("delete", "/v1/visits"),
}  # fmt: skip
"""By their method something else, and yet they change nothing that is the project's."""
FOR_ADMINS = re.compile(r"/v1/(keys|projects|audit_logs|organization)\b.*|.*/permissions(/\{.*)?")
OPEN_TO_READERS = {("get", "/v1/projects"), ("get", "/v1/projects/{project_id}")}


@pytest.fixture(scope="module")
def routes(live: Live) -> list[tuple[str, str]]:
    with live.http(None) as http:
        page: dict[str, Any] = http.get("/openapi.json").json()
    return [(method, path) for path, spoken in page["paths"].items() for method in spoken if path.startswith("/v1/")]


def refused(live: Live, scope: str, routes: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of the routes on which a key of this scope is told that it lacks another."""
    found = []
    with live.http(live.key(scope)) as http:
        for method, path in routes:
            if path.endswith("/stream"):
                continue
            answer = http.request(method, re.sub(r"\{[^}]+\}", "x-1", path), json={} if method != "get" else None)
            if answer.status_code == 403 and envelope(answer, 403)["code"] == "insufficient_scope":
                found.append((method, path))
    return found


def test_a_key_that_reads_changes_nothing_on_any_route(live: Live, routes: list[tuple[str, str]]) -> None:
    changing = {route for route in routes if route[0] != "get"} - READS
    assert len(changing) > 20
    assert changing <= set(refused(live, "read", routes))


def test_only_an_admin_manages_who_may_what(live: Live, routes: list[tuple[str, str]]) -> None:
    managing = {route for route in routes if FOR_ADMINS.fullmatch(route[1])} - OPEN_TO_READERS
    assert len(managing) > 8
    assert managing == set(refused(live, "submit", routes))
