"""Tell Weights & Biases of a job for as long as one attempt runs it: `python -m workers.mirror JOB_ID ATTEMPT`.

A process of its own that reads rows as any client could and writes none: whatever becomes of it, the job goes on.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any, Protocol

import structlog

from core import events, openai_jobs
from core import log as logging
from core.db import AWAY
from core.models import Job, JobEvent
from core.services import Services
from core.settings import Settings
from core.states import HELD, TERMINAL, JobState

log = structlog.get_logger(__name__)

LOOK_SECONDS = 2.0
"""How often it looks for news."""
NO_NUMBERS = frozenset({"step", "total_steps"})
QUIET = {
    "silent": True, "console": "off", "disable_git": True, "disable_code": True, "disable_job_creation": True,
    "x_disable_stats": True, "x_disable_machine_info": True,
}  # fmt: skip
"""Of this process, its host and our code nothing is sent."""


class Run(Protocol):
    """What is needed of `wandb.Run`."""

    step: int
    """The first step that it has not been told of: not 0 where an earlier attempt told it some."""

    def log(self, data: dict[str, Any], step: int) -> None: ...
    def mark_preempting(self) -> None: ...
    def finish(self, exit_code: int) -> None: ...


def start(settings: Settings, job: Job) -> bool:
    """Start a mirror for the attempt that `job` is in, if there is one to be told and a key; whether it did."""
    if settings.wandb_api_key is None or not job.spec.get("integrations"):
        return False
    if find_spec("wandb") is None:
        log.warning("no mirror, as the package wandb is not installed", job=job.id)
        return False
    folder = settings.runs / job.id
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "mirror.log").open("ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "workers.mirror", job.id, str(job.attempt)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    Thread(target=child.wait, name=f"mirror-{job.id}", daemon=True).start()
    return True


def main(job_id: str, attempt: str) -> None:
    settings = Settings()
    logging.setup(settings.log_level)
    with Services(settings) as services:
        mirror(services, job_id, int(attempt), open_=lambda job: opened(settings, job))


def mirror(services: Services, job_id: str, attempt: int, *, open_: Callable[[Job], Sequence[Run]]) -> None:
    """Pass on what happens until the attempt no longer holds the job."""
    with services.db.reading() as session:
        runs = open_(session.get_one(Job, job_id))
    seen = 0
    while True:
        try:
            with services.db.reading() as session:
                job = session.get_one(Job, job_id)
                news = events.since(session, job_id, seen)
        except AWAY as error:
            log.warning("no news now", error=str(error))
            sleep(LOOK_SECONDS)
            continue
        for run in runs:
            tell(run, news)
        if news:
            seen = news[-1].seq
        elif job.attempt != attempt or job.state not in HELD:
            break
        else:
            sleep(LOOK_SECONDS)
    for run in runs:
        if job.state not in TERMINAL:
            # Another attempt goes on with it.
            run.mark_preempting()
        run.finish(exit_code=0 if job.state is JobState.SUCCEEDED else 1)


def tell(run: Run, news: Sequence[JobEvent]) -> None:
    for event in news:
        if openai_jobs.is_metrics(event) and event.data["step"] >= run.step:
            run.log(numbers(event), step=event.data["step"])


def numbers(event: JobEvent) -> dict[str, float]:
    """What was measured, under the names that OpenAI's events have too."""
    known = openai_jobs.event_data(event, total_steps=None)
    return {
        name: value
        for name, value in known.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in NO_NUMBERS
    }


def opened(settings: Settings, job: Job) -> list[Run]:
    """A run for each integration. Its id is the job's, so that a later attempt goes on with it."""
    import wandb

    folder = settings.data_dir.absolute() / "wandb"
    folder.mkdir(parents=True, exist_ok=True)
    return [
        wandb.init(
            **place(job, integration["wandb"]),
            id=job.id,
            config=config(job),
            dir=Path(folder),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(api_key=settings.wandb_api_key, **QUIET),
        )
        for integration in job.spec["integrations"]
    ]


def place(job: Job, said: Mapping[str, Any]) -> dict[str, Any]:
    """Where it goes, as the job says."""
    return {
        "project": said["project"],
        "entity": said.get("entity"),
        "name": said.get("name") or job.id,
        "tags": list(said.get("tags", ())),
    }


def config(job: Job) -> dict[str, Any]:
    """What tells one run from another; nothing of the data but the files' ids."""
    return {
        "job": job.id,
        "base": job.base_model,
        "spec": job.spec,
        "training": job.run_config["training"],
        "parallel": job.run_config["parallel"],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
