"""Many at once on a real `trainshed serve`: submits at a steady rate, listeners, and running jobs; is anything lost?

`python -m benchmarks.load` sends 50 submits a second for a minute, with 200 listeners of 20 running tiny jobs. With
`--minutes 60` it goes on gently instead, and says whether memory, descriptors, threads and rows stay flat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from threading import Event, Thread
from time import monotonic, perf_counter, time
from typing import Any

import httpx

from benchmarks import growth
from benchmarks.growth import Sample
from benchmarks.train_speed import RESULTS, ROOT, machine
from benchmarks.wire import asked, connection, request

KEY = "the-key-of-the-load-and-of-nothing-else"
CONNECTIONS = 16
PATIENCE_SECONDS = 600.0
"""For what takes long when twenty trainers start on two cores."""
FOREVER = 100_000_000
SEQ_LEN, BATCH = 64, 16
SPEC: dict[str, Any] = {
    "kind": "pretrain",
    # A step of it takes a core for some hundredths of a second: twenty that share what others leave of two cores take
    # a few in a second, each.
    "model": {
        "architecture": "llama", "num_layers": 2, "hidden_size": 64, "num_heads": 2, "ffn_hidden_size": 128,
        "max_seq_len": SEQ_LEN,
    },
    "tokenizer": {"type": "bytes"},
    "parallel": {"data": 1},
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    submits: float = 50.0
    """A second."""
    seconds: float = 60.0
    readers: int = 200
    jobs: int = 20
    """That run, and are listened to."""
    starts_at_once: int | None = None
    """Ranks that the host starts at once; None: as it is by default."""
    gently: bool = False
    """Each submit is cancelled again, and jobs end and are followed by others, so that nothing piles up."""


@dataclass
class Found:
    """What came of it."""

    accepted: list[str] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    """Seconds from when a submit was due, be it sent late or not, to its answer."""
    start_seconds: float = 0.0
    """From the first submit of those that are listened to, until all of them train."""
    most_starting: int = 0
    """Jobs that were being started at one moment."""
    lost_jobs: int = 0
    lost_leases: int = 0
    """Attempts of those, beyond the first of each."""
    lost_events: int = 0
    steps: int = 0
    """That those took."""
    heard: int = 0
    """Events, over all listeners."""
    hearings: list[tuple[str, int, float]] = field(default_factory=list)
    """Of each live event that a listener heard: job, number, and when."""
    delays: list[float] = field(default_factory=list)
    """Seconds from when an event was written to when it was heard."""
    reconnects: int = 0
    unfinished: int = 0
    """Listeners that heard no end."""
    samples: list[Sample] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        lost = self.lost_jobs or self.lost_leases or self.lost_events or self.unfinished
        return not (lost or set(self.answers) - {"201"})


# The service


class Service:
    """A `trainshed serve` of its own."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.data_dir = folder / "shed"
        foreign = ("TRAINSHED_", "DATABASE_URL", "REDIS_URL", "STORAGE_URL")
        # Ten ranks a core, each nice by 10, would still take two thirds of what an API has a use for.
        settings = {
            "TRAINSHED_ADMIN_KEY": KEY, "TRAINSHED_SLOTS": str(plan.jobs), "TRAINSHED_REQUESTS_PER_MINUTE": "0",
            "TRAINSHED_NICE": "19", "TRAINSHED_LOG_LEVEL": "WARNING", "TRAINSHED_LEASE_SECONDS": "60",
            "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TRAINSHED_STARTS_AT_ONCE": str(plan.starts_at_once or ""),
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "api.cli", "serve", "--data-dir", str(self.data_dir), "--port", "0"],
            env={name: value for name, value in os.environ.items() if not name.startswith(foreign)} | settings,
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        said = ""
        while (match := re.search(r"at http://127\.0\.0\.1:(\d+) ", said)) is None:
            line = self.process.stdout.readline()
            if not line:
                raise RuntimeError(f"the service did not start: {said}")
            said += line
        self.port = int(match[1])
        # It goes on talking, and must not wait for a reader.
        self._hearing = Thread(target=self.process.stdout.read, daemon=True)
        self._hearing.start()

    def close(self) -> None:
        """After its end."""
        self._hearing.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def database(self) -> Path:
        return self.data_dir / "trainshed.db"

    def client(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {KEY}"}
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=120)

    def rows(self) -> dict[str, tuple[int, int]]:
        """Of each job, how many attempts it had and the last step."""
        return {id_: (attempt, step) for id_, attempt, step in self.asked("SELECT id, attempt, last_step FROM jobs")}

    def most_starting(self) -> int:
        """Jobs that were at one moment between being placed and training."""
        starting: set[str] = set()
        most = 0
        states = "SELECT job_id, data FROM job_events WHERE type = 'state' ORDER BY created_at, seq"
        for id_, data in self.asked(states):
            (starting.add if json.loads(data)["state"] == "starting" else starting.discard)(id_)
            most = max(most, len(starting))
        return most

    def delays(self, hearings: Iterable[tuple[str, int, float]]) -> list[float]:
        """From when each event was written, where that was before it was heard by a clock that both read."""
        written = {(id_, seq): at for id_, seq, at in self.asked("SELECT job_id, seq, created_at FROM job_events")}
        return [at - written[id_, seq] for id_, seq, at in hearings if (id_, seq) in written]

    def asked(self, query: str) -> list[Any]:
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=30)) as connection:
            return connection.execute(query).fetchall()


@contextmanager
def running(folder: Path, plan: Plan) -> Iterator[Service]:
    service = Service(folder, plan)
    try:
        yield service
    finally:
        # What was lost is known by now: the second waits for no run to be saved.
        for seconds in (1, 90):
            with suppress(ProcessLookupError):
                service.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                service.process.wait(seconds)
                break
        else:
            service.process.kill()
            service.process.wait()
        service.close()


# Clients


async def submit(service: Service, plan: Plan, body: bytes, found: Found) -> None:
    """Submits, each when it is due whatever becomes of the others, over a few connections."""
    due: asyncio.Queue[float | None] = asyncio.Queue()

    async def send() -> None:
        at: float | None = await due.get()
        while at is not None:
            async with connection(service.port) as (reader, writer):
                while at is not None:
                    status, said = await asked(reader, writer, request("POST", "/v1/jobs", body, key=KEY))
                    found.latencies.append(perf_counter() - at)
                    found.answers[status] += 1
                    if status == "201":
                        found.accepted.append(json.loads(said)["id"])
                        if plan.gently:
                            path = f"/v1/jobs/{found.accepted[-1]}/cancel"
                            await asked(reader, writer, request("POST", path, key=KEY))
                    at = await due.get()
                    if plan.gently:
                        # The server closes what rests for seconds.
                        break

    senders = [asyncio.create_task(send()) for _ in range(CONNECTIONS)]
    started = perf_counter()
    for number in range(round(plan.submits * plan.seconds)):
        at = started + number / plan.submits
        await asyncio.sleep(max(0.0, at - perf_counter()))
        due.put_nowait(at)
    for _ in senders:
        due.put_nowait(None)
    await asyncio.gather(*senders)


async def listen(service: Service, job_id: str, found: Found, *, until: float) -> None:
    """Hear a job to its end, and compare what was heard with what there was."""
    seqs: list[int] = []
    end: int | None = None
    # What was there before comes at once, and says nothing of delays.
    known = max((seq for (seq,) in service.asked(f"SELECT last_event FROM jobs WHERE id = '{job_id}'")), default=0)
    while end is None and monotonic() < until:
        async with connection(service.port) as (reader, writer):
            last = str(seqs[-1] if seqs else 0)
            path = f"/v1/jobs/{job_id}/stream"
            writer.write(request("GET", path, key=KEY, last_event_id=last, connection="close"))
            with suppress(asyncio.IncompleteReadError, ConnectionError, TimeoutError):
                await reader.readuntil(b"\r\n\r\n")
                while end is None:
                    line = await asyncio.wait_for(reader.readuntil(b"\n"), max(1.0, until - monotonic()))
                    if line.startswith(b"id: "):
                        number = line[4:].strip()
                        if number.endswith(b"-done"):
                            end = int(number.removesuffix(b"-done"))
                        else:
                            seqs.append(int(number))
                            if seqs[-1] > known:
                                found.hearings.append((job_id, seqs[-1], time()))
        if end is None:
            found.reconnects += 1
    found.heard += len(seqs)
    if end is None:
        found.unfinished += 1
    elif seqs != list(range(1, end + 1)):
        found.lost_events += abs(end - len(seqs)) or sum(a != b for a, b in enumerate(seqs, 1))


async def watch(service: Service, found: Found, *, every: float) -> None:
    while True:
        sample = await asyncio.to_thread(
            lambda: growth.processes(service.process.pid) | growth.tables(service.database)
        )
        found.samples.append(sample)
        await asyncio.sleep(every)


# The whole


def load(plan: Plan) -> Found:
    found = Found()
    with tempfile.TemporaryDirectory(prefix="load-") as folder, running(Path(folder), plan) as service:
        with service.client() as client:
            until_true(lambda: client.get("/readyz").status_code == 200)
            text = {"file": ("text.txt", b"to be or not to be, that is the question\n" * 50)}
            file = client.post("/v1/files", data={"purpose": "pretrain"}, files=text).raise_for_status().json()["id"]
            spec = SPEC | {"data": {"train": [file], "seq_len": SEQ_LEN}}
            if plan.gently:
                asyncio.run(gentle(service, plan, spec, found))
                ours: set[str] = set()
            else:
                ours = asyncio.run(hard(service, client, plan, spec, found))
        rows = service.rows()
        found.lost_jobs = len((set(found.accepted) | ours) - set(rows))
        found.lost_leases = sum(attempt - 1 for id_, (attempt, _) in rows.items() if id_ in ours)
        found.steps = sum(step for id_, (_, step) in rows.items() if id_ in ours)
        found.most_starting = service.most_starting()
        found.delays = service.delays(found.hearings)
        found.hearings.clear()
    return found


def training(steps: int) -> dict[str, Any]:
    return {"training": {"steps": steps, "global_batch": BATCH, "precision": "fp32", "checkpoint_every": FOREVER}}


async def hard(
    service: Service, client: httpx.Client, plan: Plan, spec: dict[str, Any], found: Found
) -> set[str]:  # fmt: skip
    def start() -> list[str]:
        ids = [
            client.post("/v1/jobs", json=spec | training(FOREVER)).raise_for_status().json()["id"]
            for _ in range(plan.jobs)
        ]
        until_true(lambda: all(client.get(f"/v1/jobs/{id_}").json()["state"] == "running" for id_ in ids))
        return ids

    began = monotonic()
    ids = await asyncio.to_thread(start)
    found.start_seconds = monotonic() - began
    until = monotonic() + plan.seconds + PATIENCE_SECONDS
    watching = asyncio.create_task(watch(service, found, every=1.0))
    listeners = [
        asyncio.create_task(listen(service, ids[number % len(ids)], found, until=until))
        for number in range(plan.readers)
    ]
    body = json.dumps(spec | training(1)).encode()
    await submit(service, plan, body, found)

    def end() -> None:
        for id_ in ids:
            client.post(f"/v1/jobs/{id_}/cancel").raise_for_status()

    await asyncio.to_thread(end)
    await asyncio.gather(*listeners)
    watching.cancel()
    return set(ids)


async def gentle(service: Service, plan: Plan, spec: dict[str, Any], found: Found) -> None:
    """Jobs one after another, each heard by its share of the listeners to its end, and submits that are taken back."""
    until = monotonic() + plan.seconds
    watching = asyncio.create_task(watch(service, found, every=max(1.0, plan.seconds / 360)))

    async def one_after_another() -> None:
        body = json.dumps(spec | {"priority": 100} | training(50)).encode()
        while monotonic() < until:
            async with connection(service.port) as (reader, writer):
                status, said = await asked(reader, writer, request("POST", "/v1/jobs", body, key=KEY))
            found.answers[status] += 1
            id_ = json.loads(said)["id"]
            found.accepted.append(id_)
            each = max(1, plan.readers // plan.jobs)
            limit = monotonic() + PATIENCE_SECONDS
            await asyncio.gather(*(listen(service, id_, found, until=limit) for _ in range(each)))

    body = json.dumps(spec | training(1)).encode()
    await asyncio.gather(submit(service, plan, body, found), *(one_after_another() for _ in range(plan.jobs)))
    watching.cancel()


def until_true(claim: Callable[[], bool]) -> None:
    deadline, pause = monotonic() + PATIENCE_SECONDS, Event()
    while not claim():
        if monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE_SECONDS:g} s")
        pause.wait(0.5)


def report(plan: Plan, found: Found) -> str:
    """In Markdown."""
    cuts, delays = hundredths(found.latencies), hundredths(found.delays)
    peak = max((sample.get("api MiB", 0.0) for sample in found.samples), default=0.0)
    runs = (
        f"- {plan.jobs} runs, training after {found.start_seconds:.0f} s ({found.most_starting} at most were started "
        f"at once), took {found.steps:,} steps; attempts of them that were lost: {found.lost_leases}"
    )
    lines = [
        f"- {len(found.latencies):,} submits at {plan.submits:g} a second: {dict(found.answers)}; "
        f"p50 {1e3 * cuts[49]:.0f} ms, p99 {1e3 * cuts[98]:.0f} ms, from when each was due",
        f"- accepted jobs without a row: {found.lost_jobs}",
        *([] if plan.gently else [runs]),
        f"- {plan.readers} listeners heard {found.heard:,} events; missing or twice: {found.lost_events}; "
        f"heard no end: {found.unfinished}; came back: {found.reconnects}; from written to heard "
        f"p50 {1e3 * delays[49]:.0f} ms, p99 {1e3 * delays[98]:.0f} ms",
        f"- memory of the API: {peak:.0f} MiB at most",
        f"- {'nothing was lost' if found.is_whole else '**something was lost, or refused**'}",
    ]
    # Of a queue that fills there is no use in asking whether it grows.
    return "\n".join(lines + (["", growth.table(growth.judged(found.samples))] if plan.gently else []))


def hundredths(values: list[float]) -> list[float]:
    return quantiles(values, n=100) if len(values) > 1 else [0.0] * 99


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--submits", type=float, help="a second; default 50, with --minutes 1")
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long")
    parser.add_argument("--readers", type=int, help="listeners; default 200, with --minutes 20")
    parser.add_argument("--jobs", type=int, help="that run at once; default 20, with --minutes 2")
    parser.add_argument("--minutes", type=float, help="a soak of so long; is everything flat?")
    parser.add_argument("--out", type=Path, default=RESULTS / "load.json", help="file to write")
    asked_ = parser.parse_args()
    gently = asked_.minutes is not None
    rate, readers, jobs = (1.0, 20, 2) if gently else (50.0, 200, 20)
    plan = Plan(
        submits=asked_.submits or rate, seconds=60 * asked_.minutes if gently else asked_.seconds,
        readers=asked_.readers or readers, jobs=asked_.jobs or jobs, gently=gently,
    )  # fmt: skip
    # So that the service does not outlive who ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    found = load(plan)
    print(report(plan, found))  # noqa: T201
    kept = {"accepted": len(found.accepted), "delays": hundredths(found.delays), "hearings": None}
    measured = vars(found) | kept | {"plan": asdict(plan), "machine": machine()}
    asked_.out.write_text(json.dumps(measured, indent=1) + "\n")
    grows = gently and not all(each.is_flat for each in growth.judged(found.samples))
    return 0 if found.is_whole and not grows else 1


if __name__ == "__main__":
    sys.exit(main())
