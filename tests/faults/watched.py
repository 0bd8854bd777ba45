"""What must hold of a job whatever is done around it, while it runs and at its end: one checker for all drills."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
from sqlalchemy import select

from core import artifacts, checkpoints, metrics
from core.models import Checkpoint, Job, JobEvent
from core.states import HELD, TERMINAL, JobState
from tests.stack import ADMIN_KEY, Stack

if TYPE_CHECKING:
    from tests.faults.drills import Drill

RESTING = frozenset({JobState.CANCELLED, JobState.PAUSED, JobState.SUCCEEDED, JobState.FAILED})
ON_ITS_WAY = frozenset({JobState.RUNNING, JobState.SUCCEEDED})
PAUSE_SECONDS = 2.0


class Watched:
    """One job of a stack. From its submit until the next is watched, whoever waits on the stack also looks at it."""

    def __init__(self, stack: Stack, *, steps: int, checkpoint_every: int, ranks: int = 2, **training: Any) -> None:
        self.stack, self.steps = stack, steps
        self.spec = stack.spec(steps=steps, checkpoint_every=checkpoint_every, ranks=ranks, **training)
        self.id = stack.create(self.spec)
        self.saved = 0
        """The step of the newest checkpoint that a drill has met."""
        self.beside: str | None = None
        """The same job that is left alone, where one was begun."""
        # Not those of a drill before, whatever became of it.
        stack.looks = [self.look]

    # While it runs

    def look(self) -> None:
        """Never two attempts at once; and whoever says that the job rests says so when nothing of it is left."""
        # Said first, then looked for: what is found was there after it was said.
        said = None
        with suppress(Exception):
            # A drill may have taken the database away.
            said = self.stack.job(self.id).state
        at_work = working_on(self.stack.settings.runs / self.id)
        assert len(at_work) <= 1, f"two attempts at once: {at_work}"
        if said in RESTING:
            assert not at_work, f"the job is said to be {said}, and these still work for it: {at_work}"

    # What is done to it

    def meet(self, drill: Drill) -> None:
        """Do it, right after a checkpoint, and see the job go on."""
        before = self.stack.until(self.newly_saved, f"a checkpoint to begin {drill.name} after")
        drill.do(self)
        fewest, most = drill.attempts
        step = before.last_step if fewest else self.stack.job(self.id).last_step

        def went_on() -> bool:
            job = self.stack.job(self.id)
            assert job.state not in TERMINAL - ON_ITS_WAY, f"after {drill.name} it is {job.state}: {job.error}"
            lost = job.attempt - before.attempt
            assert lost <= most, f"{drill.name} has cost {lost} attempts"
            # On a fast host it may be at its end by now; where more drills are to come, the next one says that.
            has_moved = job.last_step > step or job.state is JobState.SUCCEEDED
            return job.state in ON_ITS_WAY and lost >= fewest and has_moved

        self.stack.until(went_on, f"a step after {drill.name}")

    @contextmanager
    def slowly(self) -> Iterator[None]:
        """Let it take a few steps at a time, with pauses, as long as somebody waits on the stack.

        On a fast host it would else be over before what is done to it, as to let a lease run out, has shown itself.
        """
        stack = self.stack
        run_dir = stack.settings.runs / self.id / str(stack.job(self.id).attempt)
        pace = Pace(stack.ranks(self.id)[-1], run_dir / "events.jsonl")
        stack.looks.append(pace.look)
        try:
            yield
        finally:
            stack.looks.remove(pace.look)
            pace.end()

    def newly_saved(self) -> Job | None:
        """The job, once the attempt that runs has published a checkpoint that no drill has met."""
        newest, job = self.newest_checkpoint(), self.stack.job(self.id)
        assert job.state not in TERMINAL, f"it is {job.state} before it has met all drills: {job.error}"
        if newest is None or newest.attempt != job.attempt or newest.step <= self.saved:
            return None
        self.saved = newest.step
        return job

    def newest_checkpoint(self) -> Checkpoint | None:
        """Where the next attempt would start."""
        with self.stack.services.db.reading() as session:
            return checkpoints.latest(session, self.id)

    def lease_ends_in(self) -> float:
        """Seconds from now, by a clock that nobody sets."""
        return (self.stack.job(self.id).lease_expires_at or 0.0) - time.time()

    def says(self, words: str) -> bool:
        """Whether some event of it has these words."""
        with self.stack.services.db.reading() as session:
            told = select(JobEvent.seq).where(JobEvent.job_id == self.id, JobEvent.message.contains(words))
            return session.scalars(told).first() is not None

    # At its end

    def assert_whole(self) -> None:
        """The job has succeeded, and nobody can tell from it that anything was done."""
        job = self.stack.until_state(self.id, JobState.SUCCEEDED)
        self.stack.assert_each_step_once(self.id, self.steps)
        assert result(self.stack, self.id) == self.undisturbed()
        attempts = self.stack.attempts(self.id)
        assert all(one < another for one, another in pairwise(attempts)), f"attempts that wrote in turns: {attempts}"
        self.assert_at_rest(job)

    def let_another_be(self) -> None:
        """Run the same job with nothing done to it, beside this one, which harms it in nothing."""
        if self.asked not in _undisturbed and self.beside is None:
            self.beside = self.stack.create(self.spec)

    def undisturbed(self) -> Result:
        """What the same job leaves with nothing done to it, run once for all stacks."""
        if self.asked not in _undisturbed:
            self.let_another_be()
            assert self.beside is not None
            ended = self.stack.until_state(self.beside, JobState.SUCCEEDED)
            assert ended.attempt == 1, "what should have been left alone was not"
            _undisturbed[self.asked] = result(self.stack, self.beside)
        return _undisturbed[self.asked]

    @property
    def asked(self) -> str:
        """By which the same job is known."""
        return json.dumps({**self.spec, "data": None}, sort_keys=True)

    def assert_at_rest(self, job: Job) -> None:
        """No process works for it, it holds no slot, and the API says of it what the row says."""
        assert job.state not in HELD
        self.stack.assert_at_rest(self.id)
        assert answered(self.stack, f"/v1/jobs/{self.id}")["state"] == job.state
        assert answered(self.stack, "/readyz")


class Pace:
    """Stops a rank where its run has told something, for a while that is too short for a stall."""

    def __init__(self, rank: psutil.Process, told: Path) -> None:
        self._rank, self._told = rank, told
        self._size, self._since = 0, 0.0

    def look(self) -> None:
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            size = self._told.stat().st_size
            if self._since and time.monotonic() > self._since + PAUSE_SECONDS:
                self._size, self._since = size, 0.0
                self._rank.resume()
            elif not self._since and size > self._size:
                self._since = time.monotonic()
                self._rank.suspend()

    def end(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self._rank.resume()


def working_on(folder: Path) -> dict[str, list[int]]:
    """By attempt, the processes of the engine that are alive in its run directory."""
    found: dict[str, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError, ValueError):
            # What is dead, or has begun to die, has no words any more.
            words = path.read_bytes().decode(errors="replace").split("\0")
            for word in words:
                is_its = word.startswith(f"{folder}/") and word.endswith("/run.json")
                if is_its and not ends(int(path.parent.name)):
                    found.setdefault(Path(word).parent.name, []).append(int(path.parent.name))
    return found


def ends(pid: int) -> bool:
    """Whether it has a SIGKILL to die of and only not been given the time to."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return "State:\tZ" in status or any(
            int(line.split()[1], 16) & 1 << 8 for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))
        )
    except OSError:
        return True


@dataclass(frozen=True)
class Result:
    """What a job leaves that must not depend on what it met."""

    losses: list[tuple[int, float]]
    """Of each step."""
    weights: dict[str, str]
    """SHA-256 of each file."""


_undisturbed: dict[str, Result] = {}
"""By what was asked for."""


def result(stack: Stack, job_id: str) -> Result:
    with stack.services.db.reading() as session:
        losses = metrics.series(session, job_id, names=["loss"], max_points=None)["loss"]
        found = {file.path: file.sha256 for file in artifacts.of_job(session, job_id)}
    weights = {path: digest for path, digest in found.items() if path.endswith(".safetensors")}
    assert weights, f"no weights among {sorted(found)}"
    return Result(losses, weights)


def answered(stack: Stack, path: str) -> Any:
    """What the API says, once it answers."""

    def answer() -> httpx.Response | None:
        with suppress(httpx.TransportError):
            response = httpx.get(stack.url + path, headers={"Authorization": f"Bearer {ADMIN_KEY}"}, timeout=10)
            return response if response.status_code == 200 else None
        return None

    return stack.until(answer, f"an answer to {path}").json()
