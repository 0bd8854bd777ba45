"""Whether the parts that a job needs are there, in words that say what to do; and how many jobs are where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import redis
from redis.exceptions import RedisError
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from core import nodes, schema
from core.models import Job, Node, Slot, database_now
from core.placing import NO_WORKER, rest_in_words
from core.services import Services
from core.states import JobState

OK = "ok"
_PATIENCE_SECONDS = 1.0


def checks(services: Services) -> dict[str, str]:
    """`ok`, or what is wrong, for each part."""
    database = _database(services)
    return {
        "database": database,
        "broker": broker(services),
        "worker": _worker(services) if database == OK else "can't be told without the database",
    }


def jobs_by_state(session: Session) -> dict[JobState, int]:
    """How many jobs there are in each state that has any."""
    counted = session.execute(select(Job.state, func.count()).group_by(Job.state))
    return {JobState(state): count for state, count in counted}


@dataclass(frozen=True)
class Standing:
    """What the table says of the whole service, whoever it belongs to."""

    jobs: Mapping[JobState, int]
    held_slots: int
    free_slots: int
    """Of hosts that take jobs."""
    heartbeat_ages: Mapping[str, float]
    """Seconds since each host was heard of."""


def standing(session: Session) -> Standing:
    """Jobs by state, slots and hosts."""
    taking = [node.name for node in nodes.alive(session)]
    ages = session.execute(select(Node.name, database_now() - Node.heartbeat_at))
    free = select(func.count()).where(Slot.job_id.is_(None), Slot.node.in_(taking))
    return Standing(
        jobs=jobs_by_state(session),
        held_slots=session.scalar(select(func.count()).where(Slot.job_id.is_not(None))) or 0,
        free_slots=session.scalar(free) or 0,
        heartbeat_ages={name: max(0.0, age) for name, age in ages},
    )


def _database(services: Services) -> str:
    try:
        current = schema.is_current(services.db.engine)
    except SQLAlchemyError as error:
        return f"can't be reached: {type(error).__name__}"
    return OK if current else "its schema is not this version's: run `trainshed migrate`"


def broker(services: Services) -> str:
    """`ok`, or what is wrong with it."""
    try:
        with redis.Redis.from_url(
            services.settings.redis, socket_timeout=_PATIENCE_SECONDS, socket_connect_timeout=_PATIENCE_SECONDS
        ) as client:
            client.ping()
    except (RedisError, OSError) as error:
        return f"can't be reached: {type(error).__name__}"
    return OK


def _worker(services: Services) -> str:
    with services.db.reading() as session:
        if nodes.alive(session):
            return OK
        resting = nodes.resting(session)
    return rest_in_words(resting) if resting else NO_WORKER
