"""How many waiting jobs go before one, in SQL: those of a higher priority, and of the same who lined up earlier.

It is what anybody can know before the scheduler has looked: then each has a number of its own.
"""

from __future__ import annotations

from sqlalchemy import Float, String, bindparam, func, select, tuple_

from core.models import Job
from core.states import JobState

QUEUED_AT = func.coalesce(Job.queued_at, Job.created_at)
"""When a job lined up, last."""
_COUNT = select(func.count()).where(Job.state == JobState.QUEUED)

# Two counts, each along a stretch of the index of the line: who lined up before was made before.
AHEAD = (
    _COUNT.where(Job.priority > bindparam("priority")).scalar_subquery()
    + _COUNT.where(
        Job.priority == bindparam("priority"),
        Job.created_at <= bindparam("queued_at", type_=Float),
        tuple_(QUEUED_AT, Job.id) < tuple_(bindparam("queued_at", type_=Float), bindparam("id", type_=String)),
    ).scalar_subquery()
)
"""Of a job in line, with its `priority`, `queued_at` and `id`."""
AHEAD_OF_A_NEW_ONE = _COUNT.where(Job.priority >= bindparam("priority"))
"""Of one that is not there yet: whoever waits has lined up before it."""
