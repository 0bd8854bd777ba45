"""What a key or a project may not do any more is refused in words, with what a client needs to go on later."""

import threading
from contextlib import ExitStack

import pytest

from api import keyring, sse
from core.services import Services
from tests.api import driving
from tests.api.conftest import DEADLINE_SECONDS, Live, running, wait_for
from tests.api.test_requests import envelope


@pytest.fixture
def project(organization):
    return organization.post("/v1/projects", json={"name": "limited", "quotas": {"storage_bytes": 5000}}).json()


@pytest.fixture
def member(live, project):
    with live.http(live.key("submit", project=project["id"])) as client:
        yield client


def test_quotas_are_set_changed_taken_away_and_shown_beside_what_is_used(organization, project, member):
    assert project["quotas"] == {"gpu_hours": None, "concurrent_jobs": None, "storage_bytes": 5000}
    assert project["usage"] == {"gpu_hours": 0.0, "concurrent_jobs": 0, "storage_bytes": 0}
    path = f"/v1/projects/{project['id']}"
    file = driving.upload(member)
    changed = organization.patch(path, json={"quotas": {"gpu_hours": 1.5, "concurrent_jobs": 2}}).json()
    assert changed["quotas"] == {"gpu_hours": 1.5, "concurrent_jobs": 2, "storage_bytes": 5000}
    assert changed["usage"]["storage_bytes"] == file["bytes"]
    changed = organization.patch(path, json={"quotas": {"gpu_hours": None, "storage_bytes": 0}}).json()
    assert changed["quotas"] == {"gpu_hours": None, "concurrent_jobs": 2, "storage_bytes": 0}
    assert member.get(path).json() == changed
    entry = organization.get("/v1/audit_logs", params={"object_id": project["id"]}).json()["data"][0]
    assert (entry["action"], entry["data"]) == ("project.updated", {"gpu_hours": None, "storage_bytes": 0})
    for wrong in ({"gpu_hours": -1}, {"concurrent_jobs": 1.5}, {"storage_bytes": "1"}, {"gpus": 1}):
        envelope(organization.patch(path, json={"quotas": wrong}), 400)


def test_an_upload_beyond_the_projects_storage_is_refused_while_it_comes_in_and_nothing_is_kept(member):
    files = {"file": ("train.txt", driving.TEXT * 100)}
    error = envelope(member.post("/v1/files", data={"purpose": "pretrain"}, files=files), 429)
    assert error["code"] == "insufficient_quota"
    assert "5,000 bytes" in error["message"]
    assert member.get("/v1/files").json()["data"] == []
    assert driving.upload(member)["bytes"] == len(driving.TEXT)


def test_a_job_beyond_the_projects_hours_is_refused_and_not_tried_again(organization, project, member):
    file = driving.upload(member)["id"]
    organization.patch(f"/v1/projects/{project['id']}", json={"quotas": {"gpu_hours": 0}})
    refused = member.post("/v1/jobs", json=driving.spec(file))
    assert envelope(refused, 429)["code"] == "insufficient_quota"
    assert refused.headers["x-should-retry"] == "false"


def test_a_key_that_asks_too_often_is_told_when_it_may_again_and_streams_and_health_do_not_count(live, http):
    job = driving.submit(http)["id"]
    settings = live.services.settings.model_copy(update={"requests_per_minute": 2})
    fresh = live.key("read", project=http.get("/v1/projects").json()["data"][0]["id"])
    with Services(settings) as services, running(services) as url, Live(url, services).http(fresh) as client:
        for _ in range(3):
            with client.stream("GET", f"/v1/jobs/{job}/stream") as stream:
                assert next(stream.iter_raw()).startswith(b":")
        answers = [client.get(f"/v1/jobs/{job}") for _ in range(2)]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0"]
        assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"2"}
        refused = client.get(f"/v1/jobs/{job}")
        assert envelope(refused, 429)["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
        assert client.get("/healthz").status_code == 200


def test_a_key_has_so_many_streams_and_no_more_until_one_of_them_ends(live, http, key, monkeypatch):
    monkeypatch.setattr(sse, "STREAMS_OF_A_KEY", 2)
    job = driving.submit(http)["id"]
    path = f"/v1/jobs/{job}/stream"
    another = http.post("/v1/keys", json={"name": "other", "scopes": ["read"]}).json()["secret"]
    heard = []
    with live.http(key) as client, live.http(another) as second, ExitStack() as open_ones:
        for _ in range(2):
            # Kept, as an iterator that is let go closes its stream.
            heard.append(open_ones.enter_context(client.stream("GET", path)).iter_raw())
            # Its first bytes say that it has begun, and counts.
            assert next(heard[-1])
        error = envelope(http.get(path), 429)
        assert (error["code"], "2 streams" in error["message"]) == ("rate_limit_exceeded", True)
        with second.stream("GET", path) as others:
            assert others.status_code == 200
        open_ones.close()
        wait_for(lambda: begins(http, path))
        http.post(f"/v1/jobs/{job}/cancel")


def begins(http, path: str) -> bool:
    with http.stream("GET", path) as stream:
        return stream.status_code == 200


def test_streams_that_a_key_opened_end_when_it_is_revoked(live, http, monkeypatch):
    monkeypatch.setattr(keyring, "LOOK_SECONDS", 0.05)
    job = driving.submit(http)["id"]
    body = {"name": "listener", "scopes": ["read"]}
    made, other = (http.post("/v1/keys", json=body).json() for _ in range(2))
    ended, still = threading.Event(), threading.Event()
    with live.http(made["secret"]) as first, live.http(other["secret"]) as second:

        def listen(client, over):
            with client.stream("GET", f"/v1/jobs/{job}/stream") as stream:
                heard.release()
                for _ in stream.iter_raw():
                    pass
            over.set()

        heard = threading.Semaphore(0)
        threads = [threading.Thread(target=listen, args=pair) for pair in ((first, ended), (second, still))]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert heard.acquire(timeout=DEADLINE_SECONDS)
        http.delete(f"/v1/keys/{made['id']}")
        assert ended.wait(DEADLINE_SECONDS)
        assert not still.is_set()
        envelope(first.get(f"/v1/jobs/{job}"), 401)
        http.post(f"/v1/jobs/{job}/cancel")
        assert still.wait(DEADLINE_SECONDS)
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
