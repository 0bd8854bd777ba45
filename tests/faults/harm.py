"""Ways to do harm to a running service, from outside: who is hit, and with what."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import cycle
from pathlib import Path
from threading import Event
from typing import Literal

import psutil
import pytest
import redis

from core import nodes
from core.preemption import MAKES_WAY
from core.states import JobState
from tests.faults.watched import Watched
from tests.stack import kill, lives

LEASES = 1.5
"""So many leases a rank stands still that is to be missed by nobody."""

Harm = Callable[[Watched], None]

TARGETS: dict[str, Callable[[Watched], Sequence[psutil.Process]]] = {
    "rank": lambda job: job.stack.ranks(job.id)[-1:],
    "launcher": lambda job: [each for each in job.stack.processes(job.id) if "launch" in each.cmdline()],
    "supervisor": lambda job: job.stack.supervisors(job.id),
    "worker": lambda job: job.stack.workers(),
    "valkey": lambda job: job.stack.brokers(),
}
"""Processes that a drill can name; the parts of a stack are others."""
PARTS = frozenset({"api", "upkeep", "node"})
GANG = frozenset({"rank", "launcher", "supervisor"})
"""None of these trains on without the others."""
PROMPT_SECONDS = 10.0
AGAIN_SECONDS = 0.05
LAST_STEPS = 25
"""So many that on a fast host the storage hangs before they are over."""
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
CLOCK = "clock"
"""File in the data directory of a stack whose clock can be set, that says by how many seconds."""


def killed(name: str) -> Harm:
    """Killed outright. A part, as a database, is started again, as by whatever keeps services up."""

    def harm(job: Watched) -> None:
        if name in PARTS:
            job.stack.fell(name)
        elif name == "postgresql":
            job.stack.postgresql.stop(signal.SIGKILL)
            job.stack.postgresql.start()
        else:
            victims = job.stack.until(lambda: TARGETS[name](job), f"a {name} to kill")
            gang = job.stack.processes(job.id)
            kill(victims)
            if name in GANG:
                # Not at the end of the lease: what they hold on to ends with the one that is gone.
                job.stack.until(lambda: not any(map(lives, gang)), "the others' end", seconds=PROMPT_SECONDS)

    return harm


def restarted_database(job: Watched) -> None:
    """Every connection ends in the middle of whatever it does."""
    job.stack.postgresql.stop(signal.SIGINT)
    job.stack.postgresql.start()


def read_only_database(job: Watched) -> None:
    """It answers, and takes nothing, until the ranks have ended for want of a renewal; then until the lease is over."""
    stack = job.stack
    with job.slowly(), stack.writes_refused():
        stack.until(lambda: not stack.processes(job.id), "the ranks' own end, without a lease")
        stack.until(lambda: job.lease_ends_in() < 0, "the end of the lease")


def forgetful_broker(job: Watched) -> None:
    """What was sent, and who listens, is forgotten."""
    with redis.Redis.from_url(job.stack.settings.redis) as client:
        client.flushall()


def repeated_messages(job: Watched) -> None:
    """Each message comes again, several times, and in no order."""
    for _ in range(5):
        job.stack.services.queue.start(job.id, job.stack.settings.node_name)
        job.stack.services.bell.ring(job.id)
        job.stack.services.queue.nudge()


def second_node(job: Watched) -> None:
    """Somebody starts another node of the same name, which ends again, and what the first was given goes on."""
    second = subprocess.Popen(
        [sys.executable, "-m", "workers.node"], env=job.stack.environment(), stderr=subprocess.DEVNULL
    )
    job.stack.until(lambda: second.poll() is not None, "the second node's end")
    assert second.returncode == 2
    with job.stack.services.db.reading() as session:
        assert [node.name for node in nodes.alive(session)] == [job.stack.settings.node_name]


def frozen_supervisor(job: Watched) -> None:
    """It stands still past its lease, and goes on as if nothing had been."""
    (frozen,) = job.stack.supervisors(job.id)
    gang = job.stack.processes(job.id)
    job.stack.until(lambda: job.stack.freeze(frozen), "a moment without a write")
    job.stack.until(lambda: not any(map(lives, gang)), "the ranks' own end", seconds=20)
    job.stack.until(lambda: job.stack.job(job.id).state is not JobState.RUNNING, "the loss")
    with suppress(psutil.NoSuchProcess):
        frozen.send_signal(signal.SIGCONT)
    job.stack.until(lambda: not lives(frozen), "the replaced supervisor's end", seconds=20)


def frozen_launcher(job: Watched) -> None:
    """It stands still and stays so: it hears no more of the lease, and its ranks train on."""
    (launcher,) = TARGETS["launcher"](job)
    launcher.suspend()


def killed_beside_a_frozen_launcher(job: Watched) -> None:
    """Nobody is left who would end the ranks, once somebody else has the job."""
    frozen_launcher(job)
    kill(job.stack.supervisors(job.id))


def thawed_rank(job: Watched) -> None:
    """It stands still for longer than a lease, which is not its own, and goes on."""
    (rank,) = TARGETS["rank"](job)
    rank.suspend()
    try:
        held = job.stack.job(job.id).lease_expires_at or 0
        until = held + LEASES * job.stack.settings.lease_seconds
        job.stack.until(lambda: (job.stack.job(job.id).lease_expires_at or 0) > until, "renewals of the lease")
    finally:
        rank.resume()


def hanging_rank(job: Watched) -> None:
    """It stands still and stays so: the others hang in what they do together."""
    TARGETS["rank"](job)[0].suspend()


def terminated_twice(name: str) -> Harm:
    """Told to end, and told again before it can have done so."""

    def harm(job: Watched) -> None:
        victims = [psutil.Process(job.stack.parts["node"].pid)] if name == "node" else TARGETS[name](job)
        kill(victims, signal.SIGTERM)
        Event().wait(AGAIN_SECONDS)
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.terminate()
        if name == "node":
            job.stack.parts.pop(name).wait(60)
            job.stack.start(name)

    return harm


def paused(job: Watched) -> None:
    """For a while, in which others may have its slots."""
    job.stack.pause(job.id)
    job.assert_at_rest(job.stack.until_state(job.id, JobState.PAUSED))
    job.stack.resume(job.id)


def drained_node(job: Watched) -> None:
    """Its host goes down in an orderly way, and comes back."""
    stack = job.stack
    assert stack.stop("node") == 0
    drained = stack.job(job.id)
    assert (drained.state, drained.losses) == (JobState.QUEUED, 0)
    # Without a host the service is not ready, and says so.
    stack.assert_at_rest(job.id)
    stack.start("node")


def preempted(job: Watched) -> None:
    """Its project lets a job of higher priority have its slots, which saves it and sends it back to the line."""
    stack = job.stack
    with larger_job(job) as larger:
        stack.until(lambda: job.says(MAKES_WAY), "word of why")
        stack.until(lambda: stack.held_slots(larger), "the larger job's slots")
        waits = stack.job(job.id)
        assert (waits.state, waits.losses) == (JobState.QUEUED, 0)
        job.assert_at_rest(waits)
        newest = job.newest_checkpoint()
        assert newest is not None
        assert newest.step == waits.last_step, "what it had done was saved"
        stack.until_state(larger, JobState.SUCCEEDED)


def killed_while_making_way(job: Watched) -> None:
    """The same, and its supervisor dies before that is done."""
    stack = job.stack
    with larger_job(job) as larger:
        stack.until(lambda: stack.job(job.id).makes_way, "the wish that it makes way")
        kill(stack.supervisors(job.id))
        stack.until(lambda: stack.held_slots(larger), "the larger job's slots")
        job.assert_at_rest(stack.job(job.id))
        stack.until_state(larger, JobState.SUCCEEDED)


@contextmanager
def larger_job(job: Watched) -> Iterator[str]:
    """A job that needs one slot more than are free beside this one, and comes before it; its id."""
    stack = job.stack
    free = stack.settings.slots - len(stack.held_slots(job.id))
    spec = stack.spec(steps=5, checkpoint_every=5, ranks=1)
    spec |= {"priority": 5, "parallel": {"data": free + 1}}
    spec["training"] |= {"global_batch": free + 1}
    stack.allow_preemption("own")
    try:
        yield stack.create(spec)
    finally:
        stack.allow_preemption("never")


def cancelled_while_deaf(job: Watched) -> None:
    """A rank hears nothing, and so not that it should end; the job is cancelled, and retried."""
    TARGETS["rank"](job)[0].suspend()
    job.stack.cancel(job.id)
    job.assert_at_rest(job.stack.until_state(job.id, JobState.CANCELLED))
    job.stack.retry(job.id)


def paused_while_deaf(job: Watched) -> None:
    """The same with a pause, for which it has longer to save."""
    TARGETS["rank"](job)[0].suspend()
    job.stack.pause(job.id)
    job.assert_at_rest(job.stack.until_state(job.id, JobState.PAUSED))
    job.stack.resume(job.id)


def starved_rank(job: Watched) -> None:
    """The kernel kills it for want of memory: the job says so, and what to change, and is retried."""
    (rank,) = TARGETS["rank"](job)
    group = MEMORY_GROUPS / f"drill-{rank.pid}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs leave to limit the memory of a process by a control group (version 1)")
    try:
        (group / "memory.limit_in_bytes").write_text("4096")
        (group / "cgroup.procs").write_text(str(rank.pid))
        failed = job.stack.until_end(job.id)
        job.stack.until(lambda: not (group / "cgroup.procs").read_text(), "the end of what was in the group")
    finally:
        group.rmdir()
    assert failed.state is JobState.FAILED
    assert failed.error is not None
    assert (failed.error["code"], failed.error["rank"]) == ("out_of_memory", 1)
    assert "Lower training.micro_batch" in failed.error["hint"]
    job.assert_at_rest(failed)
    job.stack.retry(job.id)


def power_cut(job: Watched) -> None:
    """Everything ends at once, and each file loses a part or all of it, but those that the disk was made to keep.

    A server of the database loses its processes; what it keeps on its disk is its own business.
    """
    stack = job.stack
    parts = {name: stack.parts.pop(name) for name in list(stack.parts)}
    for part in parts.values():
        part.kill()
    kill([*stack.supervisors(), *stack.processes()])
    for part in parts.values():
        part.wait()
    kept = stack.settings.data_dir / "storage"
    files = (path for path in sorted(stack.settings.data_dir.rglob("*")) if path.is_file())
    lost = (path for path in files if not path.is_relative_to(kept) and not path.name.startswith("trainshed.db"))
    for path, cut in zip(lost, cycle(CUTS), strict=False):
        cut(path)
    if stack.postgresql is not None:
        stack.postgresql.stop(signal.SIGKILL)
        stack.postgresql.start()
    # The last, as it is started again at once.
    kill(stack.brokers())
    for name in parts:
        stack.start(name)


def halved(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def a_byte_short(path: Path) -> None:
    os.truncate(path, max(0, path.stat().st_size - 1))


def ending_in_zeros(path: Path) -> None:
    """As a file system leaves it that had kept the length, and not yet what was there."""
    size = path.stat().st_size
    halved(path)
    os.truncate(path, size)


CUTS = (halved, emptied, a_byte_short, ending_in_zeros)
"""What a loss of power does to a file that the disk was not told to keep."""


def filled(place: str, until: Callable[[Watched], object], *, slowly: bool = False) -> Harm:
    """No byte more fits beneath `place` of the data directory, until what that does has shown itself.

    `slowly` for what takes so long that the job might be over.
    """

    def harm(job: Watched) -> None:
        filler = job.stack.settings.data_dir / place / "filler"
        fill(filler)
        try:
            with job.slowly() if slowly else nullcontext():
                job.stack.until(lambda: until(job), f"an effect of the full disk of {place or 'the database'}")
        finally:
            filler.unlink()

    return harm


def fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def set_clock(seconds: int) -> Harm:
    """That of all processes of the service but the ranks and the broker."""

    def harm(job: Watched) -> None:
        clock = job.stack.settings.data_dir / CLOCK
        clock.with_suffix(".new").write_text(f"{seconds:+d}")
        clock.with_suffix(".new").rename(clock)
        stack, lease = job.stack, job.stack.settings.lease_seconds
        # What reads leases by a server's clock must not care; what is in a file reads them by the host's.
        ahead = seconds if stack.postgresql is None else 0
        until = time.time() + ahead + 1.5 * lease

        def renewed() -> bool:
            """More than once since, and by the clock that leases are read by."""
            return (stack.job(job.id).lease_expires_at or 0) > until and abs(job.lease_ends_in() - ahead) < 2 * lease

        with job.slowly():
            stack.until(renewed, "renewals by that clock")

    return harm


def storage_is(mode: Literal["refuse", "hang"], times: int) -> Harm:
    """It refuses, or does not answer, so many times."""

    def harm(job: Watched) -> None:
        way = job.stack.way
        assert way is not None
        goal = way.harmed + times
        way.set(mode)
        try:
            job.stack.until(lambda: way.harmed >= goal, f"{times} requests that meet it")
        finally:
            way.set("pass")

    return harm


def killed_while_storing(job: Watched) -> None:
    """Its supervisor dies when all steps are done and the storage has not taken what they came to."""
    stack, way = job.stack, job.stack.way
    assert way is not None
    stack.until(lambda: stack.job(job.id).last_step >= job.steps - LAST_STEPS, "its last steps")
    way.set("hang")
    try:
        stack.until(lambda: stack.job(job.id).last_step == job.steps, "its last step")
        kill(stack.supervisors(job.id))
    finally:
        way.set("pass")
