"""Save while training goes on: each rank copies what it keeps, a thread writes it, and rank 0 gives it its name.

A thread talks to no other rank. How far its part is, a rank says in the exchange before each step (`stage`), so that
all learn of a failure, or that the checkpoint is published, before the same step. One save at a time is under way; its
copy is on the host until it is published.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self

from engine import checkpoint
from engine.checkpoint import Facts, Snapshot
from engine.failure import LostContact, RunFailure
from engine.optimizer import AnyOptimizer
from engine.together import together

LEAST_SECONDS = 600.0
"""Patience with a thread, however little it has to write."""
SLOWEST_DISK = 2**20
"""Bytes a second; a disk that is slower has hung."""
LEAVE_SECONDS = 10.0
"""Patience with a thread when the run has failed already."""
LOOK_SECONDS = 1.0
"""How often a rank that waits for its publisher says that it goes on."""


class Stage(IntEnum):
    """How far a rank is with its part of the save under way."""

    WRITING = 0
    """Or nothing is under way."""
    WRITTEN = 1
    PUBLISHED = 2
    """Rank 0 alone is ever here."""
    FAILED = 3


@dataclass(frozen=True)
class Saved:
    """A published checkpoint."""

    facts: Facts
    path: Path
    seconds: float
    """From its step's end until it had its name, and older ones were gone."""
    blocked_seconds: float
    """Of them, those that training stood still."""


@dataclass
class Saving:
    """A save under way, on one rank."""

    snapshot: Snapshot
    path: Path
    """What it will be called."""
    begun: float
    blocked: float
    """Seconds that training stood still for it."""
    writing: Future[None]
    publishing: Future[None] | None = None
    """On rank 0, once every rank has written."""
    published: float | None = None
    """When rank 0 was done, on the clock of `begun`."""

    @property
    def stage(self) -> Stage:
        for work, stage in ((self.publishing, Stage.PUBLISHED), (self.writing, Stage.WRITTEN)):
            if work is not None and work.done():
                return Stage.FAILED if work.exception() else stage
        return Stage.WRITING


class Saver:
    """Saves a run's checkpoints, on one rank. Each rank calls the same methods before and after the same steps.

    `beside` adds files to a checkpoint, given its folder, in a thread of rank 0. `saved` hears of each that is
    published, on every rank. Leaving the block after an error, nothing unfinished is left.
    """

    def __init__(
        self,
        folder: Path,
        optimizer: AnyOptimizer,
        *,
        keep: int,
        keep_best: bool = False,
        beside: Callable[[Path], None] = lambda path: None,
        saved: Callable[[Saved], None] = lambda saved: None,
    ) -> None:
        self.folder, self.optimizer, self.mesh = folder, optimizer, optimizer.mesh
        self.keep, self.keep_best, self.beside, self.saved = keep, keep_best, beside, saved
        self.under_way: Saving | None = None

    def begin(self, facts: Facts) -> None:
        """Save the state as it is now, after the save before it. Raises on every rank when one fails."""
        self.wait()
        begun = time.perf_counter()
        path = checkpoint.folder_of(self.folder, facts.step)
        unfinished = checkpoint.unfinished(path)
        try:
            with together(self.mesh):
                if self.mesh.world_rank == 0:
                    checkpoint.make_room(self.folder)
                    unfinished.mkdir()
                snapshot = checkpoint.take(self.optimizer, facts)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        went_on = self.mesh.stopwatch.whereabouts.go_on

        def write() -> None:
            with kept(unfinished):
                checkpoint.write(unfinished, snapshot, wrote=went_on)

        writing = in_thread(write, "checkpoint-writer")
        self.under_way = Saving(snapshot, path, begun, time.perf_counter() - begun, writing)

    @property
    def step(self) -> int | None:
        """Of the save under way; None where there is none."""
        return None if self.under_way is None else self.under_way.snapshot.facts.step

    @property
    def stage(self) -> Stage:
        """How far this rank is, for all to know."""
        return Stage.WRITING if self.under_way is None else self.under_way.stage

    def advance(self, stages: Sequence[Stage]) -> None:
        """Do what follows from how far the ranks were, in their order; raise on every rank where one has failed."""
        saving = self.under_way
        if saving is None:
            return
        if Stage.FAILED in stages:
            # This rank's own error, where it has one, says why.
            for work in (saving.writing, saving.publishing):
                if work is not None and work.done():
                    work.result()
            raise LostContact(f"rank {list(stages).index(Stage.FAILED)} could not save")
        if stages[0] is Stage.PUBLISHED:
            self._conclude(saving)
        elif Stage.WRITING not in stages:
            self._publish(saving)

    def wait(self) -> None:
        """Return once the save under way is published. Raises on every rank when one fails, or hangs."""
        if (saving := self.under_way) is None:
            return
        begun = time.perf_counter()
        with together(self.mesh):
            result(saving.writing, saving.snapshot.bytes)
        self._publish(saving)
        with together(self.mesh):
            if saving.publishing is not None:
                # A sync, or removing what is old, is one long call: patience with the thread is all there is.
                result(saving.publishing, went_on=self.mesh.stopwatch.whereabouts.go_on)
        saving.blocked += time.perf_counter() - begun
        self._conclude(saving)

    def _publish(self, saving: Saving) -> None:
        if self.mesh.world_rank > 0 or saving.publishing is not None:
            return

        def publish() -> None:
            unfinished = checkpoint.unfinished(saving.path)
            with kept(unfinished):
                # Were it made anew beneath what stands beside, a checkpoint of nothing would be published.
                unfinished.stat()
                self.beside(unfinished)
                checkpoint.finish(unfinished, saving.snapshot.about)
                checkpoint.publish(saving.path)
            best = saving.snapshot.facts.course.best_step if self.keep_best else None
            checkpoint.prune(self.folder, keep=self.keep, spare=best)
            saving.published = time.perf_counter()

        saving.publishing = in_thread(publish, "checkpoint-publisher")

    def _conclude(self, saving: Saving) -> None:
        self.under_way = None
        seconds = (saving.published or time.perf_counter()) - saving.begun
        self.saved(Saved(saving.snapshot.facts, saving.path, seconds, min(seconds, saving.blocked)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (saving := self.under_way) is None:
            return
        # Only rank 0 removes, and only when it does not publish: what is published must lack nobody's part.
        work = saving.publishing or saving.writing
        with suppress(Exception):
            work.result(LEAVE_SECONDS)
        if self.mesh.world_rank > 0:
            return
        if saving.stage is Stage.PUBLISHED:
            self._conclude(saving)
        elif saving.publishing is None or work.done():
            # A full disk must have room to say so.
            shutil.rmtree(checkpoint.unfinished(saving.path), ignore_errors=True)


def in_thread(work: Callable[[], None], name: str) -> Future[None]:
    """Do `work` in a thread that does not outlive the process; what became of it."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # the thread's edge: whoever waits raises it
            done.set_exception(error)
        else:
            done.set_result(None)

    Thread(target=run, name=name, daemon=True).start()
    return done


@contextmanager
def kept(folder: Path) -> Iterator[None]:
    """Say in words where `folder` was taken away while this block worked in it."""
    try:
        yield
    except FileNotFoundError as error:
        if folder.exists():
            raise
        raise RunFailure(
            "internal",
            f"the checkpoint under way is gone: something removed {folder.parent.name}/{folder.name} as it was written",
            "Leave the run's folder alone while it trains, then retry from the last checkpoint that is still there.",
        ) from error


def result(work: Future[None], bytes: int = 0, *, went_on: Callable[[], object] | None = None) -> None:
    """Wait for `work`, which writes so many bytes; raise its error, or that it hangs. Meanwhile `went_on` is called."""
    seconds = LEAST_SECONDS + bytes / SLOWEST_DISK
    until = time.monotonic() + seconds
    while not work.done() and (left := until - time.monotonic()) > 0:
        wait([work], left if went_on is None else min(left, LOOK_SECONDS))
        if went_on is not None:
            went_on()
    if work.done():
        work.result()
        return
    raise RunFailure(
        "stalled",
        f"a checkpoint's files were not written within {seconds:.0f} seconds",
        "Look at the disk and the file system under the run directory.",
    )
