"""What messages set off. Each task is short, may run twice or not at all, and leaves the deciding to the rows."""

from __future__ import annotations

import subprocess
import sys
from threading import Thread

import structlog

from core import scheduler
from core.queue import RUN_JOB, TICK
from core.settings import Settings
from workers.app import app, services

log = structlog.get_logger(__name__)


@app.task(name=TICK)  # type: ignore[untyped-decorator]
def tick() -> None:
    """Place what can be placed."""
    with services().db.session() as session:
        scheduler.tick(session, half_life=services().settings.fair_share_half_life)


@app.task(name=RUN_JOB)  # type: ignore[untyped-decorator]
def run_job(job_id: str) -> None:
    """Start a supervisor for this job. Of several, one claims it and the others leave."""
    pid = start_supervisor(services().settings, job_id)
    log.info("supervisor started", job=job_id, pid=pid)


def start_supervisor(settings: Settings, job_id: str) -> int:
    """Start a supervisor in a session of its own, so that it lives on when this worker dies; its pid.

    Celery's children are daemonic and are killed with the worker, so it is none of `multiprocessing`'s.
    """
    folder = settings.runs / job_id
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "supervisor.log").open("ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "workers.supervisor", job_id],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    # Someone has to fetch its exit code as long as this process lives, else it stays in the process table.
    Thread(target=child.wait, name=f"wait-{job_id}", daemon=True).start()
    return child.pid
