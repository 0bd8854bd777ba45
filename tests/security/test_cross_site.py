"""A page of somebody else's, open in a browser of somebody who may use the service: it must get nothing done by that.

A browser that signed in has a cookie, which opens what reads, for pages of ours.
"""

from __future__ import annotations

from http.cookies import SimpleCookie

import pytest

from tests.api import driving
from tests.api.test_requests import envelope

ELSEWHERE = {"origin": "https://evil.example", "referer": "https://evil.example/", "sec-fetch-site": "cross-site"}


def spec_paths(http) -> list[tuple[str, str]]:
    page = http.get("/openapi.json").json()["paths"]
    return [(method.upper(), path) for path, methods in page.items() for method in methods]


def test_no_answer_sets_a_cookie_or_lets_another_origin_read_it(live, http) -> None:
    for method, path in spec_paths(http):
        # To sign in, with a key, is what a cookie is for.
        if path.endswith("/stream") or path == "/v1/visits":
            continue
        answer = http.request(method, path.replace("{", "x").replace("}", "x"), headers=ELSEWHERE)
        told = {name.lower() for name in answer.headers}
        assert "set-cookie" not in told, path
        assert not [name for name in told if name.startswith("access-control-")], path


def test_the_cookie_of_a_browser_changes_nothing_on_any_route_and_reads_nothing_for_another_sites_page(
    live, http
) -> None:
    """Generated from the document, so that a new route is among them."""
    cookie = SimpleCookie(http.post("/v1/visits").headers["set-cookie"])["trainshed_visit"]
    assert (cookie["httponly"], cookie["samesite"].lower()) == (True, "strict")
    paths, http.cookies = spec_paths(http), {}
    with live.http(None) as browser:
        browser.headers["cookie"] = f"trainshed_visit={cookie.value}"
        assert browser.get("/v1/jobs").status_code == 200
        wrote = [(method, path) for method, path in paths if method not in {"GET", "HEAD"} and path != "/v1/visits"]
        assert len(wrote) > 20
        for method, path in wrote:
            for headers in ({}, ELSEWHERE, {"sec-fetch-site": "same-origin"}):
                answer = browser.request(method, path.replace("{", "x").replace("}", "x"), headers=headers, json={})
                assert answer.status_code == 401, (method, path, headers)
        read = [path for method, path in paths if method == "GET" and path.startswith("/v1/")]
        assert len(read) > 20
        for path in read:
            answer = browser.get(path.replace("{", "x").replace("}", "x"), headers=ELSEWHERE)
            assert answer.status_code == 401, path
        assert browser.delete("/v1/visits", headers=ELSEWHERE).status_code == 401
        assert browser.get("/v1/jobs").status_code == 200, "nobody signed it out"


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


PAGE = b"<!doctype html><script>fetch('/v1/jobs')</script>"


def test_what_others_wrote_is_no_page_that_a_browser_shows(live, http) -> None:
    """A page of our origin would be let in by the cookie, and could read whatever that opens."""
    file = driving.upload(http, PAGE, "report.html", purpose="user_data")["id"]
    job = driving.submit(http)["id"]
    logs = live.services.settings.runs / job / "1" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_bytes(PAGE)
    content, log = http.get(f"/v1/files/{file}/content"), http.get(f"/v1/jobs/{job}/logs")
    assert content.content == log.content == PAGE
    assert content.headers["content-disposition"].startswith("attachment;")
    assert log.headers["content-type"].startswith("text/plain")
    others = [http.get(path.replace("{", "<b>").replace("}", "</b>")) for method, path in spec_paths(http)
              if method == "GET" and not path.endswith("/stream")]  # fmt: skip
    assert len(others) > 20
    for answer in (content, log, *others, http.get("/<script>x</script>"), http.get("/docs/assets/favicon.png")):
        assert answer.headers["x-content-type-options"] == "nosniff", answer.url
        assert "html" not in answer.headers["content-type"], answer.url


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
