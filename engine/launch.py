"""Start the ranks of one run on this host, and answer for them: no rank outlives another, the launcher, or its lease.

Never imports torch, so that it is up in no time and stays small. What a rank does is `engine.trainer`'s business.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from engine import failure, stacks, whereabouts
from engine.config import RunConfig
from engine.emit import Emitter, last_event
from engine.events import NO_ROOM, CheckpointSaved, Failed, Finished, Stopped, adapter
from engine.stall import Found, Stillness, verdict
from engine.standing import MOST_QUEUES, NICE, QUEUES, RENDEZVOUS
from engine.whereabouts import Place

log = logging.getLogger(__name__)

TRAIN = (sys.executable, "-m", "engine", "train")
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
LEAVE_SECONDS = 1.0
"""How long the other ranks may take to end after one ended well, when the last event is there."""
SPEAK_SECONDS = 2.0
"""The same, when the last event is still to come; and how long ranks may take to stop before the first step."""
EVENTS = "events.jsonl"
PR_SET_PDEATHSIG = 1
ENVIRONMENT = {
    # Page faults took 20-40 % of the time of small models on a CPU: freed memory stays with the process.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
    # A thread that waits for another rank must not hold the core which that rank needs.
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONUNBUFFERED": "1",
    QUEUES: str(MOST_QUEUES),
}
"""What each rank starts with, unless the launcher's own environment says otherwise."""


@dataclass(frozen=True)
class Rank:
    """One process of the run."""

    number: int
    process: subprocess.Popen[bytes]

    @property
    def ended_badly(self) -> bool:
        return self.process.poll() not in (None, 0)


def launch(
    run_file: Path,
    *,
    ranks: int,
    threads: int | None = None,
    heartbeat_timeout: float | None = None,
    nice: int = 0,
    command: Sequence[str] = TRAIN,
) -> int:
    """Run `command RUN_FILE` on every rank until all are gone; 0 when the run finished or stopped, else 1.

    With `heartbeat_timeout` (seconds), each byte on stdin renews the lease; its end, or a longer silence, kills the
    whole process group. Once they train, ranks give way to others on this host by so much as they are to be `nice`.
    """
    run_dir = run_file.absolute().parent
    clear(run_dir)
    with ExitStack() as stack:
        watch = stack.enter_context(Watch(heartbeat_timeout, lambda why: farewell(run_dir, why)))
        rendezvous = run_dir / f".rendezvous-{os.getpid()}-{time.time_ns()}"
        stack.callback(rendezvous.unlink, missing_ok=True)
        kills_before = kernel_memory_kills()
        said = functools.partial(environment_of, ranks=ranks, threads=threads, rendezvous=rendezvous, nice=nice)
        crew = start(run_file.absolute(), [said(number) for number in range(ranks)], command)
        stack.callback(kill, crew)
        watch.look_after(crew)
        fallen = watch_over(crew, watch, run_dir, stillness_of(run_file))
        kill(crew)
    if isinstance(fallen, Failed):
        return conclude(run_dir, fallen)
    if watch.stopping and fallen is None:
        return conclude(run_dir, Stopped(step=safe_step(run_file)))
    memory_kill = kernel_memory_kills() > kills_before
    return conclude(run_dir, reason(run_dir, ranks, fallen, memory_kill=memory_kill))


def watch_over(crew: Sequence[Rank], watch: Watch, run_dir: Path, stillness: Stillness | None) -> Rank | Failed | None:
    """Wait until the run is over; the rank that ended it by falling, why it has stalled, or None.

    Ranks may be left, for nothing good.
    """
    events = run_dir / EVENTS
    while any(rank.process.poll() is None for rank in crew):
        if (fallen := next((rank for rank in crew if rank.ended_badly), None)) is not None:
            return fallen
        over = any(rank.process.poll() == 0 for rank in crew)
        if over and last_event(events) is not None:
            watch.leave_within(LEAVE_SECONDS)
        elif over or (watch.stopping and not has_started(events)):
            # A rank inside a library, or waiting for one that is gone, does not hear that it is told to stop.
            watch.leave_within(SPEAK_SECONDS)
        if not watch.wait(None if stillness is None else stillness.interval):
            return None
        places = [whereabouts.read(whereabouts.path_of(run_dir, rank.number)) for rank in crew]
        if stillness is not None and stillness.is_too_long(places, time.monotonic()):
            return verdict(questioned(crew, places, watch, run_dir), seconds=stillness.seconds)
    return next((rank for rank in crew if rank.ended_badly), None)


def questioned(crew: Sequence[Rank], places: Sequence[Place | None], watch: Watch, run_dir: Path) -> list[Found]:
    """What there is to know of each rank; those that answer write their stacks into their logs."""
    # One that has not said where it is does not listen yet, and the question would end it.
    pids = [
        rank.process.pid if place is not None and rank.process.poll() is None else None
        for rank, place in zip(crew, places, strict=True)
    ]
    answers = stacks.ask(pids, [log_of(run_dir, rank) for rank in crew], watch.wait)
    states = [stacks.state_of(rank.process.pid) for rank in crew]
    return [Found(*facts) for facts in zip(places, answers, states, strict=True)]


def stillness_of(run_file: Path) -> Stillness | None:
    """For how long the run may be still; None where it may for ever, or where the ranks will say what is wrong."""
    try:
        seconds = RunConfig.model_validate_json(run_file.read_bytes()).stall_seconds
    except ValueError:
        return None
    return None if seconds is None else Stillness(seconds)


def log_of(run_dir: Path, rank: Rank) -> Path:
    return run_dir / "logs" / f"rank-{rank.number}.log"


def clear(run_dir: Path) -> None:
    """Make room for this run's own traces where an earlier one ran in the same folder."""
    (run_dir / EVENTS).unlink(missing_ok=True)
    # Of a launcher that was killed.
    for meeting in run_dir.glob(".rendezvous-*"):
        meeting.unlink()
    failure.forget(run_dir)
    whereabouts.forget(run_dir)
    (run_dir / "logs").mkdir(exist_ok=True)


def start(run_file: Path, environments: Iterable[Mapping[str, str]], command: Sequence[str]) -> list[Rank]:
    """Start every rank in the run directory, with what it is told in its environment, and its log."""
    crew = []
    at_birth = die_with(os.getpid())
    for number, told in enumerate(environments):
        with (run_file.parent / "logs" / f"rank-{number}.log").open("wb") as output:
            process = subprocess.Popen(
                [*command, str(run_file)],
                cwd=run_file.parent,
                env=told,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=at_birth,
            )
        crew.append(Rank(number, process))
    log.info("ranks started: %s", " ".join(str(rank.process.pid) for rank in crew))
    return crew


def environment_of(number: int, *, ranks: int, threads: int | None, rendezvous: Path, nice: int = 0) -> dict[str, str]:
    """All variables of one rank of `ranks` on this host; `threads` None gives each its share of the cores."""
    return environment(os.environ) | {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": str(threads or max(1, cores() // ranks)),
        RENDEZVOUS: rendezvous.as_uri(),
        NICE: str(nice),
    }


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank, from the launcher's `own`."""
    # The ranks of one host talk over loopback, whatever its hostname resolves to.
    loopback = next((name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}), None)
    network = {} if loopback is None else {"GLOO_SOCKET_IFNAME": loopback}
    # The engine is found from the run directory as it was found from here.
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [own.get("PYTHONPATH")])])
    return ENVIRONMENT | network | dict(own) | {"PYTHONPATH": path}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def die_with(launcher: int) -> Callable[[], None]:
    """What a rank does between fork and exec: hold signals until it listens, and die when the launcher does."""
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def at_birth() -> None:
        # A stop that comes while the interpreter starts stays pending until `engine.__main__` asks for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            # It may have died before the line above.
            if os.getppid() != launcher:
                os._exit(1)

    return at_birth


class Watch:
    """Waits for what concerns the launcher: a child's end, a wish to stop, the lease."""

    def __init__(self, heartbeat_timeout: float | None, farewell: Callable[[str], object] = lambda why: None) -> None:
        """`farewell` says why all of it dies, when no rank says anything any more."""
        self.farewell = farewell
        self.crew: Sequence[Rank] = ()
        self.stopping = False
        self.until: float | None = None
        """When to stop waiting, on the monotonic clock; None waits for as long as it takes."""
        self.timeout = heartbeat_timeout
        self.renewed = time.monotonic()
        self.wakeup, self._signalled = socket.socketpair()

    def __enter__(self) -> Watch:
        if self.timeout is not None and os.getpgrp() != os.getpid():
            # The lease ends by killing the group, which must be ours alone.
            os.setpgid(0, 0)
        self.wakeup.setblocking(False)
        self._signalled.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._signalled.fileno())
        self._before = {number: signal.signal(number, self.stop) for number in STOP_SIGNALS}
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self.wakeup.close()
        self._signalled.close()

    def look_after(self, crew: Sequence[Rank]) -> None:
        """Pass a wish to stop on to `crew` from here on, and the one that came while it was being started."""
        self.crew = crew
        if self.stopping:
            self.pass_on()

    def stop(self, number: int, frame: FrameType | None) -> None:
        log.info("told to stop by %s", signal.Signals(number).name)
        self.stopping = True
        self.pass_on()

    def pass_on(self) -> None:
        """Tell the ranks to stop; they finish the step, save and end."""
        for rank in self.crew:
            rank.process.send_signal(signal.SIGTERM)

    def leave_within(self, seconds: float) -> None:
        """Wait no longer than `seconds` from now, or than it was said before."""
        until = time.monotonic() + seconds
        self.until = until if self.until is None else min(self.until, until)

    def wait(self, at_most: float | None = None) -> bool:
        """Return when a child may have ended or `at_most` seconds are over, False where `until` has come.

        Dies, and takes the whole group along, when the lease is over.
        """
        stdin = sys.stdin.fileno() if self.timeout is not None else None
        lease_ends = None if self.timeout is None else self.renewed + self.timeout
        ends = [moment for moment in (lease_ends, self.until) if moment is not None]
        left = max(0.0, min(ends) - time.monotonic()) if ends else None
        if at_most is not None:
            left = at_most if left is None else min(left, at_most)
        ready, _, _ = select.select([self.wakeup, *([] if stdin is None else [stdin])], [], [], left)
        if self.wakeup in ready:
            self.wakeup.recv(4096)
        if stdin is not None and stdin in ready:
            if not os.read(stdin, 4096):
                self.die("the supervisor is gone: its end of stdin closed")
            self.renewed = time.monotonic()
        elif lease_ends is not None and time.monotonic() >= lease_ends:
            self.expire(
                f"the job's lease was not renewed for {self.timeout:g} seconds: the database did not answer, or this "
                "host had no time. The run was ended so that no other can run beside it"
            )
        return self.until is None or time.monotonic() < self.until

    def expire(self, why: str) -> None:
        """Die, and say so to a supervisor that may be there all the same."""
        for rank in self.crew:
            rank.process.kill()
        # Whatever keeps it from being said, it dies.
        with suppress(Exception):
            self.farewell(why)
        self.die(why)

    def die(self, why: str) -> None:
        log.error("killing the process group: %s", why)
        os.killpg(0, signal.SIGKILL)


def farewell(run_dir: Path, why: str) -> None:
    """Let the events say why the run is cut short, for a supervisor that is there to read it."""
    with Emitter(run_dir / EVENTS) as emitter:
        emitter.emit(Failed(code="lease_lost", message=why))


def kill(crew: Sequence[Rank]) -> None:
    """Leave no rank behind."""
    for rank in crew:
        if rank.process.poll() is None:
            rank.process.kill()
    for rank in crew:
        rank.process.wait()


def conclude(run_dir: Path, why: Failed | Stopped) -> int:
    """Make sure that the events say how the run ended, by `why` where no rank did, and turn that into an exit code."""
    last = last_event(run_dir / EVENTS)
    if last is None:
        last = why
        with Emitter(run_dir / EVENTS) as emitter:
            emitter.emit(last)
    if isinstance(last, Failed):
        log.error("failed (%s): %s", last.code, last.message)
    else:
        log.info("%s", last.type)
    return 0 if isinstance(last, Finished | Stopped) else 1


def reason(run_dir: Path, ranks: int, fallen: Rank | None, *, memory_kill: bool) -> Failed:
    """Why a run without a last event is over: what the fallen rank said, else how it fell."""
    if (said := failure.handed_over(run_dir)) is not None:
        return said
    if fallen is None:
        return Failed(code="internal", message="every rank ended without saying how the run went")
    who = f"rank {fallen.number} of {ranks}"
    code = fallen.process.returncode
    if code == -signal.SIGKILL and memory_kill:
        return Failed(
            code="out_of_memory",
            message=f"{who} was killed because the host ran out of memory",
            hint="Lower training.micro_batch or data.seq_len, recompute more, or use a larger host.",
            rank=fallen.number,
        )
    if code == NO_ROOM:
        return Failed(
            code="disk_full",
            message=f"the disk is full: {who} had no room to say how it ended",
            hint=failure.ROOM_HINT,
            rank=fallen.number,
        )
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return Failed(
        code="rank_lost",
        message=f"{who} {how}",
        hint=f"Its output is in logs/rank-{fallen.number}.log.",
        rank=fallen.number,
    )


def has_started(events: Path) -> bool:
    """Whether the first step was reached, so that there may be something to save."""
    return events.exists() and b'"type":"started"' in events.read_bytes()


def safe_step(run_file: Path) -> int:
    """The step that a run can go on from: of its last checkpoint, else the one that it went on from itself."""
    events = run_file.parent / EVENTS
    # A message may hold what Python takes for an end of line; after the last one there is nothing, or half an event.
    *lines, _ = events.read_bytes().split(b"\n") if events.exists() else [b""]
    saved = [event.step for line in lines if isinstance(event := adapter.validate_json(line), CheckpointSaved)]
    return saved[-1] if saved else resumed_step(run_file)


def resumed_step(run_file: Path) -> int:
    """The step that the run goes on from; 0 where it starts, or where `engine.checkpoint` will say what is wrong."""
    resume = RunConfig.model_validate_json(run_file.read_bytes()).resume
    if resume is None:
        return 0
    try:
        return int(json.loads((run_file.parent / resume / "index.json").read_text())["step"])
    except (OSError, ValueError, KeyError):
        return 0


def kernel_memory_kills() -> int:
    """Processes that this host's kernel has killed for want of memory since it started; 0 where it doesn't count."""
    try:
        counters = Path("/proc/vmstat").read_text()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) for line in counters.splitlines() if line.startswith("oom_kill ")), 0)


def main(run_file: Path, *, ranks: int, threads: int | None, heartbeat_timeout: float | None, nice: int) -> int:
    """`launch` from the command line, with its log in the run directory and on stderr.

    The exit code is `launch`'s, or `NO_ROOM` where a full disk leaves no room to say how the run ended.
    """

    def logged() -> int:
        logs = run_file.absolute().parent / "logs"
        logs.mkdir(exist_ok=True)
        handlers: list[logging.Handler] = [logging.FileHandler(logs / "launch.log"), logging.StreamHandler()]
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", handlers=handlers)
        return launch(run_file, ranks=ranks, threads=threads, heartbeat_timeout=heartbeat_timeout, nice=nice)

    return failure.exit_code(logged)
