"""Take hold of a job and see one attempt through, in a process of its own: `python -m workers.supervisor JOB_ID`."""

from __future__ import annotations

import os
import secrets
import sys
from time import monotonic

import structlog

from core import jobs
from core import log as logging
from core.errors import InvalidMove
from core.models import Job
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
    if job is None:
        log.info("nothing to run", job=job_id)
        return None
    with structlog.contextvars.bound_contextvars(job=job_id, attempt=job.attempt):
        log.info("attempt claimed", holder=holder)
        with Lease(services, job, orders, claimed_at=claimed_at) as lease:
            fit = fitted(services, job)
            if fit is None:
                return None
            mirror.start(services.settings, fit)
            return Attempt(services, fit, launcher=launcher, orders=orders, lease=lease).run()


def fitted(services: Services, job: Job) -> Job | None:
    """The job as it runs on this host; None where it can't, or was taken back before that was known."""
    try:
        with services.db.session() as session, services.db.reading() as reading:
            job = jobs.refit(session, job, settings=services.settings, reading=reading)
    except InvalidMove as refusal:
        log.info("nothing to run any more", reason=str(refusal))
        return None
    if job.state in TERMINAL:
        log.info("nothing to run", state=job.state.value)
        return None
    return job


if __name__ == "__main__":
    main(*sys.argv[1:])
