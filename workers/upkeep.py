"""Do again what a lost message or a dead process left undone: place, take back, resend. `python -m workers.upkeep`."""

from __future__ import annotations

from time import monotonic

import structlog
from sqlalchemy import select

from core import health, hints, jobs, nodes, scheduler
from core import log as logging
from core.models import database_now
from core.services import Services
from core.settings import Settings
from workers.clock import Clock
from workers.courier import Courier
from workers.duties import Duty, beside, keep
from workers.expiry import Expiry
from workers.fetcher import Fetcher
from workers.orders import Orders, obey_signals

log = structlog.get_logger(__name__)

TICK_SECONDS = 1.0
ALL_SECONDS = 10.0
"""How often every queued job is looked at, however long the line is."""
ESTIMATE_SECONDS = 3.0
RESEND_SECONDS = 5.0
QUOTAS_SECONDS = 10.0
"""How far a project may run beyond its GPU-hours; then what it runs is told to save and pause."""
CLOSE_SECONDS = 5.0
"""How long jobs of a project that was archived may go on, where they were too many to be ended with it."""
FORGET_SECONDS = 600.0
LOOKS_PER_LEASE = 5
LONGEST_LOOK_SECONDS = 3.0


class Upkeep:
    def __init__(self, services: Services) -> None:
        self.services = services
        self.clock = Clock()
        self.trusts_leases_at = 0.0
        """When, on the monotonic clock, every lease that is held was renewed since the database's was set."""
        look = min(services.settings.lease_seconds / LOOKS_PER_LEASE, LONGEST_LOOK_SECONDS)
        self.duties = (
            Duty("reclaim", look, self.reclaim),
            Duty("tick", TICK_SECONDS, self.tick),
            Duty("look at all", ALL_SECONDS, self.look_at_all, due_at=monotonic() + ALL_SECONDS),
            Duty("estimate", ESTIMATE_SECONDS, self.estimate),
            Duty("resend", RESEND_SECONDS, self.resend, due_at=monotonic() + RESEND_SECONDS),
            Duty("quotas", QUOTAS_SECONDS, self.quotas),
            Duty("close", CLOSE_SECONDS, self.close),
            Duty("forget", FORGET_SECONDS, self.forget),
        )

    def run(self, orders: Orders) -> None:
        """Until a wish comes."""
        keep(self.duties, orders)

    def reclaim(self) -> None:
        """Take back the jobs whose lease is over; a cancel or pause that waited for such a job comes true.

        Where the clock that leases are read by was set, those who hold jobs have the time to renew them first.
        """
        lease = self.services.settings.lease
        with self.services.db.session() as session:
            jobs.end_sooner(session, longest=max(lease, scheduler.CLAIM_WITHIN))
            asked = monotonic()
            at = session.scalars(select(database_now())).one()
            if self.clock.was_set(at, asked=asked, answered=monotonic()):
                log.warning("the database's clock was set", leases="are renewed before any is taken for over")
                self.trusts_leases_at = monotonic() + lease.total_seconds()
            if monotonic() < self.trusts_leases_at:
                return
            taken = jobs.reclaim(
                session,
                max_losses=self.services.settings.max_losses,
                at=at,
                starts_arrive=lambda: health.broker(self.services) == health.OK,
            )
        for job in taken:
            log.warning("job taken back", job=job.id, attempt=job.attempt, state=job.state.value)

    def tick(self) -> None:
        """The scheduler's look, in case that a nudge was lost or a back-off has passed."""
        self.look()

    def look_at_all(self) -> None:
        """The same over the whole line, so that each job's place and reason are true."""
        self.look(depth=None)

    def look(self, depth: int | None = scheduler.DEPTH) -> None:
        with self.services.db.session() as session:
            placed = scheduler.tick(session, half_life=self.services.settings.fair_share_half_life, depth=depth)
        for placement in placed:
            log.info("job placed", job=placement.job_id, node=placement.node, slots=placement.slots)

    def estimate(self) -> None:
        """Reckon when those that wait will start."""
        with self.services.db.reading() as session:
            starts = scheduler.estimate(session, half_life=self.services.settings.fair_share_half_life)
        with self.services.db.session() as session:
            scheduler.note(session, starts)

    def resend(self) -> None:
        """Start again what was placed and not claimed. Several supervisors may come of it; one gets the job."""
        with self.services.db.session() as session:
            for job in jobs.unclaimed(session):
                if job.node is not None:
                    hints.start(session, job.id, job.node)

    def quotas(self) -> None:
        """Pause what runs in projects that have used up their GPU-hours."""
        with self.services.db.session() as session:
            paused = jobs.pause_spent(session)
        for job in paused:
            log.info("job paused, its project's GPU-hours are used up", job=job.id, state=job.state.value)

    def close(self) -> None:
        """End what is left in projects that were archived, some jobs a transaction."""
        while True:
            with self.services.db.session() as session:
                ended = jobs.cancel_archived(session)
            if not ended:
                return
            log.info("jobs of an archived project cancelled", project=ended[0].project_id, jobs=len(ended))

    def forget(self) -> None:
        """Count no longer on hosts that are gone for good."""
        with self.services.db.session() as session:
            for name in nodes.forget(session):
                log.info("node forgotten", node=name)


def main() -> None:
    settings = Settings()
    logging.begin(settings)
    orders = Orders()
    obey_signals(orders)
    with (
        Services(settings) as services,
        beside(Expiry(services).run, "expiry"),
        beside(Courier(services).run, "courier"),
        beside(Fetcher(services).run, "fetcher"),
    ):
        log.info("upkeep is up")
        Upkeep(services).run(orders)


if __name__ == "__main__":
    main()
