"""Remove a job that has ended, with all that it left: rows, content, and the models that its files are."""

from __future__ import annotations

from functools import partial

from sqlalchemy import and_, delete, or_, select
from sqlalchemy.orm import Session

from core import audit, catalog, hints, jobs, result_files
from core.db import after_commit
from core.errors import InUse
from core.keys import Account
from core.models import Checkpoint, CheckpointPermission, File, Job, Model
from core.states import TERMINAL
from core.storage import Storage


def remove(session: Session, storage: Storage, owner: Account, job_id: str, *, force: bool = False) -> None:
    """Remove a job of the owner's; InUse before it has ended, and while anything that came of it is needed.

    What it used of the slots stays counted. `force` takes away what would stay for others: checkpoints that another
    project may use or has trained on, or that adapters of this one are on which no models were made of.
    """
    # The job first, as whoever retries it or gives its result a name does.
    job = jobs.own_locked(session, owner, job_id)
    if job.state not in TERMINAL:
        raise InUse(f"The job is {job.state}; cancel it first, or wait for its end.", param="job_id")
    # Then what others may start from: whoever just does is seen below, or does not find it.
    models = session.scalars(select(Model).where(Model.job_id == job_id).order_by(Model.key).with_for_update()).all()
    own = select(Checkpoint).where(Checkpoint.job_id == job_id).order_by(Checkpoint.id)
    checkpoints = [checkpoint.id for checkpoint in session.scalars(own.with_for_update())]
    on_it = select(Job.id).where(
        Job.id != job_id,
        or_(
            Job.base_model.in_(checkpoints),
            and_(Job.project_id == job.project_id, Job.base_model.in_([model.id for model in models])),
        ),
    )
    ours = on_it.where(Job.project_id == job.project_id)
    catalog.check_unneeded(session, ours, "what this job made", force=force, param="job_id")
    # Of another project's no more is told than that they are there.
    others = on_it.where(Job.project_id != job.project_id).limit(1)
    if session.scalars(others.where(Job.state.not_in(TERMINAL))).first():
        raise InUse(
            "Another project trains on a checkpoint of this job; delete it once that has ended.", param="job_id"
        )
    if not force and session.scalars(others).first():
        raise InUse(
            "Another project trained on a checkpoint of this job, and may need it. Keep it, or delete it all the same "
            "with `force=true`.",
            param="job_id",
        )
    shared = select(CheckpointPermission.checkpoint_id).where(CheckpointPermission.checkpoint_id.in_(checkpoints))
    if not force and (checkpoint := session.scalars(shared.limit(1)).first()):
        raise InUse(
            f"Another project may use {checkpoint} of this job. Take that permission away first, or delete the job all "
            "the same with `force=true`.",
            param="job_id",
        )
    for model in models:
        session.delete(model)
    session.execute(delete(File).where(File.id == result_files.file_id(job_id), File.purpose == result_files.PURPOSE))
    session.flush()
    # History, numbers, checkpoints and the list of its files go with the row.
    session.delete(job)
    audit.record(session, owner, "job.deleted", job_id, name=job.name, kind=job.kind)
    session.flush()
    after_commit(session, partial(storage.delete_tree, f"jobs/{job_id}"))
    hints.ring(session, job_id)
