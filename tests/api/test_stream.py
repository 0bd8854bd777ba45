"""A job's events live: each once, in order, to however many listen, across restarts; as browsers and SDKs read it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from api import sse
from api.client import Client, Event
from core.services import Services
from tests.api import driving
from tests.api.conftest import DEADLINE_SECONDS, running, wait_for

LISTENERS = 200


def key_id(secret: str) -> str:
    return f"key-{secret.split('_')[1]}"


async def rest_of(frames: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in frames])


def by_the_standard(text: str) -> list[dict[str, str]]:
    """What an EventSource dispatches, by the algorithm of the HTML standard, 9.2.6, written down line by line."""
    dispatched, data, event, last_id = [], "", "", ""
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if not line:
            if data:
                dispatched.append({"data": data.removesuffix("\n"), "event": event or "message", "id": last_id})
            data, event = "", ""
            continue
        if line.startswith(":"):
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data += value + "\n"
        elif field == "event":
            event = value
        elif field == "id" and "\0" not in value:
            last_id = value
    return dispatched


def test_a_finished_job_is_told_from_the_beginning_and_ends_with_done(live, http, tmp_path):
    job = driving.finished(live.services, http, tmp_path)
    answer = http.get(f"/v1/jobs/{job}/stream")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    frames = by_the_standard(answer.text)
    events = http.get(f"/v1/jobs/{job}/events", params={"limit": 100}).json()["data"]
    assert [json.loads(frame["data"]) for frame in frames[:-1]] == events
    assert [frame["id"] for frame in frames[:-1]] == [str(event["seq"]) for event in events]
    assert {frame["event"] for frame in frames} == {"state", "metrics", "log", "done"}
    done = json.loads(frames[-1]["data"])
    assert done["type"] == "done"
    assert done["job"] == http.get(f"/v1/jobs/{job}").json()


@pytest.mark.parametrize("way", [{"headers": {"last-event-id": "5"}}, {"params": {"after": 5}}])
def test_a_listener_goes_on_where_it_was(live, http, tmp_path, way):
    job = driving.finished(live.services, http, tmp_path)
    frames = by_the_standard(http.get(f"/v1/jobs/{job}/stream", **way).text)
    assert frames[0]["id"] == "6"


def test_a_listener_that_has_everything_is_told_not_to_come_again(live, http, tmp_path):
    job = driving.finished(live.services, http, tmp_path)
    last = by_the_standard(http.get(f"/v1/jobs/{job}/stream").text)[-1]["id"]
    # 204 is what makes an EventSource stop connecting again (HTML standard, 9.2.3).
    assert http.get(f"/v1/jobs/{job}/stream", headers={"last-event-id": last}).status_code == 204


def test_a_listener_of_a_job_that_is_retried_hears_how_it_goes_on(live, http):
    job = driving.submit(http)["id"]
    driving.fail(live.services, job, driving.run(live.services, job))
    last = by_the_standard(http.get(f"/v1/jobs/{job}/stream").text)[-1]["id"]
    assert http.get(f"/v1/jobs/{job}/stream", headers={"last-event-id": last}).status_code == 204
    assert http.post(f"/v1/jobs/{job}/retry").json()["state"] == "queued"
    driving.succeed_from_start(live.services, job, driving.claim(live.services, job))
    frames = by_the_standard(http.get(f"/v1/jobs/{job}/stream", headers={"last-event-id": last}).text)
    assert json.loads(frames[0]["data"])["message"] == "retried"
    assert (frames[-1]["event"], json.loads(frames[-1]["data"])["state"]) == ("done", "succeeded")


@pytest.mark.parametrize("odd", ["", "-1", "9" * 30, "٣"])
def test_an_id_that_was_never_ours_starts_from_the_beginning(live, http, tmp_path, odd):
    job = driving.finished(live.services, http, tmp_path)
    headers = {"last-event-id": odd.encode()}
    assert by_the_standard(http.get(f"/v1/jobs/{job}/stream", headers=headers).text)[0]["id"] == "1"


def test_two_hundred_listeners_hear_each_event_once_while_it_happens_and_one_that_reads_nothing_stops_nobody(
    live, http, key
):
    job = driving.submit(http)["id"]
    fence = driving.claim(live.services, job)
    headers = {"authorization": f"Bearer {key}"}

    def train() -> None:
        driving.record(live.services, job, fence, driving.started(50))
        for number in range(1, 51):
            driving.record(live.services, job, fence, driving.step(number))
        driving.succeed(live.services, job, fence)

    async def scenario() -> list[list[str]]:
        everyone_is_there = asyncio.Barrier(LISTENERS + 1)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=live.url, headers=headers, timeout=DEADLINE_SECONDS, limits=limits) as to:

            async def listen() -> list[str]:
                ids = []
                async with to.stream("GET", f"/v1/jobs/{job}/stream") as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("id: "):
                            if not ids:
                                await everyone_is_there.wait()
                            ids.append(line.removeprefix("id: "))
                return ids

            listening = [asyncio.create_task(listen()) for _ in range(LISTENERS)]
            async with asyncio.timeout(3 * DEADLINE_SECONDS):
                await everyone_is_there.wait()
                await asyncio.to_thread(train)
                return await asyncio.gather(*listening)

    with socket.create_connection(httpx.URL(live.url).netloc.decode().split(":"), timeout=DEADLINE_SECONDS) as deaf:
        deaf.sendall(f"GET /v1/jobs/{job}/stream HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n".encode())
        heard = asyncio.run(scenario())
    # queued, starting, running, started, 50 steps, finished, succeeded
    expected = [*map(str, range(1, 57)), "56-done"]
    assert heard == [expected] * LISTENERS


def test_after_a_restart_of_the_api_nothing_is_missing_and_nothing_comes_twice(live, http, key):
    job = driving.submit(http)["id"]
    fence = driving.claim(live.services, job)
    driving.record(live.services, job, fence, driving.started(6))
    gate = Gate()
    heard: list[Event] = []
    client = Client("http://gate", key, transport=gate)
    following = threading.Thread(target=lambda: heard.extend(client.follow(job)))
    with Services(live.services.settings) as first, running(first) as gate.url:
        following.start()
        driving.record(live.services, job, fence, *(driving.step(number) for number in (1, 2, 3)))
        wait_for(lambda: len(heard) >= 5)
    # The first API is gone. What happens now, it can't tell.
    driving.record(live.services, job, fence, *(driving.step(number) for number in (4, 5, 6)))
    with Services(live.services.settings) as second, running(second) as gate.url:
        driving.succeed(live.services, job, fence)
        following.join(DEADLINE_SECONDS)
        assert not following.is_alive()
    assert [event.id for event in heard] == [*map(str, range(1, 13)), "12-done"]
    assert gate.connections >= 2
    client.close()


class Gate(httpx.BaseTransport):
    """Leads to the API that is up now."""

    def __init__(self) -> None:
        self.url = ""
        self.connections = 0
        self.inner = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        target = httpx.URL(self.url)
        request.url = request.url.copy_with(host=target.host, port=target.port)
        response = self.inner.handle_request(request)
        self.connections += 1
        return response

    def close(self) -> None:
        self.inner.close()


def test_the_unmodified_openai_client_reads_the_stream(live, http, key, monkeypatch):
    # Heartbeats between all frames, so that they would break the decoder if they could.
    monkeypatch.setattr(sse, "HEARTBEAT_SECONDS", 0.02)
    job = driving.submit(http)["id"]
    fence = driving.claim(live.services, job)
    heard = []
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=key) as client:
        stream = client.get(f"/jobs/{job}/stream", cast_to=object, stream=True, stream_cls=openai.Stream[object])
        for data in stream:
            heard.append(data)
            if len(heard) == 2:
                driving.record(live.services, job, fence, driving.started(1), driving.step(1))
            if data["type"] == "step":
                driving.fail(live.services, job, fence)
    assert [one["seq"] for one in heard] == [1, 2, 3, 4, 5, 6, 7, 7]
    assert heard[-1]["type"] == "done"
    assert heard[-1]["job"]["error"]["code"] == "out_of_memory"


def test_text_from_training_data_cannot_forge_a_frame(live, http):
    job = driving.submit(http)["id"]
    fence = driving.claim(live.services, job)
    forged = "a\n\nevent: done\ndata: {}\n\n\u2028data: x\r\r"
    driving.record(live.services, job, fence, driving.Log(level="warning", message=forged))
    driving.succeed_from_start(live.services, job, fence)
    answer = http.get(f"/v1/jobs/{job}/stream")
    assert answer.content.isascii()
    frames = by_the_standard(answer.text)
    assert [frame["event"] for frame in frames].count("done") == 1
    (warning,) = (frame for frame in frames if frame["event"] == "warning")
    assert json.loads(warning["data"])["message"] == forged


def test_one_reader_serves_all_listeners_of_a_job_and_leaves_with_the_last(live, http, key):
    job = driving.submit(http)["id"]
    looks = []

    class Counting(sse.Streams):
        def look(self, job_id, after):
            looks.append(after)
            return super().look(job_id, after)

    async def scenario() -> None:
        streams = Counting(live.services)
        listeners = [streams.listen(job, after=0, key_id=key_id(key)) for _ in range(LISTENERS)]
        for listener in listeners:
            assert await anext(listener) == sse.PING
            assert b"id: 1\n" in await anext(listener)
        assert list(streams.readers) == [job]
        assert streams.readers[job].listeners == LISTENERS
        for listener in listeners:
            await listener.aclose()
        assert streams.readers == {}
        await streams.ended()

    asyncio.run(scenario())
    assert len(looks) < LISTENERS


def test_a_listener_far_behind_is_brought_up_from_the_table(live, http, key, monkeypatch):
    monkeypatch.setattr(sse, "RECENT", 3)
    monkeypatch.setattr(sse, "PAGE", 4)
    job = driving.submit(http)["id"]
    fence = driving.claim(live.services, job)

    async def scenario() -> list[str]:
        streams = sse.Streams(live.services)
        slow = streams.listen(job, after=0, key_id=key_id(key))
        await anext(slow)
        first = await anext(slow)
        record = [driving.started(20), *(driving.step(number) for number in range(1, 21))]
        await asyncio.to_thread(driving.record, live.services, job, fence, *record)
        await asyncio.to_thread(driving.succeed, live.services, job, fence)
        # Others read on meanwhile, so the reader has long dropped what the slow one wants next.
        async for _ in streams.listen(job, after=0, key_id=key_id(key)):
            pass
        rest = [chunk async for chunk in slow]
        await streams.ended()
        return [frame["id"] for frame in by_the_standard((first + b"".join(rest)).decode())]

    heard = asyncio.run(asyncio.wait_for(scenario(), DEADLINE_SECONDS))
    assert heard == [*map(str, range(1, 27)), "26-done"]


def test_who_listens_to_a_job_that_is_deleted_is_sent_home(live, http, key, monkeypatch):
    """It ended and was deleted before the reader's look, which then finds nothing."""
    job, really_look = driving.submit(http)["id"], sse.Streams.look
    looks, is_deleted = threading.Event(), threading.Event()

    def look(*args):
        looks.set()
        assert is_deleted.wait(DEADLINE_SECONDS)
        return really_look(*args)

    monkeypatch.setattr(sse.Streams, "look", look)

    async def scenario() -> bytes:
        streams = sse.Streams(live.services)
        listening = streams.listen(job, after=0, key_id=key_id(key))
        await anext(listening)
        heard = asyncio.create_task(rest_of(listening))
        assert await asyncio.to_thread(looks.wait, DEADLINE_SECONDS)
        assert (await asyncio.to_thread(http.post, f"/v1/jobs/{job}/cancel")).status_code == 200
        assert (await asyncio.to_thread(http.delete, f"/v1/jobs/{job}")).json()["deleted"]
        is_deleted.set()
        try:
            return await heard
        finally:
            await streams.ended()

    heard = asyncio.run(asyncio.wait_for(scenario(), DEADLINE_SECONDS))
    assert "done" not in {frame["event"] for frame in by_the_standard(heard.decode())}
    assert http.get(f"/v1/jobs/{job}/stream").status_code == 404


def test_a_client_that_takes_nothing_is_let_go(monkeypatch):
    monkeypatch.setattr(sse, "SLOW_SECONDS", 0.05)

    async def scenario() -> list[str]:
        sent = []

        async def send(message):
            sent.append(message["type"])
            if message.get("body"):
                await asyncio.Event().wait()

        async def frames():
            yield sse.PING
            raise AssertionError("nothing is asked for after a client was let go")

        await sse.EventStream(frames()).stream_response(send)
        return sent

    assert asyncio.run(asyncio.wait_for(scenario(), DEADLINE_SECONDS)) == ["http.response.start", "http.response.body"]


def test_without_the_bell_events_come_a_little_later(live, http, monkeypatch):
    async def silence(self, job_id):
        return
        yield

    monkeypatch.setattr(type(live.services.bell), "listen", silence)
    job = driving.submit(http)["id"]
    with http.stream("GET", f"/v1/jobs/{job}/stream") as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line == "id: 1")
        http.post(f"/v1/jobs/{job}/cancel")
        assert next(line for line in lines if line.startswith("event: done"))
