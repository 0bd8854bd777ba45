"""This host in the cluster: offers its slots, keeps a Celery worker and a sampler alive, drains when told to end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

import psutil
import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from core import jobs, nodes
from core import log as logging
from core.children import Child
from core.errors import DomainError, InUse, NotFound
from core.queue import CONTROL, node_queue
from core.services import Services
from core.settings import NODE_NAME, Settings
from workers import hardware, tidy
from workers.calibration import Calibration
from workers.lease import EARLIEST_END, SILENCE
from workers.nodename import NodeName, held
from workers.orders import HOST_GOES_DOWN, Orders, obey_signals

log = structlog.get_logger(__name__)

TEND_SECONDS = 0.5
TIDY_SECONDS = 60.0
FROZEN_SECONDS = 1.0
"""How often it is looked for supervisors and launchers that stand still."""
FROZEN_LEASES = 2
"""Leases after which a supervisor that stands still is killed; its ranks are dead after less than one."""
LOOK_SECONDS = 0.2
"""How often a draining node looks who is left."""
CHILD_GRACE_SECONDS = 5.0
OFFER_SECONDS = 15.0
"""How long the first measurement may keep this host from being offered. A calm one has it done in about four."""
DRAIN_MARGIN_SECONDS = 5.0
"""What supervisors get beyond the grace of their runs, to upload and to write the end."""


def main() -> None:
    settings = Settings()
    logging.begin(settings)
    orders = Orders()
    obey_signals(orders)
    try:
        with held(settings, orders) as held_name, Services(settings) as services:
            Node(services, orders, held_name).run()
    except InUse as error:
        log.error("there is another node of this name", why=str(error))
        sys.exit(2)


class Node:
    """Lives until it is told to drain, or another has its name."""

    def __init__(self, services: Services, orders: Orders, held_name: NodeName) -> None:
        self.services, self.settings = services, services.settings
        self.name = self.settings.node_name
        self.orders = orders
        self.held_name = held_name
        self.worker = Child("worker", worker_command(self.name))
        self.sampler = Child("sampler", (sys.executable, "-m", "workers.sampler"))
        self.hardware = hardware.survey(self.settings)
        self.calibration = Calibration(self.settings, self.hardware)
        self._registered = False
        self._rates: dict[str, Any] | None = None
        """What was measured; None: nothing yet."""
        self.measuring: Thread | None = None
        self._offers_at = 0.0
        """Until when it waits for the first measurement, on the monotonic clock, so that the first plan has a time."""
        self._beat_at = self._tidy_at = self._frozen_at = 0.0
        self._tidying: Thread | None = None
        self._frozen_since: dict[psutil.Process, float] = {}
        """Supervisors and launchers that stand still, and since when they were seen to."""

    def run(self) -> None:
        """Raises InUse where another node has the name, at once or when this one was not heard for a while."""
        self.look_for_another()
        log.info("node is up", node=self.name, device=self.hardware.device, slots=self.hardware.num_slots)
        self.calibrate()
        try:
            while self.orders.wait(TEND_SECONDS) is None:
                for child in (self.worker, self.sampler):
                    if death := child.tend():
                        log.warning("child died", **asdict(death))
                if self.may_be_offered:
                    self.beat()
                self.end_frozen()
                self.tidy()
        except InUse:
            self.drain()
            raise
        self.drain()

    def look_for_another(self) -> None:
        """Before anything is done in the name. Where that can't be told now, it is when the node registers."""
        try:
            with self.services.db.reading() as session:
                nodes.assert_free(session, self.name, holder=self.held_name.holder)
        except SQLAlchemyError as error:
            log.warning("not known whether there is another node of this name", error=str(error))

    @property
    def may_be_offered(self) -> bool:
        """The first measurement is done, or takes too long."""
        return monotonic() >= self._offers_at

    def beat(self) -> None:
        """Say that this host lives, and at first, or when nobody knows it any more, what it offers."""
        if monotonic() < self._beat_at:
            return
        self._beat_at = monotonic() + nodes.HEARTBEAT.total_seconds()
        try:
            with self.services.db.session() as session:
                if self._registered:
                    nodes.heartbeat(session, self.name, holder=self.held_name.holder)
                else:
                    self.register(session)
        except NotFound:
            self._registered, self._beat_at = False, 0.0
        except SQLAlchemyError as error:
            log.warning("heartbeat not written", error=str(error))
        else:
            self._registered = True

    def register(self, session: Session) -> None:
        offer = self.hardware
        nodes.register(
            session,
            self.name,
            device=offer.device,
            num_slots=offer.num_slots,
            slot_memory_bytes=offer.slot_memory_bytes,
            slot_peak_flops=offer.slot_peak_flops,
            rates=self._rates or offer.rates,
            starts_at_once=offer.starts_at_once,
            holder=self.held_name.holder,
        )

    def calibrate(self) -> None:
        """Measure, aside, how fast the slots are, so that plans can say how long a step takes.

        A host without jobs is offered once that is known.
        """
        if not self.settings.calibrate:
            return
        if not self.calibration.is_known and self.is_free():
            self._offers_at = monotonic() + OFFER_SECONDS
        self.measuring = Thread(target=self.measure, name="calibrate", daemon=True)
        self.measuring.start()

    def measure(self) -> None:
        self._rates = rates = self.calibration.facts(self.is_free)
        self._offers_at = 0.0
        if rates is None:
            return
        try:
            with self.services.db.session() as session:
                nodes.rate(session, self.name, rates, holder=self.held_name.holder)
        except NotFound:
            pass  # it says so when it registers
        except SQLAlchemyError as error:
            log.warning("calibration not written", error=str(error))

    def is_free(self) -> bool:
        """Whether no job has a slot of this host."""
        try:
            with self.services.db.reading() as session:
                return nodes.is_free(session, self.name)
        except SQLAlchemyError:
            return False

    def end_frozen(self) -> None:
        """Kill supervisors and launchers that have stood still for so long that somebody else has, or gets, their job.

        Such a supervisor would only find that out. Until then, one that was stopped in the middle of a write keeps
        SQLite locked for everybody, so what is asked here is the host and not the rows. Such a launcher does not hear
        that its lease is over: its ranks, which end with it, would train on beside the next attempt's.
        """
        now = monotonic()
        if now < self._frozen_at:
            return
        self._frozen_at = now + FROZEN_SECONDS
        allowed = may_stand_still(self.settings)
        self._frozen_since = {
            process: self._frozen_since.get(process, now) for process in allowed if stands_still(process)
        }
        for process, since in self._frozen_since.items():
            if now - since > allowed[process]:
                log.warning("frozen process killed", pid=process.pid, seconds=round(now - since, 1))
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def tidy(self) -> None:
        """Clear away what supervisors that were killed left on this host."""
        if monotonic() < self._tidy_at or (self._tidying is not None and self._tidying.is_alive()):
            return
        self._tidy_at = monotonic() + TIDY_SECONDS
        # Aside: a storage that is slow to answer must not keep this host from saying that it lives.
        self._tidying = Thread(target=self.tidy_up, name="tidy", daemon=True)
        self._tidying.start()

    def tidy_up(self) -> None:
        try:
            tidy.tidy_host(self.services)
        except Exception:  # the thread's edge: whatever storage, disk or database may raise, it is tried again
            log.warning("not tidied", exc_info=True)

    # Going down

    def drain(self) -> None:
        """Take nothing new, have the runs saved and queued again, then end the children."""
        log.info("node drains", node=self.name)
        self.held_name.goes_down()
        try:
            with self.services.db.session() as session:
                nodes.drain(session, self.name, holder=self.held_name.holder)
        except (SQLAlchemyError, NotFound) as error:
            log.warning("node not marked as draining", error=str(error))
        self.calibration.stop()
        self.worker.ask_to_end()
        self.end_supervisors()
        self.worker.stop(CHILD_GRACE_SECONDS)
        # Those that it started with its last breath.
        self.end_supervisors()
        self.give_back()
        self.sampler.stop(CHILD_GRACE_SECONDS)
        log.info("node is down", node=self.name)

    def end_supervisors(self) -> None:
        """Ask this host's supervisors to save and requeue; kill those that take too long, as their leases will tell.

        They hear it from the node itself, which may have found no database to write it to.
        Whoever tells the node to end a second time does not want to wait for that.
        """
        deadline = monotonic() + self.settings.stop_grace_seconds + DRAIN_MARGIN_SECONDS
        asked: set[psutil.Process] = set()
        while left := {process for process in asked | self.supervisors() if lives(process)}:
            late = monotonic() > deadline or self.orders.times > 1
            for process in left if late else left - asked:
                for number in (signal.SIGKILL,) if late else (HOST_GOES_DOWN, signal.SIGTERM):
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(number)
            asked |= left
            if late:
                log.warning("supervisors killed", pids=sorted(process.pid for process in left))
                return
            self.orders.wait(LOOK_SECONDS)

    def supervisors(self) -> set[psutil.Process]:
        """Those of this node, not another's of this host, which knows them: no database needs to be there."""
        return {process for process in supervisors(self.settings) if node_of(process, otherwise=self.name) == self.name}

    def give_back(self) -> None:
        """Queue what was placed here and never started."""
        try:
            with self.services.db.session() as session:
                nodes.assert_free(session, self.name, holder=self.held_name.holder)
                for job in jobs.unclaimed(session):
                    if job.node == self.name:
                        jobs.unplace(session, job.id, reason=f"{self.name} went down before it started")
        except (SQLAlchemyError, DomainError) as error:
            log.warning("jobs not given back", error=str(error))


def worker_command(node: str) -> tuple[str, ...]:
    """The Celery worker of a host. Its tasks are short, so two at once are plenty."""
    return (
        sys.executable, "-m", "celery", "-A", "workers.app", "worker", "--concurrency", "2", "--loglevel", "INFO",
        "--queues", f"{CONTROL},{node_queue(node)}", "--hostname", f"worker@{node}",
        # Each of these makes workers talk to one another through the broker; ours have nothing to say.
        "--without-gossip", "--without-mingle", "--without-heartbeat",
    )  # fmt: skip


def may_stand_still(settings: Settings) -> dict[psutil.Process, float]:
    """This data directory's supervisors and launchers, and how many seconds each may be seen to stand still."""
    launchers = [
        process
        for process, command in commands()
        if "launch" in command and Path(command[-1]).is_relative_to(settings.runs)
    ]
    lease = settings.lease_seconds
    allowed = dict.fromkeys(supervisors(settings), FROZEN_LEASES * lease)
    return allowed | dict.fromkeys(launchers, launcher_allowance(lease))


def launcher_allowance(lease_seconds: float) -> float:
    """Seconds for which a launcher may be seen to stand still, below 0 where it is killed as soon as it is.

    Its lease ends earliest where its supervisor is killed beside it. Before these seconds it may stand still until the
    next look, and after them until one more; what a gang has to spare when it kills itself is spared here as well.
    """
    spare = 1 - SILENCE
    return (EARLIEST_END - spare) * lease_seconds - 2 * (FROZEN_SECONDS + TEND_SECONDS)


def supervisors(settings: Settings) -> list[psutil.Process]:
    """The supervisors of jobs that have a folder in this node's data directory."""
    return [
        process
        for process, command in commands()
        if command[-2:-1] == ["workers.supervisor"] and (settings.runs / command[-1]).is_dir()
    ]


def node_of(process: psutil.Process, *, otherwise: str) -> str | None:
    """The name of the node that started a supervisor, which inherits it, `otherwise` where nobody gave that one a name.

    None where that can't be told: it has ended, or is another user's.
    """
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return process.environ().get(NODE_NAME) or otherwise
    return None


def commands() -> Iterator[tuple[psutil.Process, list[str]]]:
    """Every process of this host that has a command line, and that."""
    for process in psutil.process_iter(["cmdline"]):
        if command := process.info["cmdline"]:
            yield process, command


def stands_still(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
    return False


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


if __name__ == "__main__":
    main()
