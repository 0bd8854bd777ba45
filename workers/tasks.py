"""What messages set off. Each task is short, may run twice or not at all, and leaves the deciding to the rows."""

from __future__ import annotations

import subprocess
import sys
from threading import Thread

import structlog

from core import filelocks, jobs, scheduler
from core.queue import RUN_JOB, TICK
from core.settings import Settings
from workers.app import app, services
from workers.rest import Rest
from workers.tidy import starting

log = structlog.get_logger(__name__)

REST = Rest(times=4.0, unless_seconds=0.025, most_seconds=2.0)
"""Of a worker's process between two looks that messages set off.

While many submit to a long line, looks that follow one another would keep them from writing. Upkeep looks every second.
"""
SUPERVISOR = (sys.executable, "-m", "workers.supervisor")


@app.task(name=TICK)  # type: ignore[untyped-decorator]
def tick() -> None:
    """Place what can be placed; later, where that took long a moment ago."""
    if REST.seconds_left:
        return
    with REST.after(), services().db.session() as session:
        scheduler.tick(session, half_life=services().settings.fair_share_half_life)


@app.task(name=RUN_JOB)  # type: ignore[untyped-decorator]
def run_job(job_id: str) -> None:
    """Start a supervisor for this job, unless it is claimed or one is on its way. Of several, one would claim it."""
    settings = services().settings
    with services().db.reading() as session:
        attempt = jobs.awaited_attempt(session, job_id, node=settings.node_name)
    if attempt is None:
        return
    pid = start_supervisor(settings, job_id, attempt)
    log.info("supervisor started" if pid else "supervisor is on its way", job=job_id, attempt=attempt, pid=pid)


def start_supervisor(settings: Settings, job_id: str, attempt: int) -> int | None:
    """Start a supervisor in a session of its own, so that it lives on when this worker dies; its pid.

    None where one that was started for the same attempt still lives: on a crowded host it takes long to claim its job,
    and each one more would make that longer. Celery's children are daemonic and are killed with the worker, so it is
    none of `multiprocessing`'s.
    """
    folder = settings.runs / job_id
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "supervisor.log").open("ab") as output, starting(folder, attempt).open("wb") as lock:
        if not filelocks.take(lock):
            return None
        # It inherits the lock, which ends when it has.
        child = subprocess.Popen(
            [*SUPERVISOR, job_id],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, pass_fds=(lock.fileno(),),
        )  # fmt: skip
    # Someone has to fetch its exit code as long as this process lives, else it stays in the process table.
    Thread(target=child.wait, name=f"wait-{job_id}", daemon=True).start()
    return child.pid
