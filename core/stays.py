"""How long things are kept, as the setting says it. What then goes is `retention`'s business."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

KINDS = ("checkpoints", "logs", "events", "files")
_UNITS = {"d": timedelta(days=1), "h": timedelta(hours=1), "w": timedelta(weeks=1)}
_PART = re.compile(rf"({'|'.join(KINDS)})\.(?:age=(\d{{1,5}})([dhw])|count=(\d{{1,9}}))")


@dataclass(frozen=True)
class Stay:
    """What of a kind is kept: what is both young enough and among the newest."""

    age: timedelta | None = None
    """None: of any age."""
    count: int | None = None
    """So many of a job; of files, of a project. None: any number."""


class Dated(Protocol):
    """Something that belongs to a job or a project, and came at some time."""

    @property
    def owner(self) -> str: ...
    @property
    def created_at(self) -> float: ...


Thing = TypeVar("Thing", bound=Dated)


def parse(said: str | None) -> dict[str, Stay]:
    """By kind, from text such as `checkpoints.age=30d, checkpoints.count=1, logs.age=12w`."""
    found: dict[str, Stay] = {}
    for part in filter(None, (part.strip() for part in (said or "").split(","))):
        if (match := _PART.fullmatch(part)) is None:
            raise ValueError(
                f"{part!r} is no rule; say such as checkpoints.age=30d or checkpoints.count=1, for {', '.join(KINDS)}, "
                "with ages in h, d or w and commas between"
            )
        kind, number, unit, count = match.groups()
        before = found.get(kind, Stay())
        if (before.age if count is None else before.count) is not None:
            raise ValueError(f"{kind} has two rules of one sort; keep one of them")
        age = before.age if count is not None else int(number) * _UNITS[unit]
        found[kind] = Stay(age, before.count if count is None else int(count))
    return found


def over(things: Iterable[Thing], stay: Stay, now: float) -> Sequence[Thing]:
    """Those that go: too old, or not among the newest of their owner."""
    gone, seen = [], dict[str, int]()
    for thing in sorted(things, key=lambda each: each.created_at, reverse=True):
        place = seen[thing.owner] = seen.get(thing.owner, 0) + 1
        is_old = stay.age is not None and thing.created_at < now - stay.age.total_seconds()
        if is_old or (stay.count is not None and place > stay.count):
            gone.append(thing)
    return gone
