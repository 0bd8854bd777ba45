"""The bundled Valkey, and what goes through it: messages, rings, samples. None of them may hold anyone up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from threading import Event, Thread
from time import monotonic

import anyio
import psutil
import pytest
import redis

from core import broker, sampling
from core.bell import Bell
from core.errors import Unavailable
from core.queue import CONTROL, Queue, node_queue
from core.sampling import Line, Patience, Sampler
from core.settings import Settings

DEADLINE_SECONDS = 30.0


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(data_dir=tmp_path_factory.mktemp("broker"))


@pytest.fixture(scope="module")
def server(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    with broker.running(settings) as process:
        yield process


@pytest.fixture
def client(settings: Settings, server: object) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(settings.redis) as client:
        yield client


@pytest.fixture
def silent() -> Iterator[str]:
    """URL of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}/0"


def eventually(claim: Callable[[], bool]) -> None:
    until = monotonic() + DEADLINE_SECONDS
    pause = Event()
    while not claim():
        assert monotonic() < until, "it did not come true in time"
        pause.wait(0.02)


# The server


def test_only_we_may_use_the_socket(settings: Settings, client: redis.Redis) -> None:
    assert client.ping()
    assert settings.broker_socket.stat().st_mode & 0o777 == 0o700
    assert settings.broker_socket.parent.stat().st_mode & 0o777 == 0o700
    assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    assert client.config_get("port") == {"port": "0"}


KEEPER = """
import sys
from core import broker
from core.settings import Settings
with broker.running(Settings(data_dir=sys.argv[1])) as process:
    print(process.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is gone")
def test_a_server_ends_with_a_keeper_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KEEPER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        server = psutil.Process(int(keeper.stdout.readline()))
        assert server.is_running()
        keeper.kill()
    eventually(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)


def test_a_killed_server_comes_back_with_its_data(settings: Settings, client: redis.Redis) -> None:
    client.set("kept", "yes")
    client.execute_command("WAITAOF", 1, 0, 5000)
    (pid,) = {client.info("server")["process_id"]}
    os.kill(pid, signal.SIGKILL)

    def is_back() -> bool:
        try:
            return bool(client.info("server")["process_id"] != pid and client.get("kept") == b"yes")
        except redis.RedisError:
            return False

    eventually(is_back)


def test_a_second_service_on_the_same_directory_is_refused(settings: Settings, server: object) -> None:
    with pytest.raises(Unavailable, match="Another"), broker.running(settings):
        pass


def test_a_long_path_gets_a_short_socket_and_damaged_data_is_put_aside(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / ("x" * 100))
    assert len(os.fsencode(settings.broker_socket)) <= 100
    with broker.running(settings) as process:
        with redis.Redis.from_url(settings.redis) as client:
            client.rpush("list", *range(100))
            client.execute_command("WAITAOF", 1, 0, 5000)
        process_id = process.pid
    assert process.returncode is not None
    assert not Path(f"/proc/{process_id}").exists()
    folder = tmp_path / ("x" * 100) / "broker" / "appendonlydir"
    for path in folder.glob("*.incr.aof"):
        path.write_bytes(b"nonsense" * 100)
    with broker.running(settings), redis.Redis.from_url(settings.redis) as client:
        assert client.llen("list") == 0
    assert folder.with_name("appendonlydir.damaged").is_dir()
    settings.broker_socket.parent.rmdir()


def test_a_server_that_dies_on_damaged_data_comes_back_without(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    with broker.running(settings) as process, redis.Redis.from_url(settings.redis) as client:
        client.rpush("list", *range(100))
        client.execute_command("WAITAOF", 1, 0, 5000)
        for path in (tmp_path / "broker" / "appendonlydir").glob("*.incr.aof"):
            path.write_bytes(b"nonsense" * 100)
        process.kill()

        def is_back() -> bool:
            try:
                said = client.info("all")
                # It tells of itself before it has read what it kept.
                return said["process_id"] != process.pid and not said["loading"]
            except redis.RedisError:
                return False

        eventually(is_back)
        assert client.llen("list") == 0


def test_one_that_a_killed_service_left_behind_is_replaced(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    script = (
        "import os, sys; from core import broker; from core.settings import Settings\n"
        "with broker.running(Settings()) as process: print(process.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    environment = {"PATH": os.defpath, "TRAINSHED_DATA_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    died = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=False, timeout=60)
    orphan = int(died.stdout)
    with redis.Redis.from_url(settings.redis) as client:
        assert client.info("server")["process_id"] == orphan
    with broker.running(settings) as process, redis.Redis.from_url(settings.redis) as client:
        assert client.info("server")["process_id"] == process.pid != orphan


# Messages


def test_a_message_names_a_task_and_carries_a_job_id(settings: Settings, client: redis.Redis) -> None:
    queue = Queue(settings)
    queue.start("job-1", "node-1")
    queue.nudge()
    message = json.loads(client.lpop(node_queue("node-1")))  # type: ignore[arg-type]
    assert message["headers"]["task"] == "workers.tasks.run_job"
    assert message["headers"]["argsrepr"] == "['job-1']"
    assert json.loads(client.lpop(CONTROL))["headers"]["task"] == "workers.tasks.tick"  # type: ignore[arg-type]
    queue.close()


@pytest.mark.parametrize("down", ["refused", "silent"])
def test_no_hint_raises_when_the_broker_is_down(
    down: str, silent: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(data_dir=tmp_path, redis_url=silent if down == "silent" else "redis://127.0.0.1:1/0")
    queue, bell = Queue(settings), Bell(settings.redis)
    queue.nudge()
    queue.start("job-1", "node-1")
    bell.ring("job-1")
    said = "".join(capfd.readouterr())
    assert said.count("message not sent") == 2
    assert said.count("bell not rung") == 1
    queue.close()
    bell.close()


# Rings


def test_a_ring_is_heard_by_those_who_listen_to_that_job(settings: Settings, server: object) -> None:
    bell = Bell(settings.redis)
    heard: list[str] = []

    async def listen() -> None:
        rings = bell.listen("job-1")
        async for _ in rings:
            heard.append("job-1")
            if len(heard) == 1:
                bell.ring("job-2")
                bell.ring("job-1")
            else:
                break
        await rings.aclose()  # type: ignore[attr-defined]

    async def main() -> None:
        with anyio.fail_after(DEADLINE_SECONDS):
            await listen()

    anyio.run(main)
    assert heard == ["job-1"] * 2
    bell.close()


def test_a_thread_hears_rings_until_it_is_told_to_end(settings: Settings, server: object) -> None:
    bell, end, heard = Bell(settings.redis), Event(), Event()

    def listen() -> None:
        # The first is for having begun to listen; what comes after it was rung.
        for count, _ in enumerate(bell.rings("job-1", until=end)):
            if count:
                heard.set()

    thread = Thread(target=listen)
    thread.start()

    def is_heard() -> bool:
        bell.ring("job-1")
        return heard.is_set()

    eventually(is_heard)
    end.set()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    bell.close()


# Samples


def ask(url: str, patience: Patience | None = None) -> list[Line]:
    """The lines of the answer to a request."""

    async def lines() -> list[Line]:
        async with aclosing(Sampler(url).ask({"prompt": "hello"}, patience)) as coming:
            return [line async for line in coming]

    return asyncio.run(lines())


def test_a_sampler_answers_the_one_who_asked_line_by_line(settings: Settings, client: redis.Redis) -> None:
    client.set(sampling.ALIVE, b"1", ex=sampling.ALIVE_SECONDS)
    said = [{"choices": ["hello"]}, {"choices": ["!"], "usage": {}}]

    def answer() -> None:
        _, raw = client.brpop([sampling.REQUESTS], timeout=DEADLINE_SECONDS)  # type: ignore[misc]
        request = json.loads(raw)
        for line in ({"taken": "somebody"}, *said):
            client.rpush(sampling.answers(request["id"]), json.dumps(line))

    thread = Thread(target=answer)
    thread.start()
    assert ask(settings.redis) == said
    thread.join(DEADLINE_SECONDS)
    client.delete(sampling.ALIVE)
    assert client.keys("trainshed:sample:*") == []


def test_without_a_sampler_the_asker_is_told_at_once(settings: Settings, client: redis.Redis) -> None:
    assert not Sampler(settings.redis).is_alive()
    with pytest.raises(Unavailable, match="No sampler is online"):
        ask(settings.redis)


def test_a_sampler_that_does_not_begin_leaves_nothing_in_the_list(settings: Settings, client: redis.Redis) -> None:
    client.set(sampling.ALIVE, b"1", ex=sampling.ALIVE_SECONDS)
    with pytest.raises(Unavailable, match="No sampler began"):
        ask(settings.redis, Patience(begin=0.1))
    assert client.llen(sampling.REQUESTS) == 0
    assert client.keys("trainshed:sample:*") == []
    client.delete(sampling.ALIVE)


def test_where_too_many_wait_the_next_is_told(
    settings: Settings, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "MOST_WAITING", 1)
    client.set(sampling.ALIVE, b"1", ex=sampling.ALIVE_SECONDS)
    client.lpush(sampling.REQUESTS, b"{}")
    with pytest.raises(Unavailable, match="try again later"):
        ask(settings.redis)
    client.delete(sampling.ALIVE, sampling.REQUESTS)


def test_without_a_broker_there_is_no_sample() -> None:
    with pytest.raises(Unavailable, match="broker"):
        ask("redis://127.0.0.1:1/0")
    assert not Sampler("redis://127.0.0.1:1/0").is_alive()
