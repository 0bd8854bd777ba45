"""Ways to do harm to a running service, from outside: who is hit, and with what."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil
import redis

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
    """It answers, and takes nothing, until the lease is over for want of a renewal."""
    expires_at = job.stack.job(job.id).lease_expires_at
    job.stack.postgresql.set_read_only(True)
    try:
        job.stack.until(lambda: not job.stack.processes(job.id), "the ranks' own end, without a lease", seconds=20)
    finally:
        job.stack.postgresql.set_read_only(False)
    assert expires_at is not None


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
