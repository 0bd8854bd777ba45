"""The Python client against a real server, and against a connection that breaks."""

import hashlib

import httpx
import pytest

from api import client as client_module
from api.client import ApiError, Client, Damaged, Unreachable
from tests.api import driving
from tests.api.conftest import Live

WEIGHTS = "adapter/adapter_model.safetensors"


class Flaky(httpx.BaseTransport):
    """Breaks each download off after a while, and now and then has no connection."""

    def __init__(self, bytes_each: int, refuse: int = 0) -> None:
        self.inner, self.bytes_each, self.refuse = httpx.HTTPTransport(), bytes_each, refuse
        self.ranges: list[str | None] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.refuse:
            self.refuse -= 1
            raise httpx.ConnectError("no route", request=request)
        response = self.inner.handle_request(request)
        if not request.url.path.endswith(".safetensors"):
            return response
        self.ranges.append(request.headers.get("range"))
        return httpx.Response(response.status_code, headers=response.headers, stream=Torn(response, self.bytes_each))

    def close(self) -> None:
        self.inner.close()


class Torn(httpx.SyncByteStream):
    def __init__(self, response: httpx.Response, most: int) -> None:
        self.response, self.most = response, most

    def __iter__(self):
        left = self.most
        for chunk in self.response.stream:
            yield chunk[:left]
            left -= len(chunk)
            if left <= 0:
                raise httpx.ReadError("connection reset")

    def close(self) -> None:
        self.response.close()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(client_module, "LONGEST_PAUSE", 0.02)


def test_a_download_is_verified_and_what_is_here_already_is_not_fetched_again(live: Live, http, client, tmp_path):
    job = driving.finished(live.services, http, tmp_path / "export")
    heard = []
    paths = client.download(job, tmp_path / "into", report=lambda *said: heard.append(said))
    assert {path.relative_to(tmp_path / "into").as_posix() for path in paths} == {*driving.ADAPTER, "manifest.json"}
    assert (tmp_path / "into" / WEIGHTS).read_bytes() == driving.ADAPTER[WEIGHTS]
    assert (WEIGHTS, len(driving.ADAPTER[WEIGHTS]), len(driving.ADAPTER[WEIGHTS])) in heard
    before = (tmp_path / "into" / WEIGHTS).stat().st_mtime_ns
    (tmp_path / "into" / "manifest.json").write_text("touched")
    client.download(job, tmp_path / "into")
    assert (tmp_path / "into" / WEIGHTS).stat().st_mtime_ns == before
    assert (tmp_path / "into" / "manifest.json").read_text() != "touched"


def test_a_download_that_breaks_off_goes_on_where_it_stopped(live: Live, http, key, tmp_path, quick):
    job = driving.finished(live.services, http, tmp_path / "export")
    transport = Flaky(bytes_each=200_000, refuse=1)
    with Client(live.url, key, transport=transport) as client:
        client.download(job, tmp_path / "into")
    assert (tmp_path / "into" / WEIGHTS).read_bytes() == driving.ADAPTER[WEIGHTS]
    # 512,000 bytes, 200,000 at a time.
    assert transport.ranges == [None, "bytes=200000-", "bytes=400000-"]


def test_a_download_that_was_spoiled_on_disk_is_found_out(live: Live, http, client, tmp_path):
    job = driving.finished(live.services, http, tmp_path / "export")
    part = tmp_path / "into" / (WEIGHTS + ".part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 1000)
    with pytest.raises(Damaged, match="not what the manifest says"):
        client.download(job, tmp_path / "into")
    client.download(job, tmp_path / "into")
    found = hashlib.sha256((tmp_path / "into" / WEIGHTS).read_bytes()).hexdigest()
    assert found == hashlib.sha256(driving.ADAPTER[WEIGHTS]).hexdigest()


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", "", "a\\..\\evil", "c:evil"])
def test_a_server_cannot_make_us_write_elsewhere(tmp_path, path):
    def answer(request: httpx.Request) -> httpx.Response:
        artifact = {"path": path, "bytes": 1, "sha256": "0", "kind": "model"}
        return httpx.Response(200, json={"data": [artifact], "has_more": False})

    with Client("http://server", "key", transport=httpx.MockTransport(answer)) as client, pytest.raises(Damaged):
        client.download("job-1", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_submit_whose_answer_is_lost_makes_one_job(live: Live, http, key, quick):
    class Losing(Flaky):
        lost = 1

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            response = super().handle_request(request)
            if request.url.path == "/v1/jobs" and request.method == "POST" and self.lost:
                self.lost -= 1
                response.read()
                raise httpx.ReadTimeout("lost", request=request)
            return response

    file = driving.upload(http)["id"]
    with Client(live.url, key, transport=Losing(0)) as client:
        job = client.submit(driving.spec(file))
        assert [one["id"] for one in client.jobs()] == [job["id"]]


def test_lists_are_read_through_all_their_pages(live: Live, http, client):
    file = driving.upload(http)["id"]
    made = [client.submit(driving.spec(file, labels={"n": str(n)}))["id"] for n in range(3)]
    assert [job["id"] for job in client.jobs(limit=1)] == made[::-1]
    assert [job["id"] for job in client.jobs(label={"n": "1"})] == [made[1]]
    assert [event["seq"] for event in client.events(made[0], limit=1)] == [1]


def test_errors_say_what_the_server_said_and_a_server_that_is_not_there_is_told(live: Live, key):
    with Client(live.url, "wrong") as client, pytest.raises(ApiError) as caught:
        client.cancel("job-1")
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert caught.value.request_id.startswith("req-")
    with Client("http://127.0.0.1:9", key, patience=0.1) as client:
        for call in (lambda: client.cancel("job-1"), lambda: client.job("job-1"), lambda: list(client.follow("job-1"))):
            with pytest.raises(Unreachable):
                call()


def test_waiting_returns_the_job_as_it_ended(live: Live, http, client, tmp_path):
    job = driving.finished(live.services, http, tmp_path)
    assert client.wait(job) == client.job(job)


def test_something_else_at_the_url_is_told_from_trainshed():
    page = httpx.MockTransport(lambda request: httpx.Response(404, text="<html>"))
    with Client("http://elsewhere", "key", transport=page) as client, pytest.raises(ApiError, match="is the URL right"):
        client.job("job-1")
