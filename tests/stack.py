"""The service as it runs, for tests that need all of it: broker, database, storage and each part, as real processes.

What a test breaks, it breaks from outside: by signals to these processes, or in the rows.
"""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from threading import Event
from time import monotonic
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import psutil
from sqlalchemy import select

from core import broker, files, jobs, keys, metrics, projects, schema
from core.keys import Account
from core.models import Job, JobEvent, Slot
from core.services import Services
from core.settings import Settings
from core.spec import JobSpec
from core.states import HELD, TERMINAL, JobState
from tests import make
from tests.faults.flaky import FlakyWay
from tests.servers import Server

T = TypeVar("T")

ADMIN_KEY = "the-key-of-all-the-tests"
LOOK_SECONDS = 0.05
PATIENCE_SECONDS = 200.0
"""For what takes a few seconds on an idle machine; tests may share theirs with much else."""
PARTS = {"node": "workers.node", "upkeep": "workers.upkeep", "api": "api.server"}
"""Name of a part and the module that it is."""
WITHOUT_API = ("node", "upkeep")

TEXT = "\n".join(f"the {word} fox jumps over {count} lazy dogs" for count in range(40) for word in ("quick", "brown"))

TINY: dict[str, Any] = {
    "architecture": "llama", "num_layers": 1, "hidden_size": 16, "num_heads": 2, "ffn_hidden_size": 32,
    "max_seq_len": 32,
}  # fmt: skip
"""A model so small that a step is over in milliseconds."""


class Stack:
    """Everything on one temporary data directory; at the end nothing of it is left."""

    def __init__(
        self,
        data_dir: Path,
        *,
        parts: Sequence[str] = WITHOUT_API,
        environ: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        """`environ` is what each part has in its environment besides."""
        quick: dict[str, Any] = {"lease_seconds": 3.0, "stop_grace_seconds": 20.0, "cancel_grace_seconds": 1.0}
        # Ranks that give way to whatever else tests do would keep their tests waiting.
        quick |= {"slots": 2, "calibrate": False, "nice": 0}
        self.settings = Settings(data_dir=data_dir, admin_key=ADMIN_KEY, node_name="host-a", **quick | settings)
        self.parts: dict[str, subprocess.Popen[bytes]] = {}
        self._names = parts
        self._environ = dict(environ or {})
        self._exit = ExitStack()
        self.postgresql: Server | None = None
        """The server of its database, for a drill that harms that."""
        self.way: FlakyWay | None = None
        """To its storage, for a drill that harms that."""
        self.looks: list[Callable[[], object]] = []
        """What is done, besides, at each look of whoever waits."""

    def __enter__(self) -> Self:
        self.settings.data_dir.mkdir(parents=True, exist_ok=True)
        # As `trainshed serve` does it: what listens outlives an API that dies.
        self.listening = self._exit.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._exit.enter_context(broker.running(self.settings))
        schema.upgrade(self.settings.database)
        self.services = self._exit.enter_context(Services(self.settings))
        with self.services.db.session() as session:
            keys.ensure_admin(session, ADMIN_KEY)
        with self.services.db.reading() as session:
            self.owner: Account = keys.authenticate(session, ADMIN_KEY)
        self._exit.callback(self.sweep)
        for name in self._names:
            self.start(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    # The parts

    def start(self, name: str) -> None:
        """Start a part as `trainshed serve` does."""
        fds = (self.listening.fileno(),) if name == "api" else ()
        with self.log_path(name).open("ab") as output:
            self.parts[name] = subprocess.Popen(
                [sys.executable, "-m", PARTS[name], *(word for fd in fds for word in ("--fd", str(fd)))],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=fds,
            )

    def stop(self, name: str, *, seconds: float = 40) -> int:
        """Ask a part to end, and wait for it; its exit code."""
        part = self.parts.pop(name)
        part.terminate()
        return part.wait(seconds)

    def fell(self, name: str) -> None:
        """Kill a part and start it again, as whoever keeps the service up would."""
        part = self.parts.pop(name)
        part.kill()
        part.wait()
        self.start(name)

    @property
    def kind(self) -> str:
        """Of its database."""
        return "sqlite" if self.settings.database_url is None else "postgresql"

    @property
    def url(self) -> str:
        """Of the API."""
        return f"http://127.0.0.1:{self.listening.getsockname()[1]}"

    def environment(self) -> dict[str, str]:
        """That of a service which was configured by its variables, one thread per rank."""
        foreign = ("TRAINSHED_", "DATABASE_URL", "REDIS_URL", "STORAGE_URL")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return inherited | self.settings.environment() | {"OMP_NUM_THREADS": "1"} | self._environ

    def sweep(self) -> None:
        """End every part and every process that works for a job of this stack."""
        # First what a node would wait for, as a test may have left it standing still.
        for process in (*self.supervisors(), *self.processes()):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for part in self.parts.values():
            part.terminate()
        for part in self.parts.values():
            with suppress(subprocess.TimeoutExpired):
                part.wait(20)
            part.kill()
            part.wait()

    def log_path(self, name: str) -> Path:
        return self.settings.data_dir / f"{name}.log"

    def logs(self) -> str:
        """What every part and supervisor said, for a test that failed."""
        paths = [*self.settings.data_dir.glob("*.log"), *self.settings.runs.glob("*/*.log")]
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-6000:]}" for path in sorted(paths))

    # Jobs

    def upload(self, content: str = TEXT, filename: str = "text.txt") -> str:
        """A training file; its id."""
        return files.create(
            self.services.db, self.services.storage, self.owner,
            filename=filename, purpose="pretrain", chunks=[content.encode()], max_bytes=2**20,
        ).id  # fmt: skip

    def submit(
        self, *, steps: int, checkpoint_every: int, ranks: int = 1, max_runtime: str | None = None, **training: Any
    ) -> str:
        """A tiny pretraining job; its id."""
        spec = self.spec(steps=steps, checkpoint_every=checkpoint_every, ranks=ranks, **training)
        if max_runtime is not None:
            spec["max_runtime"] = max_runtime
        return self.create(spec)

    def spec(self, *, steps: int, checkpoint_every: int, ranks: int = 1, **training: Any) -> dict[str, Any]:
        """What a tiny pretraining job asks for."""
        return {
            "kind": "pretrain",
            "model": TINY,
            "tokenizer": {"type": "bytes"},
            "data": {"train": [self.upload()], "seq_len": 32},
            "training": {
                "steps": steps, "checkpoint_every": checkpoint_every, "global_batch": 2, "micro_batch": 1,
                "precision": "fp32", **training,
            },
            "parallel": {"tensor": ranks},
        }  # fmt: skip

    def create(self, spec: Mapping[str, Any]) -> str:
        with self.services.db.session() as session:
            return make.submitted(session, self.owner, JobSpec.model_validate(spec), settings=self.settings).id

    def cancel(self, job_id: str) -> None:
        with self.services.db.session() as session:
            jobs.cancel(session, self.owner, job_id)

    def pause(self, job_id: str) -> None:
        with self.services.db.session() as session:
            jobs.pause(session, self.owner, job_id)

    def resume(self, job_id: str) -> None:
        with self.services.db.session() as session:
            jobs.resume(session, self.owner, job_id)

    def retry(self, job_id: str) -> None:
        with self.services.db.session() as session:
            jobs.retry(session, self.owner, job_id, settings=self.settings)

    def allow_preemption(self, whose: Literal["never", "own", "any"]) -> None:
        """Whose jobs of higher priority may stop those of our project."""
        with self.services.db.session() as session:
            projects.change(session, self.owner, self.owner.project_id, {"preemption": whose})

    def job(self, job_id: str) -> Job:
        with self.services.db.reading() as session:
            return session.scalars(select(Job).where(Job.id == job_id)).one()

    def steps(self, job_id: str) -> list[int]:
        """Every step that has a loss, in order."""
        with self.services.db.reading() as session:
            return [step for step, _ in metrics.series(session, job_id, names=["loss"], max_points=None)["loss"]]

    def step_events(self, job_id: str) -> list[int]:
        """The step of each `step` event, in order of `seq`."""
        with self.services.db.reading() as session:
            query = select(JobEvent.data).where(JobEvent.job_id == job_id, JobEvent.type == "step")
            return [data["step"] for data in session.scalars(query.order_by(JobEvent.seq))]

    def states(self, job_id: str) -> list[str]:
        """The states that the job went through."""
        with self.services.db.reading() as session:
            query = select(JobEvent.data).where(JobEvent.job_id == job_id, JobEvent.type == "state")
            return [data["state"] for data in session.scalars(query.order_by(JobEvent.seq))]

    def attempts(self, job_id: str) -> list[int]:
        """Which attempts wrote events, in order of `seq`; a number twice means that two wrote at once."""
        with self.services.db.reading() as session:
            query = select(JobEvent.attempt).where(JobEvent.job_id == job_id, JobEvent.type != "state")
            return [attempt for attempt, _ in groupby(session.scalars(query.order_by(JobEvent.seq)))]

    def held_slots(self, job_id: str) -> Sequence[Slot]:
        with self.services.db.reading() as session:
            return session.scalars(select(Slot).where(Slot.job_id == job_id)).all()

    # Waiting

    def until(self, claim: Callable[[], T], what: str, *, seconds: float = PATIENCE_SECONDS) -> T:
        """What `claim` returns once that is true; fails, naming `what`, when it takes too long."""
        deadline, pause = monotonic() + seconds, Event()
        while not (value := claim()):
            for look in self.looks:
                look()
            if monotonic() > deadline:
                error = AssertionError(f"{what}: not within {seconds:g} s")
                error.add_note(self.logs())
                raise error
            pause.wait(LOOK_SECONDS)
        return value

    def until_step(
        self, job_id: str, step: int, *, attempt: int | None = None, seconds: float = PATIENCE_SECONDS
    ) -> Job:
        """The job, once it has recorded `step`, in this attempt if one is named."""

        def reached() -> Job | None:
            job = self.job(job_id)
            assert job.state not in TERMINAL, f"{job.state}: {job.error}"
            fits = job.last_step >= step and job.state is JobState.RUNNING and attempt in {None, job.attempt}
            return job if fits else None

        return self.until(reached, f"step {step} of {job_id}", seconds=seconds)

    def until_state(self, job_id: str, *states: JobState, seconds: float = PATIENCE_SECONDS) -> Job:
        """The job, once it is in one of `states`."""

        def reached() -> Job | None:
            job = self.job(job_id)
            assert job.state in states or job.state not in TERMINAL, f"{job.state}: {job.error}"
            return job if job.state in states else None

        return self.until(reached, f"{job_id} {' or '.join(states)}", seconds=seconds)

    def until_end(self, job_id: str) -> Job:
        """The job, once it has ended, however it did."""

        def ended() -> Job | None:
            job = self.job(job_id)
            return job if job.state in TERMINAL else None

        return self.until(ended, f"the end of {job_id}")

    # Processes

    def supervisors(self, job_id: str | None = None) -> list[psutil.Process]:
        """Supervisors of this stack, or of one of its jobs."""
        return [
            process
            for process, command in _commands()
            if command[-2:-1] == ["workers.supervisor"]
            and (job_id or command[-1]) == command[-1]
            and (self.settings.runs / command[-1]).exists()
        ]

    def processes(self, job_id: str = "") -> list[psutil.Process]:
        """Processes of the engine that work in a run directory of this stack, or of one of its jobs."""
        folder = str(self.settings.runs / job_id)
        return [process for process, command in _commands() if any(folder in word for word in command)]

    def ranks(self, job_id: str) -> list[psutil.Process]:
        """The processes that train, without the one that launched them."""
        return [process for process in self.processes(job_id) if "launch" not in _command(process)]

    def brokers(self) -> list[psutil.Process]:
        """The Valkey of this stack."""
        socket = str(self.settings.broker_socket)
        return [process for process, command in _commands() if any(socket in word for word in command)]

    def workers(self) -> list[psutil.Process]:
        """The Celery worker of this stack and the children of its pool."""
        node = psutil.Process(self.parts["node"].pid)
        return [process for process in node.children(recursive=True) if "celery" in _command(process)]

    @contextmanager
    def writes_refused(self) -> Iterator[None]:
        """The database answers, and takes nothing: it is read-only, or somebody else writes all the time."""
        if self.postgresql is not None:
            self.postgresql.set_read_only(True)
            try:
                yield
            finally:
                self.postgresql.set_read_only(False)
            return
        with closing(sqlite3.connect(self.settings.data_dir / "trainshed.db", timeout=PATIENCE_SECONDS)) as writer:
            writer.execute("BEGIN IMMEDIATE")
            yield

    def freeze(self, process: psutil.Process) -> bool:
        """Stop a process where it holds no lock; False if it went on because it held one.

        On SQLite it would keep everybody from writing. That is not what a drill wants to see; the node's test does.
        """
        process.suspend()
        if self.settings.database_url is not None:
            return True
        with closing(sqlite3.connect(self.settings.data_dir / "trainshed.db", timeout=0.5)) as probe:
            try:
                probe.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                process.resume()
                return False
        return True

    # Claims that every drill ends with

    def assert_at_rest(self, job_id: str) -> None:
        """The job holds nothing and nobody works for it."""
        assert self.job(job_id).state not in HELD
        assert not self.processes(job_id), [process.cmdline() for process in self.processes(job_id)]
        assert not self.held_slots(job_id)
        self.until(lambda: not self.supervisors(job_id), "the supervisor's end", seconds=15)

    def assert_each_step_once(self, job_id: str, steps: int) -> None:
        """Metrics and events have every step of the job, dense and once."""
        for found in (self.steps(job_id), self.step_events(job_id)):
            assert sorted(set(found)) == found, "a step stands there twice, or before an earlier one"
            assert set(found) == set(range(1, steps + 1)), f"missing: {sorted({*range(1, steps + 1)} - {*found})}"


def lives(process: psutil.Process) -> bool:
    """Whether it still does something. A dead one stays in the table until its parent, which may stand still, looks."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def kill(processes: Sequence[psutil.Process], number: int = signal.SIGKILL) -> None:
    """Send a signal to each, as far as it is still there; there has to be one."""
    assert processes, "nobody to send a signal to"
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _commands() -> Iterator[tuple[psutil.Process, list[str]]]:
    for process in psutil.process_iter(["cmdline", "status"]):
        info: Mapping[str, Any] = process.info
        if info["status"] != psutil.STATUS_ZOMBIE and info["cmdline"]:
            yield process, info["cmdline"]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
