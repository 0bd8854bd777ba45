"""The parts that a process of the service works with, opened once and passed down."""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType
from typing import Self

from core.bell import Bell
from core.db import Database
from core.queue import Queue
from core.sampling import Sampler
from core.settings import Settings
from core.storage import PATIENCE, Storage, open_storage
from core.throttle import Throttle


class Services:
    """Database, storage, queue, bell, throttle and sampler, as the settings say. Nothing connects before it is used."""

    def __init__(self, settings: Settings, *, storage_patience: timedelta = PATIENCE) -> None:
        self.settings = settings
        self.queue = Queue(settings)
        self.bell = Bell(settings.redis)
        self.throttle = Throttle(settings.redis, per_minute=settings.requests_per_minute)
        self.sampler = Sampler(settings.redis)
        self.db = Database(settings.database, hints=Messengers(self.queue, self.bell))
        self.storage: Storage = open_storage(settings.storage, patience=storage_patience)

    def close(self) -> None:
        self.db.close()
        self.queue.close()
        self.bell.close()
        self.throttle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Messengers:
    """`core.hints.Hints` by way of the queue and the bell."""

    def __init__(self, queue: Queue, bell: Bell) -> None:
        self.nudge = queue.nudge
        self.start = queue.start
        self.ring = bell.ring
