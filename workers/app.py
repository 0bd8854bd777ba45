"""The Celery app. Its messages only ever say "look"; everything here keeps it from promising more than that."""

from __future__ import annotations

from functools import cache
from typing import Any

from celery import Celery
from celery.signals import setup_logging

from core import log
from core.queue import broker_url
from core.services import Services
from core.settings import Settings

CONFIG: dict[str, Any] = {
    # A message is acknowledged when it arrives and its task is over in a moment: there is nothing to redeliver, and the
    # hour after which Redis redelivers what was not acknowledged never begins.
    "task_acks_late": False,
    "task_reject_on_worker_lost": False,
    "worker_prefetch_multiplier": 1,
    "worker_disable_prefetch": True,
    # Nobody reads results; a result backend would keep each for a day.
    "task_ignore_result": True,
    "task_store_errors_even_if_ignored": False,
    # Redis may be away for as long as it likes.
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    "broker_transport_options": {"socket_connect_timeout": 5, "socket_timeout": 30, "health_check_interval": 10},
    "worker_cancel_long_running_tasks_on_connection_loss": False,
    # Nobody sends remote commands either: a job is cancelled in its row, where it can't be missed.
    "worker_enable_remote_control": False,
    "worker_send_task_events": False,
    "task_serializer": "json",
    "accept_content": ["json"],
    "enable_utc": True,
    "task_time_limit": 60,
}
"""For whoever changes one of these: tests/faults shows what each is good for."""


def make(settings: Settings) -> Celery:
    """An app on the broker in force."""
    made = Celery("trainshed", broker=broker_url(settings), include=["workers.tasks"])
    made.conf.update(CONFIG)
    return made


@cache
def services() -> Services:
    """The service's parts, opened in the pool's process that first needs them: connections don't survive a fork."""
    return Services(Settings())


@setup_logging.connect  # type: ignore[untyped-decorator]
def _log_as_the_rest_does(**unused: Any) -> None:
    log.setup(Settings().log_level)


app = make(Settings())
