"""A page of somebody else's, open in a browser of somebody who may use the service: it must get nothing done by that.

There is no cookie, and so nothing that a browser would add by itself. What would change that fails here.
"""

from __future__ import annotations

import pytest

from tests.api import driving
from tests.api.test_requests import envelope

ELSEWHERE = {"origin": "https://evil.example", "referer": "https://evil.example/", "sec-fetch-site": "cross-site"}


def spec_paths(http) -> list[tuple[str, str]]:
    page = http.get("/openapi.json").json()["paths"]
    return [(method.upper(), path) for path, methods in page.items() for method in methods]


def test_no_answer_sets_a_cookie_or_lets_another_origin_read_it(live, http) -> None:
    for method, path in spec_paths(http):
        if path.endswith("/stream"):
            continue
        answer = http.request(method, path.replace("{", "x").replace("}", "x"), headers=ELSEWHERE)
        told = {name.lower() for name in answer.headers}
        assert "set-cookie" not in told, path
        assert not [name for name in told if name.startswith("access-control-")], path


def test_a_browser_that_asks_first_is_not_told_to_go_on(http) -> None:
    for path in ("/v1/jobs", "/v1/files", "/v1/keys"):
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        answer = http.options(path, headers=ELSEWHERE | asked)
        assert answer.status_code == 405
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("way", ["cookie", "query", "basic", "form", "header"])
def test_a_key_opens_nothing_where_a_browser_would_put_it_by_itself(live, key: str, way: str) -> None:
    import base64

    with live.http(None) as http:
        wheres = {
            "cookie": {"cookies": {"key": key, "authorization": f"Bearer {key}", "session": key}},
            "query": {"params": {"api_key": key, "key": key, "token": key, "access_token": key}},
            "basic": {"headers": {"authorization": "Basic " + base64.b64encode(f"{key}:{key}".encode()).decode()}},
            "form": {"data": {"access_token": key, "key": key}},
            "header": {"headers": {"x-api-key": key, "api-key": key}},
        }
        sent = dict(wheres[way])
        for name, value in sent.pop("cookies", {}).items():
            http.cookies.set(name, value)
        method = "POST" if way == "form" else "GET"
        envelope(http.request(method, "/v1/jobs", **sent), 401)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_a_form_can_send_without_asking_changes_nothing(live, http, content_type: str) -> None:
    job = driving.submit(http)["id"]
    with live.http(None) as visitor:
        for path in (f"/v1/jobs/{job}/cancel", "/v1/jobs", "/v1/keys", "/v1/files"):
            answer = visitor.post(
                path, content=b'{"kind": "pretrain"}', headers=ELSEWHERE | {"content-type": content_type}
            )
            envelope(answer, 401)
    assert http.get(f"/v1/jobs/{job}").json()["state"] == "queued"
