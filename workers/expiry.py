"""Remove what has had its time, rows and content: expired files, the rest of deleted jobs, what killed uploads left."""

from __future__ import annotations

from collections import deque
from time import monotonic, sleep

import structlog

from core import downloads, files, jobs, outbox, removal, retention, uploads, visits
from core.services import Services
from workers.duties import Duty, keep
from workers.orders import Orders
from workers.rest import Rest

log = structlog.get_logger(__name__)

EXPIRE_SECONDS = 30.0
FORGET_SECONDS = 600.0
RETENTION_SECONDS = 3600.0
SWEEP_SECONDS = 3600.0
"""All content in storage is listed for it."""
REMOVE_SECONDS = 2.0
"""How often the rest of deleted jobs is looked for, and how long it is removed before other duties have a turn."""
NEVER = (0, 0.0)
"""How often, and until when, what never failed waits."""
REST_PER_PIECE, LONGEST_REST = 2.0, 0.5
"""Times as long as a piece took, and seconds at most, nothing is removed: others have to write as well."""


class Expiry:
    """Apart from upkeep's other duties: many objects take long to remove, and a job in need can't wait for that."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.put_off: dict[str, tuple[int, float]] = {}
        """Deleted jobs whose rest could not be removed: how often in a row, and until when, on the monotonic clock."""
        self.duties = (
            Duty("finish removals", REMOVE_SECONDS, self.finish_removals),
            Duty("expire files", EXPIRE_SECONDS, self.expire_files),
            Duty("sweep files", SWEEP_SECONDS, self.sweep_files),
            Duty("sweep bases", SWEEP_SECONDS, self.sweep_bases),
            Duty("expire uploads", EXPIRE_SECONDS, self.expire_uploads),
            Duty("forget uploads", FORGET_SECONDS, self.forget_uploads),
            Duty("retention", RETENTION_SECONDS, self.retention, due_at=monotonic() + RETENTION_SECONDS),
            Duty("forget webhooks", FORGET_SECONDS, self.forget_webhooks),
            Duty("forget visits", FORGET_SECONDS, self.forget_visits),
        )

    def run(self, orders: Orders) -> None:
        keep(self.duties, orders)

    def finish_removals(self) -> None:
        """Remove what is left of deleted jobs, piece by piece, some of each in turn; what fails, later and later."""
        now = monotonic()
        until = now + REMOVE_SECONDS
        with self.services.db.reading() as session:
            unfinished = removal.unfinished(session)
        self.put_off = {job_id: self.put_off[job_id] for job_id in unfinished if job_id in self.put_off}
        left = deque(job_id for job_id in unfinished if self.put_off.get(job_id, NEVER)[1] <= now)
        rest = Rest(times=REST_PER_PIECE, most_seconds=LONGEST_REST)
        while left and monotonic() < until:
            job_id = left.popleft()
            try:
                with rest.after():
                    is_all = removal.go_on(self.services, job_id)
            except Exception as error:  # whatever storage or database may raise over one job, the others' rest goes
                failures = self.put_off.get(job_id, NEVER)[0] + 1
                wait = jobs.back_off(failures)
                self.put_off[job_id] = (failures, monotonic() + wait)
                # The stack once: as long as it fails, an hour of them would tell no more.
                told = {"job": job_id, "error": str(error), "again_in_seconds": wait}
                log.warning("the rest of a deleted job not removed", exc_info=failures == 1, **told)
                continue
            self.put_off.pop(job_id, None)
            if is_all:
                log.info("the rest of a deleted job removed", job=job_id)
            else:
                left.append(job_id)
            sleep(rest.seconds_left)

    def expire_files(self) -> None:
        for id_ in files.expire(self.services.db, self.services.storage):
            log.info("file expired", file=id_)

    def sweep_files(self) -> None:
        for key in files.sweep(self.services.db, self.services.storage):
            log.warning("content without a file removed", key=key)
        for key in self.services.storage.remove_begun(files.ORPHANED_AFTER):
            log.warning("content that never became whole removed", key=key)

    def sweep_bases(self) -> None:
        for key in downloads.sweep(self.services.db, self.services.storage):
            log.info("content of a base that is gone removed", model=key)

    def expire_uploads(self) -> None:
        for id_ in uploads.expire(self.services.db, self.services.storage):
            log.info("upload expired", upload=id_)

    def forget_uploads(self) -> None:
        uploads.forget(self.services.db, self.services.storage)

    def retention(self) -> None:
        for kind, went in retention.sweep(self.services, self.services.settings.rules).items():
            if went.things:
                log.info("kept for long enough", kind=kind, things=went.things, objects=went.objects, bytes=went.bytes)

    def forget_webhooks(self) -> None:
        with self.services.db.session() as session:
            outbox.forget(session)

    def forget_visits(self) -> None:
        with self.services.db.session() as session:
            visits.forget(session)
