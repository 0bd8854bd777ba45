"""Keep hold of a job: renew its lease in time, pass the renewal on to the gang, and hear what is wished meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from threading import Event, Thread
from time import monotonic
from types import TracebackType
from typing import Self

import structlog
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from core import jobs
from core.models import Job
from core.services import Services
from core.states import HELD, JobState
from workers.orders import Orders
from workers.outcome import Wish

log = structlog.get_logger(__name__)

RENEWALS_PER_LEASE = 5
LATEST_BEAT = 0.15
"""A renewal that took a longer share of the lease than this is not passed on: the gang would outlive the lease."""
SILENCE = 0.8
"""Share of the lease after which a gang without a beat kills itself: before anyone else may take the job."""
EARLIEST_END = 1 - 1 / RENEWALS_PER_LEASE - LATEST_BEAT
"""Share of a lease that is left at any time, at least, while renewals go well: the last was asked for no longer ago."""
RETRY_SECONDS = 0.25
"""Pause after a renewal that the database did not answer."""
JOIN_SECONDS = 2.0
"""How long the end waits for the threads. In a call to a database that is away, they die with the process."""

WISHES: dict[JobState, Wish] = {JobState.CANCELLING: Wish.CANCEL, JobState.PAUSING: Wish.PAUSE}


class Lease:
    """Renews in a thread from entry to exit. Another one listens to the job's bell, as wishes can't wait."""

    def __init__(self, services: Services, job: Job, orders: Orders, *, claimed_at: float) -> None:
        self._services = services
        self._job_id, self._fence = job.id, job.attempt
        self._orders = orders
        self._seconds = services.settings.lease_seconds
        self._renewed_at = claimed_at
        """When the last good renewal was asked for; the row's lease ends no earlier than `_seconds` after that."""
        self._beat: Callable[[], None] | None = None
        self._over = Event()
        # In our context, so that what they log names the job.
        self._threads = tuple(
            Thread(target=copy_context().run, args=(work,), name=name, daemon=True)
            for name, work in (("lease", self._keep), ("bell", self._listen))
        )

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)

    def release(self) -> None:
        """Renew no more: the job is not ours any longer, or should not be."""
        self._over.set()

    def feed(self, beat: Callable[[], None]) -> None:
        """Call `beat` after each good renewal from now on."""
        self._beat = beat

    def renew(self) -> bool:
        """Renew once, now; False when the lease is lost."""
        with self._services.db.session() as session:
            # Here a writer waits for its turn, which does not make what is asked then any older.
            session.connection()
            asked_at = monotonic()
            job = jobs.renew(session, self._job_id, fence=self._fence, lease=self._services.settings.lease)
        if job is None:
            return False
        self._renewed_at = asked_at
        # A process that stood still between asking and here would lengthen the gang's life past the lease.
        if self._beat is not None and monotonic() - asked_at < LATEST_BEAT * self._seconds:
            self._beat()
        self._heed(job.state, makes_way=job.makes_way)
        return True

    def _keep(self) -> None:
        while not self._over.is_set():
            try:
                held = self.renew()
                pause = self._seconds / RENEWALS_PER_LEASE
            except SQLAlchemyError as error:
                # It may be back in time. If not, the lease is over for the gang as for us.
                held = monotonic() - self._renewed_at < self._seconds
                pause = RETRY_SECONDS
                log.warning("lease not renewed", error=str(error))
            if not held:
                log.warning("lease lost", silent_seconds=round(monotonic() - self._renewed_at, 3))
                self._orders.give(Wish.LOST)
                return
            self._over.wait(pause)

    def _listen(self) -> None:
        """A ring says that something is new about the job, mostly by ourselves; only its state matters here."""
        for _ in self._services.bell.rings(self._job_id, until=self._over):
            try:
                with self._services.db.reading() as session:
                    mine = select(Job.state, Job.makes_way).where(Job.id == self._job_id, Job.attempt == self._fence)
                    found = session.execute(mine).one_or_none()
            except SQLAlchemyError as error:
                log.warning("state not read", error=str(error))
                continue
            if found is not None and found.state in HELD:
                self._heed(found.state, makes_way=found.makes_way)
            else:
                # Taken back, as when a clock was set forward: the next renewal would find out, and be late.
                self._orders.give(Wish.LOST)

    def _heed(self, state: JobState, *, makes_way: bool) -> None:
        if wish := WISHES.get(state, Wish.MAKE_WAY if makes_way else None):
            self._orders.give(wish)
