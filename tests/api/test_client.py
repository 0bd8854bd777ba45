"""The Python client against a real server, and against a connection that breaks."""

import hashlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from api import client as client_module
from api.client import ApiError, Client, Damaged, TrainshedError, Unreachable
from tests.api import driving
from tests.api.conftest import Live

ROOT = Path(__file__).resolve().parents[2]
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


def test_a_folder_with_another_jobs_artifacts_is_left_as_it_is(live: Live, http, client, tmp_path):
    into = tmp_path / "into"
    first = driving.finished(live.services, http, tmp_path / "first")
    model = {"gguf/model.gguf": b"merged" * 1000}
    second = driving.finished(live.services, http, tmp_path / "second", model)
    client.download(first, into)
    (into / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in into.rglob("*") if path.is_file()}
    with pytest.raises(client_module.Occupied, match="another job's"):
        client.download(second, into)
    assert {path: path.read_bytes() for path in into.rglob("*") if path.is_file()} == before
    # Files that are nobody's artifacts are in nobody's way.
    for path in before:
        if path.name != "notes.txt":
            path.unlink()
    client.download(second, into)
    there = {path.relative_to(into).as_posix() for path in into.rglob("*") if path.is_file()}
    assert there == {"notes.txt", "manifest.json", *model}


def test_a_folder_belongs_to_a_job_as_soon_as_its_download_has_begun(live: Live, http, client, tmp_path):
    first, second = (
        driving.finished(live.services, http, tmp_path / name, {f"{name}/weights": name.encode() * 1000})
        for name in ("first", "second")
    )

    def interrupt(path: str, done: int, total: int) -> None:
        if path == "first/weights":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.download(first, tmp_path / "into", report=interrupt)
    with pytest.raises(client_module.Occupied):
        client.download(second, tmp_path / "into")
    client.download(first, tmp_path / "into")
    assert (tmp_path / "into" / "first" / "weights").read_bytes() == b"first" * 1000


def test_a_download_that_breaks_off_goes_on_where_it_stopped(live: Live, http, key, tmp_path, quick):
    job = driving.finished(live.services, http, tmp_path / "export")
    transport = Flaky(bytes_each=200_000, refuse=1)
    with Client(live.url, key, transport=transport) as client:
        client.download(job, tmp_path / "into")
    assert (tmp_path / "into" / WEIGHTS).read_bytes() == driving.ADAPTER[WEIGHTS]
    # 512,000 bytes, 200,000 at a time.
    assert transport.ranges == [None, "bytes=200000-", "bytes=400000-"]


def test_a_download_killed_in_the_middle_goes_on_where_it_was(live: Live, http, key, tmp_path):
    job = driving.finished(live.services, http, tmp_path / "export")
    dying = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from api.client import Client\n"
        "url, key, job, into = sys.argv[1:]\n"
        "die = lambda path, done, total: 200_000 < done < total and os.kill(os.getpid(), signal.SIGKILL)\n"
        "Client(url, key).download(job, Path(into), report=die)\n"
    )
    into = tmp_path / "into"
    command = [sys.executable, "-c", dying, live.url, key, job, str(into)]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    here = (into / (WEIGHTS + ".part")).stat().st_size
    assert 0 < here < len(driving.ADAPTER[WEIGHTS])
    transport = Flaky(bytes_each=10**9)
    with Client(live.url, key, transport=transport) as client:
        client.download(job, into)
    assert transport.ranges == [f"bytes={here}-"]
    assert (into / WEIGHTS).read_bytes() == driving.ADAPTER[WEIGHTS]
    assert not list(into.rglob("*.part"))


def test_the_beginning_of_something_else_is_found_out_and_brought_anew(live: Live, http, client, tmp_path):
    job = driving.finished(live.services, http, tmp_path / "export")
    part = tmp_path / "into" / (WEIGHTS + ".part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 1000)
    client.download(job, tmp_path / "into")
    found = hashlib.sha256((tmp_path / "into" / WEIGHTS).read_bytes()).hexdigest()
    assert found == hashlib.sha256(driving.ADAPTER[WEIGHTS]).hexdigest()
    assert not part.exists()


def test_what_is_not_as_the_manifest_says_is_not_kept(tmp_path):
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/artifacts"):
            artifact = {"path": "a", "bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest(), "kind": "model"}
            return httpx.Response(200, json={"data": [artifact], "has_more": False})
        return httpx.Response(200, content=b"abd")

    transport = httpx.MockTransport(answer)
    with Client("http://server", "key", transport=transport) as client, pytest.raises(Damaged, match="manifest says"):
        client.download("job-1", tmp_path)
    assert list(tmp_path.iterdir()) == []


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
    assert isinstance(caught.value, TrainshedError)
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


def test_a_file_that_is_there_already_is_not_sent_again(live: Live, client):
    heard = []
    content = io.BytesIO(driving.TEXT)
    first = client.upload(content, filename="a.txt", reuse=True, report=lambda *said: heard.append(said))
    assert heard[-1] == ("a.txt", len(driving.TEXT), len(driving.TEXT))
    heard.clear()
    assert client.upload(content, filename="a.txt", reuse=True, report=lambda *said: heard.append(said)) == first
    assert heard == []
    others = [
        client.upload(content, filename="b.txt", reuse=True),
        client.upload(content, filename="a.txt", purpose="pretrain", reuse=True),
        client.upload(io.BytesIO(driving.TEXT + b"!"), filename="a.txt", reuse=True),
        client.upload(content, filename="a.txt"),
    ]
    assert len({first["id"], *(other["id"] for other in others)}) == 5


def test_of_a_large_file_a_broken_connection_costs_a_part(live: Live, key, quick, monkeypatch):
    class Breaking(Flaky):
        parts = 0

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            response = super().handle_request(request)
            if request.url.path.endswith("/parts"):
                self.parts += 1
                if self.parts == 2:
                    response.read()
                    raise httpx.ReadError("the answer is lost", request=request)
            return response

    monkeypatch.setattr(client_module, "PART_BYTES", 1000)
    content, heard = driving.TEXT * 2, []
    transport = Breaking(0)
    with Client(live.url, key, transport=transport) as client:
        file = client.upload(io.BytesIO(content), filename="a.txt", report=lambda *said: heard.append(said))
        assert client.file(file["id"]) == file
    assert (file["sha256"], file["bytes"]) == (driving.sha256(content), len(content))
    assert heard[-1] == ("a.txt", len(content), len(content))
    # 3440 bytes are four parts, and one of them was sent twice.
    assert transport.parts == 5


UPLOADING = """
import os, sys
from pathlib import Path
from api import client as module

module.PART_BYTES = 1000
sent = 0

class Dying(module.Client):
    def _json(self, method, path, **options):
        global sent
        answer = super()._json(method, path, **options)
        if path.endswith("/parts") and method == "POST":
            sent += 1
            if sent == int(sys.argv[2]):
                os.kill(os.getpid(), 9)
        return answer

with Dying(os.environ["TRAINSHED_URL"], os.environ["TRAINSHED_API_KEY"]) as client:
    print(sent, client.upload(Path(sys.argv[1]), reuse=True)["id"], sent)
"""


def test_what_a_killed_upload_has_sent_is_not_sent_again_by_the_next_process(live: Live, key, http, tmp_path):
    content = driving.TEXT * 3
    (tmp_path / "large.txt").write_bytes(content)
    env = os.environ | {"TRAINSHED_URL": live.url, "TRAINSHED_API_KEY": key}

    def upload(kill_after: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", UPLOADING, str(tmp_path / "large.txt"), str(kill_after)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    assert upload(kill_after=4).returncode == -signal.SIGKILL
    (open_,) = http.get("/v1/uploads", params={"status": "pending"}).json()["data"]
    assert (open_["filename"], open_["bytes"]) == ("large.txt", len(content))
    done = upload(kill_after=99)
    # 5160 bytes are six parts, of which four were there.
    assert done.stdout.split()[2] == "2", done.stderr
    file = http.get(f"/v1/files/{done.stdout.split()[1]}").json()
    assert file["sha256"] == driving.sha256(content)
    assert http.get("/v1/uploads", params={"status": "pending"}).json()["data"] == []
    (ended,) = http.get("/v1/uploads", params={"status": "completed"}).json()["data"]
    assert (ended["id"], ended["file"]["id"]) == (open_["id"], file["id"])


def test_a_large_file_that_is_refused_leaves_no_open_upload(live: Live, key, monkeypatch):
    monkeypatch.setattr(client_module, "PART_BYTES", 10)
    transport = Flaky(0)
    paths: list[str] = []
    with Client(live.url, key, transport=transport) as client:
        client.http.event_hooks["request"].append(lambda request: paths.append(request.url.path))
        with pytest.raises(ApiError) as caught:
            client.upload(io.BytesIO(b'{"messages": 1}\n{"messages": 2}\n'), filename="a.jsonl")
        assert caught.value.code == "invalid_file"
        assert paths[-1].endswith("/cancel")
        assert list(client.files()) == []


class Answers(httpx.BaseTransport):
    """Gives each of these in turn, an exception or an answer, and remembers what it was asked."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers, self.asked = list(answers), []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url.path}")
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def refusal(status: int, **headers: str) -> httpx.Response:
    error = {"message": "not now", "type": "server_error", "param": None, "code": "unavailable"}
    return httpx.Response(status, json={"error": error}, headers=headers)


OK = httpx.Response(200, json={"id": "job-1", "data": [], "has_more": False})


@pytest.mark.parametrize(
    ("call", "answer", "is_repeated"),
    [
        pytest.param(lambda client: client.job("job-1"), httpx.ReadTimeout("slow"), True, id="a read that broke"),
        pytest.param(lambda client: client.job("job-1"), refusal(503), True, id="a read from a server that starts"),
        pytest.param(lambda client: client.cancel("job-1"), httpx.ReadError("gone"), True, id="a cancel that broke"),
        pytest.param(lambda client: client.create_key("a", []), httpx.ConnectError("no"), True, id="never sent"),
        pytest.param(lambda client: client.create_key("a", []), refusal(429), True, id="put off"),
        pytest.param(lambda client: client.create_key("a", []), httpx.ReadError("gone"), False, id="a key that broke"),
        pytest.param(lambda client: client.create_key("a", []), refusal(503), False, id="a key from a server in need"),
        pytest.param(lambda client: client.job("job-1"), refusal(500), False, id="a fault of the server's"),
        pytest.param(
            lambda client: client.job("job-1"), refusal(504, **{"x-should-retry": "false"}), False, id="in vain"
        ),
    ],
)
def test_only_what_may_be_asked_twice_is_asked_twice(quick, call, answer, is_repeated):
    heard = []
    transport = Answers(answer, OK)
    waiting = lambda error, seconds: heard.append((type(error), seconds))  # noqa: E731
    with Client("http://server", "key", transport=transport, waiting=waiting) as client:
        if is_repeated:
            assert call(client)["id"] == "job-1"
            assert transport.asked[0] == transport.asked[1]
            assert heard == [(ApiError if isinstance(answer, httpx.Response) else Unreachable, 30.0)]
        else:
            with pytest.raises(TrainshedError):
                call(client)
            assert len(transport.asked) == 1


def test_a_server_that_says_when_to_come_back_is_believed_within_patience(quick):
    soon, late = (refusal(429, **{"retry-after": seconds}) for seconds in ("0.05", "3600"))
    with Client("http://server", "key", transport=Answers(soon, OK)) as client:
        assert client.job("job-1")["id"] == "job-1"
    with Client("http://server", "key", transport=Answers(late)) as client, pytest.raises(ApiError) as caught:
        client.job("job-1")
    assert (caught.value.status, caught.value.retry_after) == (429, 3600.0)


def test_patience_is_used_up_before_it_ends(monkeypatch):
    """The pauses double from 0.2 s: 0.2, 0.4, 0.8, and then what is left of two seconds, as 1.6 would not fit."""
    now, slept = [0.0], []
    monkeypatch.setattr(client_module.time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))
        now[0] += seconds

    monkeypatch.setattr(client_module.time, "sleep", sleep)
    refused = [httpx.ConnectError("no") for _ in range(9)]
    client = Client("http://server", "key", patience=2.0, transport=Answers(*refused))
    with client, pytest.raises(Unreachable):
        client.job("job-1")
    assert sum(slept) == pytest.approx(2.0)
    assert slept == [0.2, 0.4, 0.8, 0.6]


def test_patience_with_a_stream_begins_when_it_breaks_not_with_the_last_event(quick, monkeypatch):
    """A job may be silent for longer than the client would wait for its server."""
    now = [0.0]
    monkeypatch.setattr(client_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(client_module.time, "sleep", lambda seconds: None)

    class Quiet(httpx.SyncByteStream):
        def __iter__(self):
            yield b'event: log\nid: 1\ndata: {"seq": 1}\n\n'
            now[0] += 3600.0
            raise httpx.ReadError("the server restarts")

    done = b'event: done\nid: 1-done\ndata: {"job": {"id": "job-1"}}\n\n'
    transport = Answers(
        httpx.Response(200, stream=Quiet()), httpx.ConnectError("no"), httpx.Response(200, content=done)
    )
    with Client("http://server", "key", transport=transport) as client:
        assert [event.name for event in client.follow("job-1")] == ["log", "done"]
