"""Take hold of a job and see one attempt through, in a process of its own: `python -m workers.supervisor JOB_ID`."""

from __future__ import annotations

import os
import secrets
import sys
from time import monotonic

import structlog

from core import jobs
from core import log as logging
from core.services import Services
from core.settings import Settings
from core.states import TERMINAL
from workers import mirror
from workers.attempt import Attempt
from workers.launcher import Launcher, LocalLauncher, adopt_orphans
from workers.lease import Lease
from workers.orders import Orders, obey_signals
from workers.outcome import Outcome

log = structlog.get_logger(__name__)


def main(job_id: str) -> None:
    settings = Settings()
    logging.setup(settings.log_level)
    orders = Orders()
    obey_signals(orders)
    adopt_orphans()
    services = Services(settings)
    try:
        supervise(services, job_id, launcher=LocalLauncher(), orders=orders)
    finally:
        services.close()


def supervise(services: Services, job_id: str, *, launcher: Launcher, orders: Orders) -> Outcome | None:
    """Claim the job and see its attempt through; None if there was nothing to claim."""
    node = services.settings.node_name
    # Which process it is, for a person who reads the row.
    holder = f"{node}:{os.getpid()}:{secrets.token_hex(4)}"
    claimed_at = monotonic()
    with services.db.session() as session:
        job = jobs.claim(session, job_id, holder, services.settings.lease, node=node)
        if job is not None:
            job = jobs.refit(session, job, settings=services.settings)
    if job is None or job.state in TERMINAL:
        log.info("nothing to run", job=job_id)
        return None
    with structlog.contextvars.bound_contextvars(job=job_id, attempt=job.attempt):
        log.info("attempt claimed", holder=holder)
        mirror.start(services.settings, job)
        with Lease(services, job, orders, claimed_at=claimed_at) as lease:
            return Attempt(services, job, launcher=launcher, orders=orders, lease=lease).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
