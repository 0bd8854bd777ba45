"""Checkpoints in storage: uploaded by the attempt that made them, listed once whole, and where the next one starts."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Select, func, select
from sqlalchemy.orm import Session, aliased

from core import hints, history, jobs, paging
from core.db import after_commit
from core.errors import NotFound
from core.models import Checkpoint, Job, database_now, new_id
from core.paging import Page
from core.services import Services
from core.storage import Storage, nothing_unlisted, sha256_of

MANIFEST = "manifest.json"
"""The engine's list of a checkpoint's files and their hashes."""
JUST_AFTER = 0.001
"""Seconds between two of a job at the least, so that their times tell their order."""


class GoneBackFrom(Exception):
    """A checkpoint lies beyond the step that its run has gone back to meanwhile."""


def publish(
    services: Services,
    job_id: str,
    *,
    fence: int,
    step: int,
    folder: Path,
    metrics: Mapping[str, Any],
    is_on_the_way: Callable[[], bool] = lambda: True,
) -> Checkpoint:
    """Upload `folder`, then list it, if attempt `fence` still holds the job; InvalidMove otherwise.

    Where it lies beyond all that were ever published, the count of losses starts anew. A later attempt's checkpoint of
    a step takes the place of an earlier one's, unless that was gone back from. `is_on_the_way` is asked while nothing
    can be recorded of the job; GoneBackFrom where it says no.
    """
    prefix = f"jobs/{job_id}/{fence}/checkpoints/step-{step:08d}"

    def listed() -> bool:
        with services.db.reading() as session:
            rows = select(Checkpoint.id).where(Checkpoint.job_id == job_id, Checkpoint.storage_prefix == prefix)
            return session.scalars(rows).first() is not None

    if listed():
        # The attempt went back beyond this step and has come to it again. What is listed stays whole until then.
        prefix += f"-{secrets.token_hex(4)}"

    with nothing_unlisted(partial(services.storage.delete_tree, prefix), listed=listed):
        size = sum(stored.bytes for stored in services.storage.put_tree(prefix, folder))
        with services.db.session() as session:
            job = jobs.held(session, job_id, fence=fence)
            if not is_on_the_way():
                raise GoneBackFrom(f"step {step}")
            return _list(session, services.storage, job, prefix, step=step, size=size, metrics=metrics)


def _list(
    session: Session, storage: Storage, job: Job, prefix: str, *, step: int, size: int, metrics: Mapping[str, Any]
) -> Checkpoint:
    # One that was gone back from has other weights: it stays as it is until `prune`, for whoever starts from it.
    is_it = (Checkpoint.job_id == job.id, Checkpoint.step == step, Checkpoint.abandoned.is_(False))
    checkpoint = session.scalars(select(Checkpoint).where(*is_it)).one_or_none()
    if checkpoint is None:
        checkpoint = Checkpoint(id=new_id("ftckpt"), job_id=job.id, step=step)
        session.add(checkpoint)
    elif checkpoint.storage_prefix != prefix:
        _forget_later(session, storage, checkpoint.storage_prefix)
    checkpoint.attempt, checkpoint.storage_prefix = job.attempt, prefix
    checkpoint.bytes, checkpoint.metrics = size, dict(metrics)
    checkpoint.created_at = _next_time(session, job.id)
    if step > job.saved_step:
        # An attempt that only came back to where an earlier one was is no progress, and may end as that did.
        job.saved_step, job.losses = step, 0
    history.add(
        session,
        job,
        type="checkpoint",
        message=f"step {step}: checkpoint saved",
        data={"id": checkpoint.id, "step": step, "bytes": size, "metrics": dict(metrics)},
    )
    session.flush()
    hints.ring(session, job.id)
    return checkpoint


def _next_time(session: Session, job_id: str) -> float:
    """Now, or just after the newest one of the job, whatever the clock says: going back, steps may come again."""
    now = session.scalars(select(database_now())).one()
    before = session.scalar(select(func.max(Checkpoint.created_at)).where(Checkpoint.job_id == job_id))
    return now if before is None else max(now, before + JUST_AFTER)


def prune(services: Services, job_id: str, *, keep: int, spare: int | None = None) -> None:
    """Forget all but the newest `keep`, that of step `spare`, and those that jobs start from: `is_a_base`.

    Steps beyond the newest's were gone back from: what is there of them is not kept for its age.
    """
    with services.db.session() as session:
        listed = session.scalars(_of_job(job_id)).all()
        sound = [one for one in listed if not one.abandoned]
        on_the_way = [one for one in sound if one.step <= sound[0].step]
        kept = [*on_the_way[:keep], *(one for one in sound if one.step == spare)]
        going = [one.id for one in listed if one not in kept]
        # Locked first: a job that starts from one of them meanwhile either is seen below, or does not find it.
        row = select(Checkpoint.id).where(Checkpoint.id.in_(going)).order_by(Checkpoint.id)
        there = session.scalars(row.with_for_update()).all()
        for old in session.scalars(select(Checkpoint).where(Checkpoint.id.in_(there), ~is_a_base())).all():
            session.delete(old)
            _forget_later(session, services.storage, old.storage_prefix)


def is_a_base() -> ColumnElement[bool]:
    """Whether some job starts from a checkpoint.

    Also one that has ended: its adapter may be a model together with this, and it may be tried again.
    """
    starts = aliased(Job)
    return select(starts.id).where(starts.base_model == Checkpoint.id).exists()


def latest(session: Session, job_id: str) -> Checkpoint | None:
    """Where the next attempt starts; None: at the beginning."""
    return next(iter(newest_first(session, job_id)), None)


def best(session: Session, newest: Checkpoint) -> Checkpoint | None:
    """The one that a job keeps besides, as `newest` knows; None: there is none, or it is `newest`."""
    step = newest.metrics.get("best_step")
    if step is None or step == newest.step:
        return None
    is_it = (Checkpoint.job_id == newest.job_id, Checkpoint.step == step, Checkpoint.abandoned.is_(False))
    return session.scalars(select(Checkpoint).where(*is_it)).one_or_none()


def page(session: Session, job: Job, *, after: str | None = None, limit: int = 10) -> Page[Checkpoint]:
    """A job's checkpoints, newest first."""
    query = select(Checkpoint).where(Checkpoint.job_id == job.id)
    return paging.by_age(session, query, Checkpoint.created_at, Checkpoint.id, after=after, limit=limit)


class Damaged(Exception):
    """A checkpoint in storage is not what was stored; the text says in which way."""


def stage(storage: Storage, checkpoint: Checkpoint, into: Path) -> None:
    """Bring a checkpoint's files to a folder. Damaged where they are not those that were published."""
    try:
        storage.get_tree(checkpoint.storage_prefix, into)
    except NotFound as error:
        raise Damaged("files of it are gone from storage") from error
    found = sum(path.stat().st_size for path in into.rglob("*") if path.is_file())
    if found != checkpoint.bytes:
        raise Damaged(f"its files have {found} bytes, and had {checkpoint.bytes} when it was stored")
    manifest = into / MANIFEST
    try:
        files = json.loads(manifest.read_text()).get("files", ()) if manifest.is_file() else ()
    except ValueError as error:
        raise Damaged(f"its {MANIFEST} can't be read") from error
    for file in files:
        path = into / file["path"]
        if not path.is_file() or sha256_of(path) != file["sha256"]:
            raise Damaged(f"{file['path']} is not what its manifest says")


def newest_first(session: Session, job_id: str) -> Sequence[Checkpoint]:
    """Those that an attempt may go on from, the one published last first.

    A run that went back has later ones of earlier steps.
    """
    return session.scalars(_of_job(job_id).where(Checkpoint.abandoned.is_(False))).all()


def _of_job(job_id: str) -> Select[Checkpoint]:
    by_age = (Checkpoint.created_at.desc(), Checkpoint.step.desc())
    return select(Checkpoint).where(Checkpoint.job_id == job_id).order_by(*by_age)


def _forget_later(session: Session, storage: Storage, prefix: str) -> None:
    # After the commit: a row whose files are gone would be worse than files without a row.
    after_commit(session, lambda: storage.delete_tree(prefix))
