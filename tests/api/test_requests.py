"""What is true of every request: who may ask, how errors look, and that nothing from outside makes us fail."""

import errno
import json
import socket
from http.client import HTTPResponse

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.exc import OperationalError

from core import nodes
from core.states import JobState
from tests.api import driving
from tests.api.conftest import DEADLINE_SECONDS

ROUTES = [
    ("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("GET", "/v1/jobs/job-1"), ("POST", "/v1/jobs/job-1/cancel"),
    ("POST", "/v1/jobs/job-1/retry"), ("PATCH", "/v1/jobs/job-1"), ("POST", "/v1/plans"),
    ("GET", "/v1/jobs/job-1/stream"), ("GET", "/v1/jobs/job-1/artifacts.tar"), ("GET", "/v1/files"),
    ("POST", "/v1/files"), ("GET", "/v1/files/file-1/content"), ("DELETE", "/v1/files/file-1"), ("GET", "/v1/models"),
    ("GET", "/v1/models/a/b"), ("POST", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
    ("DELETE", "/v1/models/a/b"), ("POST", "/v1/uploads"), ("GET", "/v1/uploads/upload-1"),
    ("GET", "/v1/uploads/upload-1/parts"), ("POST", "/v1/uploads/upload-1/parts"),
    ("POST", "/v1/uploads/upload-1/complete"), ("POST", "/v1/uploads/upload-1/cancel"),
    ("GET", "/v1/webhook_endpoints"), ("POST", "/v1/webhook_endpoints"), ("GET", "/v1/webhook_event_types"),
    ("GET", "/v1/webhook_endpoints/whe-1"), ("POST", "/v1/webhook_endpoints/whe-1"),
    ("DELETE", "/v1/webhook_endpoints/whe-1"), ("POST", "/v1/webhook_endpoints/whe-1/rotate_secret"),
    ("POST", "/v1/webhook_endpoints/whe-1/test"), ("GET", "/v1/webhook_endpoints/whe-1/deliveries"),
    ("GET", "/v1/nodes"), ("GET", "/v1/keys"), ("POST", "/v1/keys"), ("DELETE", "/v1/keys/key-1"),
]  # fmt: skip


def envelope(answer: httpx.Response, status: int) -> dict:
    """The error of an answer that is one, in full form."""
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"].startswith("req-")
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("key", [None, "ts_nope_nope", "x", "ts_" + "a" * 24 + "_" + "b" * 43])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_a_good_key_no_route_says_anything(live, method, path, key):
    with live.http(key) as http:
        answer = http.request(method, path, json={} if method == "POST" else None)
    error = envelope(answer, 401)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_a_key_that_may_only_read_can_do_just_that(live):
    with live.http(live.key("read")) as http:
        assert http.get("/v1/jobs").status_code == 200
        for method, path in [("POST", "/v1/files"), ("POST", "/v1/jobs/job-1/cancel"), ("GET", "/v1/keys")]:
            assert envelope(http.request(method, path), 403)["code"] == "insufficient_scope"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        pytest.param("GET", "/v1/nothing", 404, id="an unknown path"),
        pytest.param("GET", "/v1/jobs/", 404, id="a slash too many"),
        pytest.param("GET", "/v1/models/", 404, id="a model without a name"),
        pytest.param("DELETE", "/v1/models/", 404, id="to delete a model without a name"),
        pytest.param("GET", "/nothing", 404, id="outside of v1"),
        pytest.param("PUT", "/v1/jobs", 405, id="a method that is not there"),
        pytest.param("GET", "/v1/jobs/job-%00", 404, id="NUL in a path"),
        pytest.param("GET", "/v1/jobs/a%0d%0aset-cookie:%20x", 404, id="a header in a path"),
        pytest.param("GET", "/v1/jobs?after=%00", 404, id="NUL in a query"),
        pytest.param("GET", "/v1/jobs?limit=0", 400, id="a limit too small"),
        pytest.param("GET", "/v1/jobs?limit=99999999999999999999", 400, id="a limit too large"),
        pytest.param("GET", "/v1/jobs?after=job-nope", 404, id="an unknown cursor"),
        pytest.param("GET", "/v1/jobs?state=asleep", 400, id="an unknown state"),
        pytest.param("GET", "/v1/files/..%2f..%2fetc%2fpasswd", 404, id="a path for an id"),
        pytest.param("GET", "/v1/jobs/" + "x" * 5000, 404, id="an id that is too long"),
    ],
)
def test_an_odd_request_is_told_so_in_the_envelope(http, method, path, status):
    envelope(http.request(method, path), status)


def test_a_wrong_method_is_told_which_there_are(http):
    # Each has a route of its own; the first one that refuses would say only its.
    assert set(http.put("/v1/jobs").headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}
    assert set(http.options("/v1/models/x/y").headers["allow"].split(", ")) == {"GET", "HEAD", "DELETE"}
    assert set(http.put("/v1/jobs/job-1").headers["allow"].split(", ")) == {"GET", "HEAD", "PATCH", "DELETE"}
    assert http.get("/v1/jobs/job-1/cancel").headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        pytest.param(b"{", "application/json", id="broken off"),
        pytest.param(b"", "application/json", id="empty"),
        pytest.param(b"[]", "application/json", id="a list"),
        pytest.param(b"null", "application/json", id="null"),
        pytest.param(b'{"kind": "\xff"}', "application/json", id="not UTF-8"),
        pytest.param(b"[" * 100_000, "application/json", id="too deep"),
        pytest.param(b'{"kind": ' + b"9" * 5000 + b"}", "application/json", id="a number of 5000 digits"),
        pytest.param(b'{"kind": ' + b"9" * 5000 + b"}", "application/json", id="a huge integer"),
        pytest.param(b"{}", "text/plain", id="of another type"),
        pytest.param(b"kind=pretrain", "application/x-www-form-urlencoded", id="a form"),
    ],
)
def test_a_body_that_is_no_json_object_is_a_bad_request_that_says_so(http, body, content_type):
    error = envelope(http.post("/v1/jobs", content=body, headers={"content-type": content_type}), 400)
    assert "JSON" in error["message"]


def test_one_file_where_a_list_belongs_is_told_so(http):
    error = envelope(http.post("/v1/jobs", json=driving.spec("file-1") | {"data": {"train": "file-1"}}), 400)
    assert (error["param"], error["message"]) == ("data.train", "data.train: this must be a list, also of a single one")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_what_is_not_a_finite_number_is_refused(http, number):
    spec = json.dumps(driving.spec("file-1", training={"lr": "?"}))
    body = spec.replace('"?"', number)
    answer = http.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
    assert envelope(answer, 400)["param"] == "training.lr"


def test_a_body_that_is_too_large_is_refused_while_it_comes_in(http):
    def chunks():
        for _ in range(64):
            yield b" " * 1024 * 1024

    answer = http.post("/v1/jobs", content=chunks(), headers={"content-type": "application/json"})
    envelope(answer, 413)


def test_our_own_mistakes_show_an_id_and_no_stack(http, monkeypatch):
    def listing(session):
        raise RuntimeError("the secret of the house")

    monkeypatch.setattr(nodes, "listing", listing)
    answer = http.get("/v1/nodes")
    error = envelope(answer, 500)
    assert error["type"] == "server_error"
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text


def test_a_database_that_is_away_is_a_reason_to_try_again(http, monkeypatch):
    def listing(session):
        raise OperationalError("SELECT", {}, Exception("the server closed the connection"))

    monkeypatch.setattr(nodes, "listing", listing)
    assert envelope(http.get("/v1/nodes"), 503)["code"] == "unavailable"


@pytest.mark.parametrize(
    "met",
    [
        pytest.param(OSError(errno.ENOSPC, "No space left on device"), id="by the file system"),
        pytest.param(OperationalError("INSERT", {}, Exception("database or disk is full")), id="by the database"),
    ],
)
def test_a_full_disk_is_told_as_one_and_nothing_is_kept(live, http, monkeypatch, met):
    def put_stream(key, chunks):
        raise met

    monkeypatch.setattr(live.services.storage, "put_stream", put_stream)
    answer = http.post("/v1/files", data={"purpose": "pretrain"}, files={"file": ("a.txt", b"to be or not to be")})
    error = envelope(answer, 503)
    assert error["code"] == "disk_full"
    assert "disk is full" in error["message"]
    assert http.get("/v1/files").json()["data"] == []


def test_every_answer_has_an_id_of_its_own(http):
    assert http.get("/healthz").headers["x-request-id"] != http.get("/healthz").headers["x-request-id"]


def test_nobody_learns_that_another_projects_things_exist(live, http, tmp_path):
    file = driving.upload(http)
    job = driving.finished(live.services, http, tmp_path)
    with live.http(live.key()) as stranger:
        for method, path in [
            ("GET", f"/v1/jobs/{job}"), ("POST", f"/v1/jobs/{job}/cancel"), ("POST", f"/v1/jobs/{job}/pause"),
            ("POST", f"/v1/jobs/{job}/resume"), ("GET", f"/v1/jobs/{job}/events"), ("GET", f"/v1/jobs/{job}/stream"),
            ("GET", f"/v1/jobs/{job}/metrics"), ("GET", f"/v1/jobs/{job}/logs"), ("GET", f"/v1/jobs/{job}/checkpoints"),
            ("GET", f"/v1/jobs/{job}/artifacts"), ("GET", f"/v1/jobs/{job}/artifacts/manifest.json"),
            ("GET", f"/v1/jobs/{job}/artifacts.tar"), ("GET", f"/v1/files/{file['id']}"),
            ("GET", f"/v1/files/{file['id']}/content"), ("GET", f"/v1/files/{file['id']}/report"),
            ("DELETE", f"/v1/files/{file['id']}"), ("GET", f"/v1/jobs?after={job}"),
        ]:  # fmt: skip
            foreign, absent = stranger.request(method, path), stranger.request(method, path.replace(job, "job-0"))
            assert envelope(foreign, 404)["code"] == "not_found"
            if job in path:
                assert foreign.json()["error"]["message"].replace(job, "job-0") == absent.json()["error"]["message"]
        assert stranger.get("/v1/jobs").json()["data"] == []
        assert stranger.get("/v1/files").json()["data"] == []
        answer = stranger.post("/v1/jobs", json=driving.spec(file["id"]))
        assert "data.train" in envelope(answer, 404)["param"]


def test_an_upload_without_a_key_is_refused_before_its_bytes_are_read(live):
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_SECONDS) as connection:
        connection.sendall(
            b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
            b"content-length: 100000000\r\n\r\n--b\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"GET /v1/jobs/caf\xc3\xa9 HTTP/1.1\r\nhost: x\r\n\r\n", id="a path that is not ASCII"),
        pytest.param(b"FOO /v1/jobs HTTP/1.1\r\nhost: x\r\n\r\n", id="a method that there is not"),
        pytest.param(b"POST /v1/jobs HTTP/1.1\r\ncontent-length: -5\r\n\r\n", id="a length below nothing"),
        pytest.param(b"POST /v1/jobs HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nabc", id="a bad chunk"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="TLS"),
    ],
)
def test_what_is_no_http_is_told_so_in_the_envelope(live, said):
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_SECONDS) as connection:
        connection.sendall(said)
        answer = HTTPResponse(connection)
        answer.begin()
        body = json.loads(answer.read())
    assert answer.status == 400
    assert answer.headers["x-request-id"].startswith("req-")
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "HTTP/1.1" in body["error"]["message"]


def test_prometheus_reads_requests_jobs_the_queue_slots_and_hosts(live, http):
    running = driving.submit(http)["id"]
    driving.run(live.services, running)
    driving.submit(http)
    families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}

    def value(family: str, **labels: str) -> float:
        (found,) = (sample.value for sample in families[family].samples if sample.labels == labels)
        return found

    counted = {
        tuple(sample.labels.values()): sample.value for sample in families["trainshed_http_requests"].samples
        if sample.name.endswith("_total")
    }  # fmt: skip
    assert counted["POST", "/v1/jobs", "201"] >= 2
    assert families["trainshed_http_request_seconds"].type == "histogram"
    assert {sample.labels["state"] for sample in families["trainshed_jobs"].samples} == set(JobState)
    assert value("trainshed_queue_length") == value("trainshed_jobs", state="queued") >= 1
    assert value("trainshed_slots", state="held") >= 1
    assert value("trainshed_slots", state="free") >= driving.NODE_SLOTS - 1
    assert 0 <= value("trainshed_node_heartbeat_age_seconds", node=f"node-{running}") < DEADLINE_SECONDS


def test_head_is_get_without_the_body(live, http, tmp_path):
    job = driving.finished(live.services, http, tmp_path)
    file = driving.upload(http)["id"]
    for path in (
        "/healthz",
        f"/v1/jobs/{job}",
        f"/v1/jobs/{job}/artifacts/manifest.json",
        f"/v1/jobs/{job}/artifacts.tar",
        f"/v1/files/{file}/content",
        "/v1/jobs/job-nobody",
    ):
        head, whole = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (whole.status_code, b"")
        for name in ("content-length", "content-type", "etag", "accept-ranges"):
            assert head.headers.get(name) == whole.headers.get(name), (path, name)
    part = http.head(f"/v1/files/{file}/content", headers={"range": "bytes=0-9"})
    assert (part.status_code, part.headers["content-length"]) == (206, "10")
    # One that would go on for ever, of a job that has not ended.
    waits = driving.submit(http)["id"]
    assert http.head(f"/v1/jobs/{waits}/stream").headers["content-type"].startswith("text/event-stream")
    refused = http.head("/v1/jobs/job-1/cancel")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert "HEAD" in http.put("/v1/nodes").headers["allow"]
