"""Remove a job that has ended, with all that it left: rows, content, and the models that its files are.

The job itself, and what could be found without it, goes in one transaction: from then on nobody sees any of it. Its
history and numbers may be millions of rows, and its content as many objects: they go piece by piece afterwards. What is
left of a job is `removals`' to know, so whoever is killed on the way has the next one go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sqlalchemy import and_, delete, or_, select, tuple_
from sqlalchemy.orm import Session

from core import audit, catalog, hints, jobs, result_files
from core.db import after_commit
from core.errors import InUse
from core.keys import Account
from core.models import Checkpoint, CheckpointPermission, File, Job, JobEvent, Metric, MetricChunk, Model, Removal
from core.services import Services
from core.states import TERMINAL, UNENDED

AFTERWARDS = (JobEvent, MetricChunk, Metric)
"""What hangs on a job and goes after it."""
ROWS_AT_ONCE = 500
"""Of these, in one transaction: on SQLite everybody else who writes waits for it."""
OBJECTS_AT_ONCE = 100
"""Of its content: the request that deletes the job waits for as many, and so does upkeep's next duty."""


def remove(session: Session, services: Services, owner: Account, job_id: str, *, force: bool = False) -> None:
    """Remove a job of the owner's; InUse before it has ended, and while anything that came of it is needed.

    Of a small one nothing is left once the session has committed; of a large one `go_on` removes the rest. What it used
    of the slots stays counted. `force` takes away what would stay for others: checkpoints that another project may use
    or has trained on, or that adapters of this one are on which no models were made of.
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
    if session.scalars(others.where(Job.state.in_(UNENDED))).first():
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
    # Checkpoints, labels and the list of its files go with the row.
    session.delete(job)
    session.add(Removal(job_id=job_id))
    audit.record(session, owner, "job.deleted", job_id, name=job.name, kind=job.kind)
    session.flush()
    after_commit(session, partial(go_on, services, job_id))
    hints.ring(session, job_id)


def unfinished(session: Session) -> Sequence[str]:
    """Jobs that were removed and of which something is left, the one that has waited longest first."""
    return session.scalars(select(Removal.job_id).order_by(Removal.created_at, Removal.job_id)).all()


def go_on(services: Services, job_id: str) -> bool:
    """Remove one more piece of what is left of a removed job; whether that was all. Two at once take turns."""
    with services.db.session() as session:
        # Else the other one's rows would be found, waited for and gone: too few to tell that there are more.
        row = select(Removal.job_id).where(Removal.job_id == job_id).with_for_update()
        if session.scalars(row).one_or_none() is None:
            return True
        room = ROWS_AT_ONCE
        for kind in AFTERWARDS:
            room -= _remove_some(session, kind, job_id, most=room)
    if room == 0:
        return False
    if not services.storage.delete_some(f"jobs/{job_id}", most=OBJECTS_AT_ONCE):
        return False
    with services.db.session() as session:
        session.execute(delete(Removal).where(Removal.job_id == job_id))
    return True


def _remove_some(session: Session, kind: type[JobEvent | MetricChunk | Metric], job_id: str, *, most: int) -> int:
    if most == 0:
        return 0
    key = kind.__mapper__.primary_key
    some = select(*key).where(kind.job_id == job_id).limit(most)
    gone = delete(kind).where(tuple_(*key).in_(some)).returning(kind.job_id)
    return len(session.execute(gone.execution_options(synchronize_session=False)).all())
