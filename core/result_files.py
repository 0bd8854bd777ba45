"""A job's losses by step, in CSV, as a file of its project: what OpenAI's jobs leave for `fine-tune-results`.

It comes with a fine-tune's result: `artifacts.publish` stores it, then lists it.
"""

from __future__ import annotations

import csv
import hashlib
import heapq
import io
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core import metrics
from core.db import after_commit
from core.models import File, Job
from core.services import Services
from core.storage import CHUNK_BYTES, Storage

PURPOSE = "fine-tune-results"
COLUMNS = {
    "train_loss": "loss",
    "train_accuracy": "token_accuracy",
    "valid_loss": "validation_loss",
    "valid_mean_token_accuracy": "validation_token_accuracy",
}
"""Column, and the metric it is; `step` stands before them."""


@dataclass(frozen=True)
class Table:
    """One that is stored."""

    storage_key: str
    bytes: int
    sha256: str


def file_id(job_id: str) -> str:
    """The job's own, so that a later attempt replaces it."""
    return f"file-{job_id.partition('-')[2]}"


def store(services: Services, job: Job, prefix: str) -> Table:
    """Put the table beneath `prefix`; nobody sees it yet. It is made on disk: a long job has a million steps."""
    key, digest, size = f"{prefix}/results.csv", hashlib.sha256(), 0
    with tempfile.TemporaryFile(prefix="trainshed-results-") as spool:
        with services.db.reading() as session:
            for line in table(steps(session, job.id)):
                spool.write(line)
                digest.update(line)
                size += len(line)
        spool.seek(0)
        services.storage.put_stream(key, iter(partial(spool.read, CHUNK_BYTES), b""))
    return Table(key, size, digest.hexdigest())


def list_(session: Session, storage: Storage, job: Job, stored: Table) -> None:
    """Make it a file of the job's project, in the place of an earlier attempt's."""
    file = session.get(File, file_id(job.id))
    if file is None:
        file = File(
            id=file_id(job.id),
            project_id=job.project_id,
            filename="step_metrics.csv",
            purpose=PURPOSE,
            report={"format": None, "errors": [], "warnings": []},
        )
        session.add(file)
    elif file.storage_key != stored.storage_key:
        after_commit(session, partial(storage.delete, file.storage_key))
    file.storage_key, file.bytes, file.sha256 = stored.storage_key, stored.bytes, stored.sha256


def of_jobs(session: Session, job_ids: Collection[str]) -> dict[str, str]:
    """The file's id for each of these jobs that has one; its owner may have deleted it."""
    by_id = {file_id(job_id): job_id for job_id in job_ids}
    found = session.scalars(select(File.id).where(File.id.in_(by_id), File.purpose == PURPOSE))
    return {by_id[id_]: id_ for id_ in found}


def steps(session: Session, job_id: str) -> Iterator[tuple[int, dict[str, float]]]:
    """What is known of each step, by metric; one step after another."""
    curves = (_named(metric, metrics.each(session, job_id, metric)) for metric in COLUMNS.values())
    for step, points in groupby(heapq.merge(*curves), key=itemgetter(0)):
        yield step, {metric: value for _, metric, value in points}


def _named(metric: str, points: Iterable[metrics.Point]) -> Iterator[tuple[int, str, float]]:
    return ((step, metric, value) for step, value in points)


def table(steps: Iterable[tuple[int, Mapping[str, float]]]) -> Iterator[bytes]:
    """In CSV, line by line; a field is empty where nothing was measured."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    told = ([step, *(known.get(metric, "") for metric in COLUMNS.values())] for step, known in steps)
    for row in chain[list[Any]]([["step", *COLUMNS]], told):
        rows.writerow(row)
        yield text.getvalue().encode("ascii")
        text.seek(0)
        text.truncate()
