"""One attempt at a job, from staging to its end. Holding on to the job meanwhile is the lease's business."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any, TypeVar

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from core import artifacts, checkpoints, joblogs, jobs, space
from core.db import AWAY
from core.errors import InvalidMove
from core.failures import failure
from core.history import CHOICE_METRICS
from core.models import Checkpoint, Job, Node, Slot
from core.services import Services
from core.settings import trainer_environment
from core.states import HELD, JobState
from engine.config import RunConfig
from engine.events import (
    LAST,
    CheckpointSaved,
    Choices,
    Evaluated,
    Event,
    Finished,
    Log,
    RolledBack,
    Started,
    Step,
    Stopped,
)
from workers import staging, tidy
from workers.follower import Follower
from workers.launcher import GangSpec, Handle, Launcher, Status
from workers.lease import SILENCE, Lease
from workers.orders import Orders
from workers.outcome import WISHED, Action, Outcome, Progress, Wish, decide, from_outside
from workers.publisher import Publisher, Saved
from workers.rest import Rest

log = structlog.get_logger(__name__)

T = TypeVar("T")

LOOK_SECONDS = 0.1
"""How often the gang and its growing files are looked at."""
REST_PER_WRITE, LONGEST_REST = 4.0, 2.0
"""Times as long as the last write took, and seconds at most, nothing is written: what comes meanwhile goes together.

Runs of one database leave it to one another so, and to who submits. Twenty of them that wrote whenever they could kept
SQLite locked until leases ran out.
"""
LINGER = timedelta(seconds=10)
"""How long a gang may take to end after its last event, or a killed one to disappear."""
KEEP_LOGS_SECONDS = 60.0
"""Least time between two uploads of the logs of a running attempt."""
RETRY_SECONDS = 0.5
"""Pause after a write that the database did not answer."""

ANY = frozenset(Wish)
DONE_FOR = frozenset({Wish.CANCEL, Wish.LOST})
"""Wishes after which results don't matter; the others wait until a finished run is published."""


class Interrupted(Exception):
    """What is being done no longer matters."""

    def __init__(self, wish: Wish) -> None:
        super().__init__(wish.name)
        self.wish = wish


class Overdue(Exception):
    """What is being done takes longer than anything may."""


class Attempt:
    """Everything it writes carries the attempt's number as its fence, so that one that was replaced writes nothing."""

    def __init__(self, services: Services, job: Job, *, launcher: Launcher, orders: Orders, lease: Lease) -> None:
        self.services, self.settings = services, services.settings
        self.job, self.fence = job, job.attempt
        self.launcher, self.orders, self.lease = launcher, orders, lease
        self.config = RunConfig.model_validate(job.run_config)
        save = timedelta(seconds=self.settings.stop_grace_seconds)
        self.graces = {
            Wish.DRAIN: save,
            Wish.MAKE_WAY: save,
            Wish.PAUSE: save,
            Wish.TIME_IS_UP: save,
            Wish.CANCEL: timedelta(seconds=self.settings.cancel_grace_seconds),
            Wish.LOST: timedelta(0),
        }
        """How long the gang has to end after each wish."""
        self.run_dir = tidy.run_dir(self.settings, job.id, job.attempt)
        self.last: Event | None = None
        """The run's last event, once it came."""
        self.began = 0
        """Steps that were done before."""
        self.metrics: dict[int, dict[str, Any]] = {}
        """The newest numbers as of each of the last steps, to go with its checkpoint."""
        self.returns: list[RolledBack] = []
        """Each time that the run went back. The publisher's thread reads it."""
        self.asides: SimpleQueue[Log] = SimpleQueue()
        """What other threads want the user to know."""
        self.killed_by = inf
        """When, on the monotonic clock, no process of the gang may be left any more."""
        self.undead = False
        """It has been said that some are left all the same."""
        self.keep_logs_at = 0.0
        """On the monotonic clock. The publisher's thread alone reads and writes it."""
        self.publisher = Publisher(
            self.run_dir / "outbox", keep=self.config.training.keep_checkpoints, publish=self.publish, failed=self.tell
        )

    def run(self) -> Outcome:
        """See the attempt through and return what became of it."""
        try:
            outcome = self.attempt()
        except Interrupted as interrupted:
            outcome = WISHED[interrupted.wish]
        except staging.Unusable as error:
            outcome = Outcome(Action.FAIL, error.message, failure(error.code, error.message))
        except Exception as error:  # the process's edge: whatever broke, the job goes on or says why
            log.exception("attempt broke")
            outcome = Outcome(Action.LOSE, f"the attempt broke: {error}", explain(error))
        self.publisher.close()
        if outcome is WISHED[Wish.DRAIN] and not self.host_goes_down():
            outcome = from_outside("its supervisor", self.progress())
        outcome = self.conclude(outcome)
        self.lease.release()
        log.info("attempt concluded", action=outcome.action.value, reason=outcome.reason)
        if outcome.action is Action.ABANDON:
            tidy.clear(self.run_dir)
        else:
            self.tidy()
        return outcome

    # The road

    def attempt(self) -> Outcome:
        """Stage, train, publish; what the job should become."""
        stage = partial(staging.stage, self.services, self.job, self.run_dir, damaged=self.tell_damaged)
        self.meanwhile("to bring its data", stage, unless=ANY)
        self.record([*drained(self.asides)])
        status = self.train()
        wish = self.orders.wish
        if wish is not None and wish in DONE_FOR:
            return WISHED[wish]
        self.meanwhile("to store its checkpoints", self.publisher.flush, unless=DONE_FOR)
        # What went wrong with the last ones is told like what went wrong on the way.
        self.record([*drained(self.asides)])
        outcome = decide(
            self.last,
            exit_code=status.exit_code,
            wish=wish,
            max_runtime=self.job.max_runtime,
            lines_up=self.job.spec.get("at_max_runtime") == "requeue",
            progress=self.progress(),
        )
        if isinstance(self.last, Finished):
            export = self.run_dir / self.last.export
            publish = partial(artifacts.publish, self.services, self.job, export)
            self.meanwhile("to store its result", publish, unless=DONE_FOR)
        return outcome

    def progress(self) -> Progress:
        """How far it came, once nothing is left to upload."""
        reached = self.last.step if isinstance(self.last, Stopped) else next(reversed(self.metrics), self.began)
        return Progress(began=self.began, reached=reached, listed=self.publisher.listed)

    def train(self) -> Status:
        """Launch the ranks and follow them to their end."""
        gang = GangSpec(
            job_id=self.job.id,
            attempt=self.fence,
            ranks=self.config.parallel.ranks,
            run_dir=self.run_dir,
            environment=trainer_environment(self.gpus()),
            heartbeat_timeout=self.settings.lease * SILENCE,
            nice=self.settings.nice,
        )
        handle = self.launcher.submit(gang)
        self.lease.feed(lambda: self.launcher.beat(handle))
        try:
            return self.follow(handle)
        finally:
            self.put_down(handle)

    def gpus(self) -> Sequence[int]:
        """The GPUs that the job was given; none on a host that offers CPU slots."""
        held = (
            select(Slot.index)
            .join(Node, Node.name == Slot.node)
            .where(Slot.job_id == self.job.id, Node.device == "cuda")
            .order_by(Slot.index)
        )
        with self.services.db.reading() as session:
            return session.scalars(held).all()

    def follow(self, handle: Handle) -> Status:
        """Record what the ranks say and pass on what they are told, until none is left."""
        follower = Follower(self.run_dir / "events.jsonl")
        unrecorded: list[Event] = []
        told: Wish | None = None
        rest = Rest(times=REST_PER_WRITE, most_seconds=LONGEST_REST)
        time_is_up, lingers_until = monotonic() + (self.job.max_runtime or inf), inf
        while True:
            # In this order, so that what it wrote last is read.
            status = self.launcher.poll(handle)
            news = [*follower.read(), *drained(self.asides)]
            with rest.after():
                unrecorded = self.record([*unrecorded, *news])
            if status.ended and not news and (not unrecorded or self.orders.wish is Wish.LOST):
                return status
            if monotonic() >= time_is_up:
                self.orders.give(Wish.TIME_IS_UP)
                time_is_up = inf
            if self.last is not None:
                lingers_until = min(lingers_until, monotonic() + LINGER.total_seconds())
            if monotonic() >= lingers_until:
                self.end(handle, timedelta(0))
            self.tell_of_undead()
            pause = LOOK_SECONDS
            if status.ended and not unrecorded:
                pause = 0
            elif told is None:
                pause = max(pause, rest.seconds_left)
            wish = self.orders.wait(pause)
            if wish is not None and wish is not told:
                told = wish
                log.info("gang told to end", wish=wish.name)
                self.end(handle, self.graces[wish])

    def put_down(self, handle: Handle) -> None:
        """Leave no process of the gang, however the following ended.

        Without a limit: what holds on to a process that was killed, holds on to the slots as well, and to say that they
        are free would let another attempt run beside it.
        """
        while not self.launcher.poll(handle).ended:
            self.end(handle, timedelta(0))
            self.tell_of_undead()
            self.orders.wait(LOOK_SECONDS)

    def end(self, handle: Handle, grace: timedelta) -> None:
        """Have the gang end within `grace`."""
        self.launcher.cancel(handle, grace)
        self.killed_by = min(self.killed_by, monotonic() + (grace + LINGER).total_seconds())

    def tell_of_undead(self) -> None:
        """Say so, once, where processes that were killed do not go."""
        if monotonic() < self.killed_by or self.undead:
            return
        self.undead = True
        said = (
            f"processes of the run are still there {LINGER.total_seconds():g} s after they were killed: the kernel of "
            f"{self.settings.node_name} holds them, mostly for a disk or a device that does not answer. The job keeps"
            " its slots until they are gone; where they don't go, that host needs a restart"
        )
        log.warning("processes do not end", seconds=LINGER.total_seconds())
        self.record([Log(level="warning", message=said)])

    def host_goes_down(self) -> bool:
        """Whether this host says so, itself or in its row. It is believed to where the database does not answer."""
        if self.orders.host_goes_down:
            return True
        try:
            with self.services.db.reading() as session:
                draining = session.scalar(select(Node.draining).where(Node.name == self.settings.node_name))
        except AWAY:
            return True
        return draining is not False

    # What is written on the way

    def record(self, events: list[Event]) -> list[Event]:
        """Write the events down; return those that the database would not take now."""
        if not events:
            return []
        # Before it is in the table: what is listed after that then knows of it.
        self.returns += [event for event in events if isinstance(event, RolledBack)]
        try:
            with self.services.db.session() as session:
                jobs.record(session, self.job.id, fence=self.fence, events=events)
        except InvalidMove:
            self.orders.give(Wish.LOST)
            return []
        except AWAY as error:
            log.warning("events not recorded yet", events=len(events), error=str(error))
            return events
        for event in events:
            self.note(event)
        return []

    def note(self, event: Event) -> None:
        """What a recorded event means for us. A checkpoint is published after the steps before it are in the table."""
        match event:
            case Started():
                self.began = event.start_step
            case Step():
                numbers = {"loss": event.loss, "token_accuracy": event.token_accuracy, "tokens": event.tokens}
                self.add_metrics(event.step, {name: number for name, number in numbers.items() if number is not None})
            case Evaluated():
                numbers = {"validation_loss": event.loss, "validation_token_accuracy": event.token_accuracy}
                self.add_metrics(event.step, numbers)
            case Choices():
                self.add_metrics(event.step, {name: getattr(event, of) for name, of in CHOICE_METRICS.items()})
            case RolledBack():
                self.publisher.gone_back(event.step)
            case CheckpointSaved():
                known = {} if event.best_step is None else {"best_step": event.best_step}
                metrics = self.metrics.get(event.step, {}) | known
                folder, best = self.run_dir / event.path, event.best_step
                self.publisher.add(event.step, folder, metrics, best_step=best, seq=event.seq)
        if isinstance(event, LAST):
            self.last = event

    def add_metrics(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Remember what is newest as of `step`, for as long as a checkpoint of it may still be told of."""
        newest = next(reversed(self.metrics.values()), {})
        self.metrics.pop(step, None)
        self.metrics[step] = {**newest, **numbers}
        # A checkpoint is written while training goes on, until the next one is due at the latest.
        while len(self.metrics) > 1 + (self.config.training.checkpoint_every or 0):
            del self.metrics[next(iter(self.metrics))]

    def publish(self, saved: Saved) -> None:
        """Upload a checkpoint and make it the one that the next attempt starts from. In the publisher's thread."""
        checkpoints.publish(
            self.services, self.job.id, fence=self.fence, step=saved.step, folder=saved.folder, metrics=saved.metrics,
            is_on_the_way=lambda: not any(back.seq > saved.seq and back.step < saved.step for back in self.returns),
        )  # fmt: skip
        keep = self.config.training.keep_checkpoints
        checkpoints.prune(self.services, self.job.id, keep=keep, spare=saved.best_step)
        # Readers on another host see a running attempt's logs as far as these.
        if monotonic() >= self.keep_logs_at:
            joblogs.keep(self.services.storage, self.job.id, self.fence, self.run_dir / "logs")
            self.keep_logs_at = monotonic() + KEEP_LOGS_SECONDS

    def tell(self, saved: Saved, error: Exception) -> None:
        """Say that a checkpoint could not be published. In the publisher's thread."""
        if isinstance(error, InvalidMove):
            self.orders.give(Wish.LOST)
            return
        if isinstance(error, checkpoints.GoneBackFrom):
            return
        said = explain(error)
        self.asides.put(
            Log(level="warning", message=f"the checkpoint of step {saved.step} was not published: {said['message']}")
        )

    def tell_damaged(self, checkpoint: Checkpoint, why: checkpoints.Damaged) -> None:
        """Say that a checkpoint can't be gone on from. In the stager's thread."""
        said = f"the checkpoint of step {checkpoint.step} is damaged in storage and is passed over: {why}"
        self.asides.put(Log(level="warning", message=said))

    # The end

    def conclude(self, outcome: Outcome) -> Outcome:
        """Make it so in the row; what it became in the end, as a wish may have come first, or another attempt."""
        while outcome.action is not Action.ABANDON:
            try:
                final = self.settled(outcome)
                if final is outcome:
                    return final
                outcome = final
            except AWAY as error:
                log.warning("end not written yet", error=str(error))
                if self.orders.wait(RETRY_SECONDS) is Wish.LOST:
                    return WISHED[Wish.LOST]
        return outcome

    def settled(self, outcome: Outcome) -> Outcome:
        """The outcome, when the row has it; else what it has to be instead."""
        try:
            with self.services.db.session() as session:
                self.settle(session, outcome)
        except InvalidMove as refusal:
            return self.reconsider(refusal)
        return outcome

    def settle(self, session: Session, outcome: Outcome) -> None:
        job_id, fence, reason = self.job.id, self.fence, outcome.reason
        match outcome.action:
            case Action.PUBLISH:
                jobs.move(session, job_id, JobState.SUCCEEDED, fence=fence)
            case Action.FAIL if outcome.yields and jobs.held(session, job_id, fence=fence).state is JobState.PAUSING:
                jobs.move(session, job_id, JobState.PAUSED, fence=fence)
            case Action.FAIL:
                jobs.move(session, job_id, JobState.FAILED, fence=fence, error=outcome.error)
            case Action.CANCEL:
                jobs.move(session, job_id, JobState.CANCELLED, fence=fence)
            case Action.PAUSE:
                jobs.move(session, job_id, JobState.PAUSED, fence=fence, message=reason)
            case Action.REQUEUE:
                jobs.requeue(session, job_id, fence=fence, reason=reason)
            case Action.LINE_UP:
                jobs.requeue(session, job_id, fence=fence, reason=reason, to_the_end=True)
            case Action.LOSE:
                losses = self.settings.max_losses
                jobs.lose(session, job_id, fence=fence, reason=reason, max_losses=losses, error=outcome.error)

    def reconsider(self, refusal: InvalidMove) -> Outcome:
        """The row refused: a cancel came between, or the job is somebody else's."""
        with self.services.db.reading() as session:
            job = session.get(Job, self.job.id)
        if job is None or job.attempt != self.fence or job.holder is None or job.state not in HELD:
            return WISHED[Wish.LOST]
        if job.state is JobState.CANCELLING:
            return WISHED[Wish.CANCEL]
        raise refusal

    def tidy(self) -> None:
        """Clear away what the attempt left on this disk. The node does it later where this can't."""
        try:
            tidy.tidy_job(self.services, self.job.id)
        except Exception:  # the job has ended as it should; whatever storage or disk may raise does not change that
            log.warning("run directory left behind", exc_info=True)

    def meanwhile(self, what: str, work: Callable[[], T], *, unless: frozenset[Wish]) -> T:
        """The result of `work`, done in a thread; leaves it and raises Interrupted as soon as such a wish comes.

        Raises Overdue where it takes too long: the lease is renewed meanwhile, so that nobody else would end it.
        """
        deadline = monotonic() + self.settings.transfer_seconds
        done: Future[T] = Future()
        done.add_done_callback(lambda future: self.orders.wake())
        Thread(target=copy_context().run, args=(fulfil, done, work), name="meanwhile", daemon=True).start()
        while not done.done():
            wish = self.orders.wait(1.0)
            if wish in unless:
                raise Interrupted(wish)
            if monotonic() > deadline:
                raise Overdue(f"it took longer than {self.settings.transfer_seconds:g} s {what}")
        return done.result()


def fulfil(done: Future[T], work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # whoever waits for the result raises it
        done.set_exception(error)


def drained(inbox: SimpleQueue[Log]) -> Iterable[Log]:
    while True:
        try:
            yield inbox.get_nowait()
        except Empty:
            return


def explain(error: Exception) -> dict[str, Any]:
    """`Job.error` for what went wrong on our side of an attempt."""
    if space.is_full(error):
        return failure("disk_full", f"no space left: {error}")
    if isinstance(error, Overdue):
        hint = "Look at the storage and at the network between; raise TRAINSHED_TRANSFER_SECONDS if they are only slow."
        return failure("stalled", str(error), hint=hint)
    return failure("internal", f"{type(error).__name__}: {error}")
