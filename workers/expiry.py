"""Remove what has had its time, rows and content: expired files, what killed uploads left, old messages."""

from __future__ import annotations

from time import monotonic

import structlog

from core import downloads, files, outbox, retention, uploads, visits
from core.services import Services
from workers.duties import Duty, keep
from workers.orders import Orders

log = structlog.get_logger(__name__)

EXPIRE_SECONDS = 30.0
FORGET_SECONDS = 600.0
RETENTION_SECONDS = 3600.0
SWEEP_SECONDS = 3600.0
"""All content in storage is listed for it."""


class Expiry:
    """Apart from upkeep's other duties: many objects take long to remove, and a job in need can't wait for that."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.duties = (
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

    def expire_files(self) -> None:
        for id_ in files.expire(self.services.db, self.services.storage):
            log.info("file expired", file=id_)

    def sweep_files(self) -> None:
        for key in files.sweep(self.services.db, self.services.storage):
            log.warning("content without a file removed", key=key)

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
