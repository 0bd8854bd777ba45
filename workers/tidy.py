"""What attempts leave on this host's disk, and when it goes: logs to storage first, then the run directory.

Of a job that was deleted all goes at once.
"""

from __future__ import annotations

import re
import shutil
import time
from datetime import timedelta
from pathlib import Path

import structlog

from core import filelocks, joblogs
from core.models import Job
from core.services import Services
from core.settings import Settings
from core.states import TERMINAL

log = structlog.get_logger(__name__)

KEEP_SUPERVISOR_LOG = timedelta(days=7)
_JOB = re.compile(r"(?:ft)?job-[0-9a-f]+")
"""What is called otherwise, such as `lost+found` of a disk, is not ours to remove."""


def run_dir(settings: Settings, job_id: str, attempt: int) -> Path:
    """Where an attempt works."""
    return settings.runs / job_id / str(attempt)


def starting(folder: Path, attempt: int) -> Path:
    """What a supervisor that was started for an attempt holds a lock on, for as long as it lives."""
    return folder / f"starting-{attempt}"


def is_alive(folder: Path) -> bool:
    """Whether a supervisor of some attempt of this job's `folder` lives."""
    for path in folder.glob("starting-*"):
        with path.open("r+b") as lock:
            if not filelocks.take(lock):
                return True
    return False


def tidy_job(services: Services, job_id: str) -> None:
    """Remove the run directories of this job's attempts that are over; their logs stay readable. Of no job, all."""
    folder = services.settings.runs / job_id
    with services.db.reading() as session:
        job = session.get(Job, job_id)
    if job is None:
        # Where one is at work, it is rather this database that is not the one of before.
        if folder.is_dir() and not is_alive(folder):
            shutil.rmtree(folder)
            log.info("folder of a deleted job removed", job=job_id)
        return
    for attempt in sorted(int(path.name) for path in folder.glob("[0-9]*") if path.is_dir()):
        if is_over(job, attempt):
            work = run_dir(services.settings, job_id, attempt)
            joblogs.keep(services.storage, job_id, attempt, work / "logs")
            shutil.rmtree(work)
            # Once it is over, nobody is started for it any more.
            starting(folder, attempt).unlink(missing_ok=True)
            log.info("run directory removed", job=job_id, attempt=attempt)


def clear(run_dir: Path) -> None:
    """Remove what only the attempt itself could use, when it has ended and may write nothing any more.

    Whoever is next starts elsewhere. Where the disk is full this is what fills it, and as long as it does no row can
    be written that would let anyone else remove it. The logs wait for the node.
    """
    for path in run_dir.iterdir() if run_dir.is_dir() else ():
        if path.name == "logs":
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def is_over(job: Job, attempt: int) -> bool:
    """Whether nobody works, or will work, in this attempt's run directory."""
    # One above the row's is being claimed while we look.
    return attempt < job.attempt or (attempt == job.attempt and job.holder is None)


def tidy_host(services: Services) -> None:
    """The same for every job that ever ran here: a supervisor that was killed could not do it itself."""
    if not services.settings.runs.is_dir():
        return
    for folder in services.settings.runs.iterdir():
        if not _JOB.fullmatch(folder.name):
            continue
        try:
            tidy_job(services, folder.name)
            if is_old(folder) and is_terminal(services, folder.name):
                shutil.rmtree(folder)
        except Exception:  # whatever storage, disk or database may raise over one job, the others' folders go
            log.warning("run directories not removed", job=folder.name, exc_info=True)


def is_old(folder: Path) -> bool:
    return folder.is_dir() and time.time() - folder.stat().st_mtime > KEEP_SUPERVISOR_LOG.total_seconds()


def is_terminal(services: Services, job_id: str) -> bool:
    with services.db.reading() as session:
        job = session.get(Job, job_id)
    return job is not None and job.state in TERMINAL
