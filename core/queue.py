"""Send Celery messages without knowing the workers' code.

A message is a hint: when the broker is away it is not sent, and upkeep sends again.
"""

from __future__ import annotations

from functools import cached_property

import structlog
from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from core.once import Once
from core.settings import Settings

log = structlog.get_logger(__name__)

TICK = "workers.tasks.tick"
RUN_JOB = "workers.tasks.run_job"
CONTROL = "control"
"""Queue of what any host may do."""

_PATIENCE_SECONDS = 1.0
_MOMENT_SECONDS = 0.1
"""One look at the queue sees all that was committed before it: more looks in so short a time would see the same."""


def node_queue(node: str) -> str:
    """Queue of what only this host can do."""
    return f"node.{node}"


def broker_url(settings: Settings) -> str:
    """Celery's spelling of the broker's URL."""
    return settings.redis.replace("unix://", "redis+socket://", 1)


class Queue:
    """A producer. None of its calls raises, or takes longer than about a second."""

    def __init__(self, settings: Settings) -> None:
        self._url = broker_url(settings)
        self._nudges = Once(lambda: self._send(TICK, [], CONTROL), moment_seconds=_MOMENT_SECONDS)

    def nudge(self) -> None:
        """Let somebody look what can be scheduled, once for all that a busy moment brings."""
        self._nudges.ask()

    def start(self, job_id: str, node: str) -> None:
        """Let `node` start a job that was placed there."""
        self._send(RUN_JOB, [job_id], node_queue(node))

    def _send(self, task: str, args: list[str], queue: str) -> None:
        try:
            self._celery.send_task(task, args, queue=queue, ignore_result=True, retry=False)
        except (OperationalError, RedisError, OSError) as error:
            log.warning("message not sent", task=task, args=args, queue=queue, reason=str(error))

    def close(self) -> None:
        self._nudges.finish()
        self._celery.close()

    @cached_property
    def _celery(self) -> Celery:
        # Made on first use: its connections must not be shared over a fork.
        app = Celery("trainshed", broker=self._url, set_as_current=False)
        app.conf.update(
            broker_connection_retry=False,
            broker_transport_options={
                "socket_timeout": _PATIENCE_SECONDS,
                "socket_connect_timeout": _PATIENCE_SECONDS,
                "max_retries": 0,
            },
            task_serializer="json",
        )
        return app
