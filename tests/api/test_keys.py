"""Keys over HTTP: a secret is shown once, opens what its scopes say, and nothing once it is revoked or has expired."""

import time

import pytest

from core.models import ApiKey
from tests.api.test_requests import envelope


def test_a_key_is_made_listed_used_and_revoked(live, http):
    made = http.post("/v1/keys", json={"name": "ci", "scopes": ["submit"]})
    assert made.status_code == 201
    key = made.json()
    assert key["secret"].startswith("ts_")
    listed = {one["id"]: one for one in http.get("/v1/keys").json()["data"]}
    assert listed[key["id"]] == {name: value for name, value in key.items() if name != "secret"}
    with live.http(key["secret"]) as other:
        assert other.get("/v1/jobs").status_code == 200
        envelope(other.get("/v1/keys"), 403)
        assert http.delete(f"/v1/keys/{key['id']}").json()["revoked_at"] <= time.time()
        envelope(other.get("/v1/jobs"), 401)


def test_a_key_that_has_expired_opens_nothing(live, http):
    key = http.post("/v1/keys", json={"name": "brief", "expires_at": int(time.time()) + 1000}).json()
    with live.http(key["secret"]) as other:
        assert other.get("/v1/jobs").status_code == 200
        with live.services.db.session() as session:
            session.get_one(ApiKey, key["id"]).expires_at = time.time() - 1
        envelope(other.get("/v1/jobs"), 401)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({}, "name", id="no name"),
        pytest.param({"name": "a", "scopes": ["root"]}, "scopes.0", id="no such scope"),
        pytest.param({"name": "a", "scopes": []}, "scopes", id="no scope"),
        pytest.param({"name": "a\u0000"}, "name", id="NUL"),
        pytest.param({"name": "a", "expires_at": True}, "expires_at", id="a truth value for a time"),
        pytest.param({"name": "a", "expires_at": "1"}, "expires_at", id="text for a time"),
        pytest.param({"name": "a", "expires_at": 10**9}, "expires_at", id="a time in 2001"),
        pytest.param({"name": "a", "expires_at": 10**30}, "expires_at", id="after the end of time"),
    ],
)
def test_a_key_that_makes_no_sense_is_refused(http, body, param):
    assert envelope(http.post("/v1/keys", json=body), 400)["param"] == param


def test_another_projects_key_can_be_neither_seen_nor_revoked(live, http):
    key = http.post("/v1/keys", json={"name": "mine"}).json()
    with live.http(live.key()) as stranger:
        assert key["id"] not in {one["id"] for one in stranger.get("/v1/keys").json()["data"]}
        envelope(stranger.delete(f"/v1/keys/{key['id']}"), 404)
    with live.http(key["secret"]) as own:
        assert own.get("/v1/jobs").status_code == 200
