"""Creates and reads of jobs beside a bare FastAPI route, in turns: `python -m benchmarks.api_speed`.

Both run as one process, on a database of the same kind each, and are asked over as many connections by the same client.
Prints a table, and writes all it measured to a file with the machine beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import httpx
import psutil

from benchmarks import wire
from benchmarks.postgresql import postgresql
from benchmarks.train_speed import RESULTS, ROOT, machine
from core import broker, keys, schema
from core.db import Database
from core.settings import Settings

KEY = "the-key-of-the-benchmark"
PATH = "/v1/jobs"
CONNECTIONS = 8
REQUESTS = 200
"""Of one turn."""
PATIENCE_SECONDS = 60.0
SPEC = {
    "kind": "pretrain",
    "model": {
        "architecture": "llama", "num_layers": 2, "hidden_size": 64, "num_heads": 2, "ffn_hidden_size": 128,
        "max_seq_len": 128,
    },
    "tokenizer": {"type": "bytes"},
    "data": {"seq_len": 64},
    "training": {"steps": 10, "global_batch": 4},
}  # fmt: skip


@dataclass
class Side:
    """One of the two servers, and how long each of its requests took."""

    name: str
    port: int
    spec: dict[str, Any]
    key: str | None = None
    process: psutil.Process | None = None
    """The server's; None where nobody asks what it takes."""
    ids: list[str] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """By kind of request: of each turn."""
    cpu: dict[str, list[float]] = field(default_factory=dict)
    """By kind of request: CPU seconds of the server in each turn."""
    latencies: dict[str, list[float]] = field(default_factory=dict)
    """By kind of request: of each request, in seconds."""

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        return wire.request(method, path, body, key=self.key)

    def create(self, number: int) -> bytes:
        """A request for a job of its own: a create that says what another does waits for it, as it may be a retry."""
        return self.request("POST", PATH, json.dumps(self.spec | {"name": f"number-{number}"}).encode())

    def turn(self, kind: str, number: int) -> None:
        """Send this many requests, and note how long they took."""
        ids, made = self.ids[-number:], len(self.ids)
        requests = [
            self.create(made + index) if kind == "create" else self.request("GET", f"{PATH}/{ids[index % len(ids)]}")
            for index in range(number)
        ]
        began, started = self.cpu_seconds(), perf_counter()
        answers = asyncio.run(asyncio.wait_for(ask(self.port, requests), PATIENCE_SECONDS))
        self.seconds.setdefault(kind, []).append(perf_counter() - started)
        self.cpu.setdefault(kind, []).append(self.cpu_seconds() - began)
        self.latencies.setdefault(kind, []).extend(seconds for _, seconds in answers)
        if kind == "create":
            self.ids += [json.loads(body)["id"] for body, _ in answers]

    def get(self, path: str) -> bytes:
        """What it answers to one request."""
        [(body, _)] = asyncio.run(asyncio.wait_for(ask(self.port, [self.request("GET", path)]), PATIENCE_SECONDS))
        return body

    def cpu_seconds(self) -> float:
        """What the server has taken so far, all its threads."""
        if self.process is None:
            return 0.0
        times = self.process.cpu_times()
        return float(times.user + times.system)


async def ask(port: int, requests: list[bytes]) -> list[tuple[bytes, float]]:
    """Each answer's body and seconds, over `CONNECTIONS` connections that stay open."""
    waiting = iter(requests)
    answers: list[tuple[bytes, float]] = []

    async def one_after_another() -> None:
        async with wire.connection(port) as (reader, writer):
            for request in waiting:
                started = perf_counter()
                status, body = await wire.asked(reader, writer, request)
                answers.append((body, perf_counter() - started))
                if status not in {"200", "201"}:
                    raise RuntimeError(f"{status}: {body.decode()}")

    await asyncio.gather(*(one_after_another() for _ in range(CONNECTIONS)))
    return answers


@contextmanager
def process(*command: str, environment: dict[str, str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A server of its own, ended with the block."""
    with subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, env=environment, text=True, **options) as running:
        try:
            yield running
        finally:
            running.terminate()


def settings_of(folder: Path, url: str | None = None) -> Settings:
    """Those of the API; without a URL its database is SQLite in the folder."""
    # The limit of a key's rate is looked at for each request all the same.
    return Settings(data_dir=folder, admin_key=KEY, database_url=url, requests_per_minute=10**9, log_level="WARNING")


@contextmanager
def ours(settings: Settings) -> Iterator[Side]:
    """The API as it is served, without a worker."""
    settings.data_dir.mkdir()
    schema.upgrade(settings.database)
    database = Database(settings.database)
    with database.session() as session:
        keys.ensure_admin(session, KEY)
    database.close()
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    environment = dict(os.environ) | settings.environment()
    command = ("api.server", "--fd", str(listening.fileno()))
    with (
        broker.running(settings),
        process(*command, environment=environment, pass_fds=[listening.fileno()]) as running,
    ):
        listening.close()
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"authorization": f"Bearer {KEY}"})
        with client:
            text = {"file": ("text.txt", b"to be or not to be\n" * 200)}
            answer = client.post("/v1/files", data={"purpose": "pretrain"}, files=text, timeout=PATIENCE_SECONDS)
            answer.raise_for_status()
        spec = SPEC | {"data": {"train": [answer.json()["id"]], "seq_len": 64}}
        yield Side("trainshed", port, spec, KEY, psutil.Process(running.pid))


def resolved(us: Side, file: Path) -> Path:
    """Write down what we make of the body, for who is to keep as much."""
    [(answer, _)] = asyncio.run(asyncio.wait_for(ask(us.port, [us.create(0)]), PATIENCE_SECONDS))
    job = json.loads(answer)
    file.write_text(json.dumps({field: job[field] for field in ("run_config", "plan", "slots")}))
    return file


@contextmanager
def bare(database: str, spec: dict[str, Any], resolved: Path) -> Iterator[Side]:
    """The peer, which is told in a file what is worked out from the body."""
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    command = ("benchmarks.bare_route", database, str(resolved))
    with process(*command, environment=environment, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        port = json.loads(running.stdout.readline())["port"]
        yield Side("bare route", port, spec, process=psutil.Process(running.pid))


def measure(rounds: int, requests: int, *, databases: Callable[[str], str | None] = lambda name: None) -> list[Side]:
    """Both sides after `rounds` turns of creates and of reads each, the first of which is only a start.

    `databases` gives each side's URL by its name; None: SQLite in a folder that goes with the block.
    """
    with tempfile.TemporaryDirectory(prefix="api-speed-") as name:
        folder = Path(name)
        peers_database = databases("bare") or f"sqlite:///{folder / 'bare.db'}"
        settings = settings_of(folder / "shed", databases("ours"))
        with ours(settings) as us, bare(peers_database, us.spec, resolved(us, folder / "resolved.json")) as peer:
            for number in range(rounds + 1):
                for kind in ("create", "read"):
                    for side in (us, peer)[:: -1 if number % 2 else 1]:
                        side.turn(kind, requests)
    for side in (us, peer):
        side.seconds = {kind: turns[1:] for kind, turns in side.seconds.items()}
        side.cpu = {kind: turns[1:] for kind, turns in side.cpu.items()}
        side.latencies = {kind: each[requests:] for kind, each in side.latencies.items()}
    return [us, peer]


def table(us: Side, peer: Side, requests: int) -> str:
    """The results as Markdown."""
    lines = [
        "| request | requests/s | of the bare route's (quartiles) | p99, ms | the bare route's |",
        "|---|---|---|---|---|",
    ]
    for kind, turns in us.seconds.items():
        p99 = [1e3 * quantiles(side.latencies[kind], n=100)[98] for side in (us, peer)]
        lines.append(
            f"| {kind} | {requests / median(turns):.0f} | {ratio(turns, peer.seconds[kind])} "
            f"| {p99[0]:.0f} | {p99[1]:.0f} |"
        )
    return "\n".join(lines)


def cpu_table(us: Side, peer: Side, requests: int) -> str:
    """What the servers take of the processor, which tells more where others work on the same machine."""
    lines = [
        "| request | CPU of one, ms | the bare route's | its share of ours (quartiles) |",
        "|---|---|---|---|",
    ]
    for kind, turns in us.cpu.items():
        each = [1e3 * median(side.cpu[kind]) / requests for side in (us, peer)]
        lines.append(f"| {kind} | {each[0]:.2f} | {each[1]:.2f} | {ratio(turns, peer.cpu[kind])} |")
    return "\n".join(lines)


def ratio(turns: Sequence[float], peers: Sequence[float]) -> str:
    """What the peer took for each turn of ours, by the turn: the median, and the quartiles."""
    low, middle, high = quantiles([theirs / our for our, theirs in zip(turns, peers, strict=True)], n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="turns that each has after its first; at least 2")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of a turn")
    parser.add_argument("--out", type=Path, default=RESULTS / "api_speed.json", help="file to write")
    parser.add_argument("--postgresql", action="store_true", help="both on a PostgreSQL of its own, not on SQLite")
    asked = parser.parse_args()
    with postgresql() if asked.postgresql else nullcontext(lambda name: None) as databases:
        us, peer = measure(asked.rounds, asked.requests, databases=databases)
    print(table(us, peer, asked.requests), cpu_table(us, peer, asked.requests), sep="\n\n")  # noqa: T201
    kind = "PostgreSQL" if asked.postgresql else "SQLite"
    measured = {"machine": machine(), "database": kind, "connections": CONNECTIONS, "requests": asked.requests}
    sides = {side.name: {"seconds": side.seconds, "cpu": side.cpu} for side in (us, peer)}
    asked.out.write_text(json.dumps(measured | sides, indent=1) + "\n")


if __name__ == "__main__":
    main()
