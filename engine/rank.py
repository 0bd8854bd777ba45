"""One rank as a process: how it begins and how it ends. What it does meanwhile is `engine.trainer`'s business.

Torch is imported after the signal handlers stand, since that alone takes seconds.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine import failure, launch, niceness, stacks
from engine.config import RunConfig
from engine.emit import Emitter, last_event
from engine.events import Event, Failed, Stopped
from engine.standing import MOST_QUEUES, QUEUES, Standing, standing
from engine.stop import Stop, StopWish
from engine.whereabouts import Whereabouts, path_of

log = logging.getLogger(__name__)

OTHERS_SPEAK_SECONDS = 3.0
"""How long a rank that only lost contact waits for the reason of the one that is gone, or for the launcher's kill."""


def main(run_file: Path) -> int:
    """Train `run_file` as this rank; the exit code: 0 after `finished` and `stopped`, 1 after `failed`, and `NO_ROOM`
    where the disk is so full that not even that can be said.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    return failure.exit_code(lambda: live(run_file))


def live(run_file: Path) -> int:
    """`main`, raising what keeps this rank from saying how it ended."""
    wish, me, run_dir = StopWish(), standing(), run_file.absolute().parent
    # Sums of different numbers of threads differ in the last bit, so the number is said and not left to chance.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, launch.cores() // me.world_size)))
    os.environ.setdefault(QUEUES, str(MOST_QUEUES))
    stacks.answer()
    # Whoever reads this file may ask for stacks.
    whereabouts = Whereabouts(path_of(run_dir, me.world_rank) if me.launched else None)
    with events_of(me, run_dir) as emit:
        try:
            try:
                wish.listen()
                run = RunConfig.model_validate_json(run_file.read_bytes())
                wish.safe_step = launch.resumed_step(run_file)
                # Seconds of importing torch.
                from engine import trainer

                # Not before: who waits for a start is somebody, and hosts have few of them at once.
                niceness.give_way(me.nice)
                trainer.train(run, run_dir, emit, wish, whereabouts)
            except Exception as error:
                if wish.wanted and failure.lost_contact(error):
                    raise Stop from error
                fail(error, me, run_dir, emit)
                return 1
        except Stop:
            emit(Stopped(step=wish.safe_step))
    return 0


@contextmanager
def events_of(me: Standing, run_dir: Path) -> Iterator[Callable[[Event], None]]:
    """How this rank tells what happens: rank 0 writes the events, the others say nothing."""
    if me.world_rank > 0:
        yield lambda event: None
        return
    if not me.launched:
        launch.clear(run_dir)
    with Emitter(run_dir / launch.EVENTS) as emitter:

        def emit(event: Event) -> None:
            emitter.emit(event)
            log.info("%s", in_words(event))

        yield emit


def in_words(event: Event) -> str:
    """The event as a line for a person."""
    fields = event.model_dump(exclude={"type", "seq", "time"}, exclude_none=True).items()
    said = [f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}" for name, value in fields]
    return f"{event.type}: {', '.join(said)}"


def fail(error: Exception, me: Standing, run_dir: Path, emit: Callable[[Event], None]) -> None:
    """Say why this rank can't go on: to the user through rank 0, to whoever debugs in this rank's log."""
    failed = failure.explain(error, rank=me.world_rank)
    # Words are enough for a person at a terminal whose data or settings are wrong.
    in_person = sys.stderr.isatty() and failed.code != "internal"
    log.error("rank %d: %s", me.world_rank, failed.message, exc_info=None if in_person else error)
    cause = reason_of_others(run_dir) if failed.code == "rank_lost" else None
    if me.world_rank == 0:
        emit(cause or failed)
    elif cause is None:
        failure.hand_over(run_dir, failed)


def reason_of_others(run_dir: Path) -> Failed | None:
    """Why the rank that this one lost is gone, once it has said so; None when it goes without a word."""
    deadline = time.monotonic() + OTHERS_SPEAK_SECONDS
    while time.monotonic() < deadline:
        said = last_event(run_dir / launch.EVENTS)
        if isinstance(said, Failed):
            return said
        if (said := failure.handed_over(run_dir)) is not None and said.code != "rank_lost":
            return said
        time.sleep(0.05)
    return None
