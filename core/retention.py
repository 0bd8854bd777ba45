"""Remove what has been kept for long enough, rows and content, or say what would go. How long that is: `stays`.

Nothing goes that somebody may still need: of jobs that have not ended nothing at all, no checkpoint that another job
started from or another project may use, no file that an unfinished job names, and no word of which states a job was in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, Text, and_, cast, delete, func, or_, select
from sqlalchemy.orm import Session

from core import files, joblogs
from core.checkpoints import is_a_base
from core.db import after_commit
from core.models import Artifact, Checkpoint, CheckpointPermission, File, Job, JobEvent, database_now
from core.services import Services
from core.states import TERMINAL
from core.stays import Stay, over
from core.storage import Stored

LEFTOVERS = "leftovers"
"""Content of jobs that have ended or were deleted which no row names: a process was killed between the two."""
LEFT_AFTER = timedelta(days=1)
KEPT_EVENTS = ("state", "changed")
"""Types of events that stay: what became of a job, and what people did to it."""
ROWS_AT_ONCE = 1000
"""Of events, in one transaction."""
OBJECTS_AT_ONCE = 1000
"""Looked up at once, so that they are not all held in memory: there may be millions."""


@dataclass(frozen=True)
class Going:
    """Something that goes, with all that belongs to it."""

    owner: str
    """The job; of a file, the project."""
    id: str
    created_at: float
    objects: int = 0
    """In storage."""
    bytes: int = 0
    """There; of events, of their texts in the database."""
    keys: tuple[str, ...] = ()
    """Of the objects, where they are known one by one."""
    things: int = 1


@dataclass(frozen=True)
class Tally:
    """How much of a kind goes, or went."""

    things: int = 0
    objects: int = 0
    bytes: int = 0


def sweep(services: Services, rules: Mapping[str, Stay], *, dry_run: bool = False) -> dict[str, Tally]:
    """What goes by these rules, by kind: it is gone then, unless this is a dry run. Two at once do no harm."""
    with services.db.reading() as session:
        now = session.scalar(select(database_now())) or 0.0
    tallies = {}
    for kind, stay in {**rules, LEFTOVERS: Stay()}.items():
        find, remove = _KINDS[kind]
        found, tally = iter(find(services, stay, now)), Tally()
        while some := list(islice(found, files.AT_ONCE)):
            for gone in some if dry_run else remove(services, some):
                tally = Tally(tally.things + gone.things, tally.objects + gone.objects, tally.bytes + gone.bytes)
        tallies[kind] = tally
    return tallies


# Checkpoints

_NOBODY_NEEDS = and_(
    Job.state.in_(TERMINAL),
    ~is_a_base(),
    Checkpoint.id.not_in(select(CheckpointPermission.checkpoint_id)),
)


def _checkpoints(services: Services, stay: Stay, now: float) -> Iterable[Going]:
    with services.db.reading() as session:
        found = session.scalars(select(Checkpoint).join(Job).where(_NOBODY_NEEDS)).all()
    things = [Going(row.job_id, row.id, row.created_at, bytes=row.bytes) for row in found]
    prefixes = {row.id: row.storage_prefix for row in found}
    for going in over(things, stay, now):
        keys = tuple(stored.key for stored in services.storage.list(prefixes[going.id]))
        yield Going(going.owner, going.id, going.created_at, len(keys), going.bytes, keys)


def _remove_checkpoint(services: Services, going: Going) -> bool:
    with services.db.session() as session:
        # The job first: whoever retries it waits, and then finds one checkpoint fewer.
        session.execute(select(Job.id).where(Job.id == going.owner).with_for_update())
        # And itself, before it is asked who needs it: whoever will start from it or may use it waits, or is seen.
        session.execute(select(Checkpoint.id).where(Checkpoint.id == going.id).with_for_update())
        query = select(Checkpoint).join(Job).where(Checkpoint.id == going.id, _NOBODY_NEEDS)
        if (checkpoint := session.scalars(query).one_or_none()) is None:
            return False
        session.delete(checkpoint)
        after_commit(session, partial(services.storage.delete_tree, checkpoint.storage_prefix))
    return True


# Logs


def _logs(services: Services, stay: Stay, now: float) -> Iterable[Going]:
    """The logs of an attempt go together; its job ended when it did."""
    ended = _ended(services)
    found: dict[tuple[str, int], list[Any]] = {}
    for stored in services.storage.list("jobs"):
        if (whose := joblogs.whose(stored.key)) is not None and whose[0] in ended:
            found.setdefault(whose, []).append(stored)
    # The newest attempt first: all are as old as their job.
    things = [
        Going(job_id, f"{job_id}/{attempt}", ended[job_id], len(stored), sum(each.bytes for each in stored),
              tuple(each.key for each in stored))
        for (job_id, attempt), stored in sorted(found.items(), reverse=True)
    ]  # fmt: skip
    return over(things, stay, now)


def _remove_objects(services: Services, going: Going) -> bool:
    for key in going.keys:
        services.storage.delete(key)
    return True


def _ended(services: Services) -> dict[str, float]:
    """When each job ended that has."""
    query = select(Job.id, func.coalesce(Job.finished_at, Job.created_at)).where(Job.state.in_(TERMINAL))
    with services.db.reading() as session:
        return {job_id: at for job_id, at in session.execute(query)}


# Events


def _events(services: Services, stay: Stay, now: float) -> Iterable[Going]:
    place = func.row_number().over(partition_by=JobEvent.job_id, order_by=JobEvent.seq.desc())
    texts = func.length(JobEvent.message) + func.length(cast(JobEvent.data, Text))
    may_go = (
        select(JobEvent.job_id, JobEvent.seq, JobEvent.created_at, place.label("place"), texts.label("bytes"))
        .join(Job, Job.id == JobEvent.job_id)
        # The newest stays in any case: who listens knows by it that there is nothing more.
        .where(Job.state.in_(TERMINAL), JobEvent.type.not_in(KEPT_EVENTS), JobEvent.seq < Job.last_event)
        .subquery()
    )
    limits: list[ColumnElement[bool]] = []
    if stay.age is not None:
        limits.append(may_go.c.created_at < now - stay.age.total_seconds())
    if stay.count is not None:
        limits.append(may_go.c.place > stay.count)
    # All that is older goes with one that goes, so the newest of them says where to cut.
    cut = (
        select(may_go.c.job_id, func.max(may_go.c.seq), func.count(), func.sum(may_go.c.bytes))
        .where(or_(*limits))
        .group_by(may_go.c.job_id)
    )
    with services.db.reading() as session:
        return [
            Going(job_id, str(seq), 0.0, bytes=size, things=count)
            for job_id, seq, count, size in session.execute(cut)
        ]  # fmt: skip


def _remove_events(services: Services, going: Going) -> bool:
    oldest = (
        select(JobEvent.seq)
        .where(JobEvent.job_id == going.owner, JobEvent.seq <= int(going.id), JobEvent.type.not_in(KEPT_EVENTS))
        .order_by(JobEvent.seq)
        .limit(ROWS_AT_ONCE)
    )
    while True:
        with services.db.session() as session:
            seqs = session.scalars(oldest).all()
            session.execute(delete(JobEvent).where(JobEvent.job_id == going.owner, JobEvent.seq.in_(seqs)))
        if len(seqs) < ROWS_AT_ONCE:
            return True


# Files


def _files(services: Services, stay: Stay, now: float) -> Iterable[Going]:
    with services.db.reading() as session:
        # What the service writes itself is part of a job's result.
        rows = session.scalars(select(File).where(File.purpose.in_(files.PURPOSES))).all()
        needed = files.needed(session, {file.project_id for file in rows})
    things = [
        Going(file.project_id, file.id, file.created_at, 1, file.bytes, (file.storage_key,))
        for file in rows
        if file.id not in needed
    ]
    return over(things, stay, now)


def _remove_files(services: Services, some: Sequence[Going]) -> Iterable[Going]:
    with services.db.session() as session:
        gone = files.remove_unneeded(session, services.storage, [going.id for going in some])
    return [going for going in some if going.id in gone]


# What no row names


def _leftovers(services: Services, stay: Stay, now: float) -> Iterator[Going]:
    old = services.storage.older("jobs", LEFT_AFTER)
    while some := list(islice(old, OBJECTS_AT_ONCE)):
        with services.db.reading() as session:
            unnamed = _unnamed(session, some)
        for each in unnamed:
            yield Going(_job_of(each), each.key, 0.0, 1, each.bytes, (each.key,))


def _unnamed(session: Session, some: Sequence[Stored]) -> list[Stored]:
    """Those of jobs that have ended which no row names, and all of jobs that are no more."""
    ids = {_job_of(each) for each in some}
    states = {job_id: state for job_id, state in session.execute(select(Job.id, Job.state).where(Job.id.in_(ids)))}
    ended = {job_id for job_id, state in states.items() if state in TERMINAL}
    prefixes = set(session.scalars(select(Checkpoint.storage_prefix).where(Checkpoint.job_id.in_(ended))))
    artifacts = set(session.scalars(select(Artifact.storage_key).where(Artifact.job_id.in_(ended))))
    left = {
        each.key: each
        for each in some
        # jobs/<job>/<attempt>/checkpoints/<step>/…
        if _job_of(each) in ended
        # Logs have no rows.
        and joblogs.whose(each.key) is None
        and each.key not in artifacts
        and "/".join(each.key.split("/")[:5]) not in prefixes
    }
    # A job's files are few, and found by no index: asked for last.
    named = set(session.scalars(select(File.storage_key).where(File.storage_key.in_(left)))) if left else ()
    deleted = [each for each in some if _job_of(each) not in states]
    return [each for key, each in left.items() if key not in named] + deleted


def _job_of(stored: Stored) -> str:
    return stored.key.split("/")[1]


Find = Callable[[Services, Stay, float], Iterable[Going]]
Remove = Callable[[Services, Sequence[Going]], Iterable[Going]]


def _one_by_one(remove: Callable[[Services, Going], bool]) -> Remove:
    return lambda services, some: [going for going in some if remove(services, going)]


_KINDS: dict[str, tuple[Find, Remove]] = {
    "checkpoints": (_checkpoints, _one_by_one(_remove_checkpoint)),
    "logs": (_logs, _one_by_one(_remove_objects)),
    "events": (_events, _one_by_one(_remove_events)),
    "files": (_files, _remove_files),
    LEFTOVERS: (_leftovers, _one_by_one(_remove_objects)),
}
"""What of a kind goes, and how some of it do; that says which did, as somebody may have come to need them."""
