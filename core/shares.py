"""What each project had of the slots lately: usage that fades by half in each half-life, so that old use is forgiven.

Pure arithmetic, and the rows in which the past is kept. What follows for the order of the line is `line`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log

from sqlalchemy import bindparam, select, text, update
from sqlalchemy.orm import Session

from core.db import directly
from core.models import UNCOUNTED, Holding, Share

DAY = 86400.0
CHARGE_SECONDS = 3600.0
"""What is held, or comes earlier in the line, counts as if it had been held for so much longer already.

Without that, all that is free at one moment would go to the one project that used a little less.
"""


@dataclass(frozen=True)
class Standing:
    """What a project counts for at a moment."""

    usage: float = 0.0
    """Slot-seconds, faded."""
    held: int = 0
    """Slots that it has now."""

    @property
    def weight(self) -> float:
        """Who has less goes first."""
        return self.usage + self.held * CHARGE_SECONDS

    def after(self, seconds: float, half_life: float) -> Standing:
        """The same project later, if it holds what it holds until then."""
        return Standing(faded(self.usage, seconds, half_life) + gained(self.held, seconds, half_life), self.held)

    def holding(self, more: int) -> Standing:
        """With so many slots more."""
        return Standing(self.usage, self.held + more)


def faded(usage: float, seconds: float, half_life: float) -> float:
    """What is left of it after so many seconds."""
    return usage * exp(-log(2) * max(0.0, seconds) / half_life)


def gained(slots: int, seconds: float, half_life: float) -> float:
    """Slot-seconds of a stretch that ends now: the integral of the slots, each moment faded by its age."""
    lasting = half_life / log(2)
    return slots * lasting * (1 - exp(-max(0.0, seconds) / lasting))


def standings(session: Session, *, now: float, half_life: float, counting: bool) -> dict[str, Standing]:
    """Each project's that ever held anything; those that are missing had nothing.

    `counting`: what has ended since the last look is added to the rows; the caller holds the scheduler's lock.
    """
    known = {share.project_id: share for share in session.scalars(select(Share))}
    found = {id_: Standing(faded(share.usage, now - share.as_of, half_life)) for id_, share in known.items()}
    held: dict[str, Standing] = {}
    ended: list[str] = []
    for id_, project, slots, started_at, ended_at in session.execute(_UNCOUNTED):
        over = now - ended_at if ended_at is not None else 0.0
        used = faded(gained(slots, now - over - started_at, half_life), over, half_life)
        if ended_at is None:
            before = held.get(project, Standing())
            held[project] = Standing(before.usage + used, before.held + slots)
        else:
            ended.append(id_)
            found[project] = Standing(found.get(project, Standing()).usage + used)
    if ended and counting:
        _count(session, known, found, ended, now)
    return _sum(found, held)


# In the index's own words: no database finds a partial index by others that mean the same.
_UNCOUNTED = select(Holding.id, Holding.project_id, Holding.slots, Holding.started_at, Holding.ended_at).where(
    text(UNCOUNTED)
)


def _count(
    session: Session, known: Mapping[str, Share], found: Mapping[str, Standing], ended: list[str], now: float
) -> None:
    for id_, standing in found.items():
        if share := known.get(id_):
            share.usage, share.as_of = standing.usage, now
        else:
            session.add(Share(project_id=id_, usage=standing.usage, as_of=now))
    counted = update(Holding).where(Holding.id == bindparam("holding")).values(counted=True)
    directly(session, counted, [{"holding": id_} for id_ in ended])


def _sum(past: Mapping[str, Standing], held: Mapping[str, Standing]) -> dict[str, Standing]:
    return {
        id_: Standing(past.get(id_, Standing()).usage + now.usage, now.held)
        for id_ in past.keys() | held.keys()
        for now in (held.get(id_, Standing()),)
    }
