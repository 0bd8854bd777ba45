"""A browser that signed in may read, by a cookie that no script sees and no other site's page can use."""

from __future__ import annotations

from http.cookies import SimpleCookie
from itertools import takewhile

import httpx
import pytest
from sqlalchemy import update

from api import keyring
from core import visits
from core.models import Visit, database_now
from tests.api import driving
from tests.api.test_requests import envelope

COOKIE = "trainshed_visit"


@pytest.fixture
def token(http: httpx.Client) -> str:
    answer = http.post("/v1/visits")
    assert (answer.status_code, answer.json()["object"]) == (201, "visit")
    assert answer.json()["expires_at"] - answer.json()["created_at"] == 12 * 3600
    set_ = SimpleCookie(answer.headers["set-cookie"])[COOKIE]
    assert (set_["httponly"], set_["samesite"], set_["path"]) == (True, "strict", "/v1")
    assert set_.value not in answer.text
    http.cookies.clear()
    return set_.value


def with_cookie(live, token, method, path, **sent):
    headers = {"cookie": f"{COOKIE}={token}".encode("latin-1"), **sent.pop("headers", {})}
    with live.http(None) as browser:
        return browser.request(method, path, headers=headers, **sent)


def test_a_visit_reads_what_its_key_may_read_and_changes_nothing(live, http, token):
    job = driving.submit(http)["id"]
    assert with_cookie(live, token, "GET", f"/v1/jobs/{job}").json()["id"] == job
    assert with_cookie(live, token, "HEAD", f"/v1/jobs/{job}").status_code == 200
    assert envelope(with_cookie(live, token, "GET", "/v1/keys"), 403)["code"] == "insufficient_scope"
    for method, path in (("POST", f"/v1/jobs/{job}/cancel"), ("POST", "/v1/visits"), ("POST", "/v1/plans")):
        envelope(with_cookie(live, token, method, path), 401)
    assert http.get(f"/v1/jobs/{job}").json()["state"] == "queued"
    with live.http(live.key()) as stranger:
        theirs = driving.submit(stranger)["id"]
    envelope(with_cookie(live, token, "GET", f"/v1/jobs/{theirs}"), 404)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_origin_gains_nothing_by_the_cookie(live, token, site):
    for method, path in (("GET", "/v1/jobs"), ("DELETE", "/v1/visits")):
        envelope(with_cookie(live, token, method, path, headers={"sec-fetch-site": site}), 401)
    assert with_cookie(live, token, "GET", "/v1/jobs", headers={"sec-fetch-site": "same-origin"}).status_code == 200


def test_a_visit_ends_when_it_is_signed_out_when_its_time_is_over_and_with_its_key(live, http, key, token):
    def status(token: str) -> int:
        return with_cookie(live, token, "GET", "/v1/jobs").status_code

    over = with_cookie(live, token, "DELETE", "/v1/visits")
    assert (over.status_code, SimpleCookie(over.headers["set-cookie"])[COOKIE]["max-age"]) == (200, "0")
    assert status(token) == 401
    late, last = (SimpleCookie(http.post("/v1/visits").headers["set-cookie"])[COOKIE].value for _ in range(2))
    assert (status(late), status(last)) == (200, 200)
    with live.services.db.session() as session:
        session.execute(update(Visit).where(Visit.id == late.split(".")[0]).values(expires_at=database_now() - 1))
    assert (status(late), status(last)) == (401, 200)
    http.delete(f"/v1/keys/key-{key.split('_')[1]}")
    assert status(last) == 401


@pytest.mark.parametrize("way", ["signed out", "time is over"])
def test_a_stream_that_a_visit_opened_ends_with_it_and_others_of_its_key_go_on(live, http, token, monkeypatch, way):
    monkeypatch.setattr(keyring, "LOOK_SECONDS", 0.05)
    job = driving.submit(http)["id"]
    path, cookie = f"/v1/jobs/{job}/stream", {"cookie": f"{COOKIE}={token}"}
    with (
        live.http(None) as browser,
        browser.stream("GET", path, headers=cookie) as opened,
        http.stream("GET", path) as other,
    ):
        heard = opened.iter_raw()
        next(heard)
        if way == "signed out":
            assert with_cookie(live, token, "DELETE", "/v1/visits").status_code == 200
        else:
            with live.services.db.session() as session:
                mine = Visit.id == token.split(".")[0]
                session.execute(update(Visit).where(mine).values(expires_at=database_now() - 1))
        # One that goes on says so every so often.
        rest = list(takewhile(lambda chunk: not chunk.startswith(b":"), heard))
        assert opened.is_closed
        assert not any(b"event: done" in chunk for chunk in rest)
        http.post(f"/v1/jobs/{job}/cancel")
        assert b"event: done" in b"".join(other.iter_raw())


@pytest.mark.parametrize("wrong", ["", "x", "visit-1.x", "\u00ff"])
def test_a_cookie_that_is_none_of_ours_is_told_what_to_send(live, token, wrong):
    forged = token.split(".")[0] + "." + "A" * 43
    for value in (wrong, forged):
        envelope(with_cookie(live, value, "GET", "/v1/jobs"), 401)


def test_a_key_has_so_many_visits_and_the_oldest_end_first(live, http, monkeypatch):
    monkeypatch.setattr(visits, "MOST_OF_A_KEY", 2)
    tokens = [SimpleCookie(http.post("/v1/visits").headers["set-cookie"])[COOKIE].value for _ in range(3)]
    assert [with_cookie(live, token, "GET", "/v1/jobs").status_code for token in tokens] == [401, 200, 200]
