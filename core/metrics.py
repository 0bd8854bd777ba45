"""Curves of a job's numbers, thinned to what a screen can show. What is written is decided in `history`.

The newest points of a metric are rows, which cost a step little; once enough of them are there they become a chunk:
one row with the points packed, and with its extremes beside them. So a curve of a million points is read from a few
thousand extremes, and no extreme is ever an estimate.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isnan
from operator import attrgetter
from typing import NamedTuple

from sqlalchemy import ColumnElement, delete, func, insert, select, union
from sqlalchemy.orm import InstrumentedAttribute, Session

from core import points
from core.models import Metric, MetricChunk
from core.points import POINTS

Point = tuple[int, float]
"""Step and value."""
FEW = 32
"""Points that stay together where a curve is cut among chunks."""
CHUNKS_AT_ONCE = 16
"""Chunks that are read together where a whole curve is."""


class Stretch(NamedTuple):
    """What is known of points that follow one another."""

    first_step: int
    last_step: int
    size: int
    """How many."""
    low: float
    low_step: int
    high: float
    high_step: int


# Writing, under the lock of the job's row


def append(session: Session, job_id: str, step: int, values: Mapping[str, float | None]) -> None:
    """Add a point of this step to each metric that has a value, beyond all that it has."""
    rows = [{"job_id": job_id, "name": name, "step": step, "value": value} for name, value in _told(values)]
    if rows:
        # Past the session, which would write the job and its event for each step: they go together, at the end.
        session.connection().execute(_POINTS, rows)


_POINTS = insert(Metric)


def insert_between(session: Session, job_id: str, step: int, values: Mapping[str, float | None]) -> None:
    """Add a point of this step to each metric that has a value, wherever it belongs among those that it has."""
    packed = {
        name: last
        for name, last in session.execute(
            select(MetricChunk.name, func.max(MetricChunk.last_step))
            .where(MetricChunk.job_id == job_id, MetricChunk.name.in_(values))
            .group_by(MetricChunk.name)
        )
    }
    late = {name: value for name, value in _told(values) if packed.get(name, -1) >= step}
    for name, value in late.items():
        _repack(session, job_id, name, (step, value))
    append(session, job_id, step, {name: value for name, value in values.items() if name not in late})


def pack(session: Session, job_id: str) -> None:
    """Make chunks of the oldest rows of each metric, as far as they fill some. Call it every `POINTS` steps."""
    session.flush()
    counted = session.execute(
        select(Metric.name, func.count()).where(Metric.job_id == job_id).group_by(Metric.name).having(
            func.count() >= POINTS
        )
    ).all()  # fmt: skip
    for name, count in counted:
        mine = (Metric.job_id == job_id, Metric.name == name)
        oldest = select(Metric.step, Metric.value).where(*mine).order_by(Metric.step)
        rows = [(step, value) for step, value in session.execute(oldest.limit(count - count % POINTS))]
        starts = range(0, len(rows), POINTS)
        session.add_all(chunk(job_id, name, rows[start : start + POINTS]) for start in starts)
        session.execute(
            delete(Metric).where(*mine, Metric.step <= rows[-1][0]).execution_options(synchronize_session=False)
        )
    session.flush()


def chunk(job_id: str, name: str, rows: Sequence[Point]) -> MetricChunk:
    """These points, in order of their steps, as one row."""
    steps, values = [step for step, _ in rows], [value for _, value in rows]
    known = _stretch(steps, values)._asdict()
    return MetricChunk(job_id=job_id, name=name, points=points.pack(steps, values), **known)


def _repack(session: Session, job_id: str, name: str, point: Point) -> None:
    mine = select(MetricChunk).where(MetricChunk.job_id == job_id, MetricChunk.name == name)
    before = mine.where(MetricChunk.first_step <= point[0]).order_by(MetricChunk.first_step.desc()).limit(1)
    old = session.scalars(before).one_or_none() or session.scalars(mine.order_by(MetricChunk.first_step)).first()
    assert old is not None, "it ends after the point, so it is there"
    rows = list(zip(*points.unpack(old.points), strict=True))
    insort(rows, point)
    session.delete(old)
    session.flush()
    session.add(chunk(job_id, name, rows))
    session.flush()


def _told(values: Mapping[str, float | None]) -> Iterable[tuple[str, float]]:
    return ((name, float(value)) for name, value in values.items() if value is not None)


# Reading


def names(session: Session, job_id: str) -> Sequence[str]:
    """Every metric that the job has, by name."""
    kinds = (select(kind.name).where(kind.job_id == job_id) for kind in (Metric, MetricChunk))
    return sorted(session.scalars(union(*kinds)))


def has(session: Session, job_id: str, name: str, step: int) -> bool:
    """Whether the metric has a point of this step."""
    session.flush()
    return bool(series(session, job_id, names=[name], from_step=step, to_step=step)[name])


def series(
    session: Session,
    job_id: str,
    *,
    names: Collection[str] = (),
    from_step: int | None = None,
    to_step: int | None = None,
    max_points: int | None = 500,
) -> dict[str, list[Point]]:
    """Each metric by step, both ends included, thinned to `max_points`; None: every point.

    No names: all metrics; unknown ones have no points.
    """
    low, high = -1 if from_step is None else from_step, 2**63 - 1 if to_step is None else to_step
    # In this order: what is packed between the two looks is then seen twice, and not missed.
    loose = _loose(session, job_id, names, low, high)
    packed = _packed(session, job_id, names, low, high)
    return {
        name: _Curve(session, job_id, name, packed.get(name, []), loose.get(name, _Columns())).thin(
            low, high, max_points
        )
        for name in names or sorted({*loose, *packed})
    }


def each(session: Session, job_id: str, name: str) -> Iterator[Point]:
    """Every point of a metric in order, of which only a few chunks are in memory at once."""
    after = -1
    mine = (MetricChunk.job_id == job_id, MetricChunk.name == name)
    while True:
        some = select(MetricChunk.first_step, MetricChunk.points).where(*mine, MetricChunk.first_step > after)
        chunks = session.execute(some.order_by(MetricChunk.first_step).limit(CHUNKS_AT_ONCE)).all()
        for first_step, packed in chunks:
            after = first_step
            yield from zip(*points.unpack(packed), strict=True)
        if len(chunks) < CHUNKS_AT_ONCE:
            break
    last = session.scalar(select(func.max(MetricChunk.last_step)).where(*mine))
    rows = select(Metric.step, Metric.value).where(Metric.job_id == job_id, Metric.name == name)
    for row in session.execute(rows.where(Metric.step > (-1 if last is None else last)).order_by(Metric.step)):
        yield row.step, row.value


@dataclass
class _Columns:
    """Points, in order of their steps."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def between(self, low: int, high: int) -> _Columns:
        part = slice(bisect_left(self.steps, low), bisect_right(self.steps, high))
        return _Columns(self.steps[part], self.values[part])

    def extend(self, other: _Columns) -> None:
        self.steps += other.steps
        self.values += other.values

    def points(self) -> list[Point]:
        return list(zip(self.steps, self.values, strict=True))

    def stretches(self) -> Iterable[Stretch]:
        """What is known of each few of them."""
        for start in range(0, len(self.steps), FEW):
            few = slice(start, start + FEW)
            yield _stretch(self.steps[few], self.values[few])


@dataclass(frozen=True)
class _Curve:
    """A metric between two steps: chunks, of which the first and the last may reach beyond, and rows after them."""

    session: Session
    job_id: str
    name: str
    chunks: Sequence[Stretch]
    loose: _Columns

    def thin(self, low: int, high: int, max_points: int | None) -> list[Point]:
        loose = self.loose.between(self.chunks[-1].last_step + 1, high) if self.chunks else self.loose
        if not self.chunks:
            return _thinned(loose, max_points)
        stretches = _stretches(max_points)
        if stretches is None or len(self.chunks) < stretches + 2:
            opened = self.open(self.chunks[0].first_step, self.chunks[-1].first_step)
            opened.extend(loose)
            return _thinned(opened.between(low, high), max_points)
        # Of the chunks at the ends only a part may be meant; those between count as they are.
        head = self.open(self.chunks[0].first_step, self.chunks[0].first_step).between(low, high)
        tail = self.open(self.chunks[-1].first_step, self.chunks[-1].first_step).between(low, high)
        tail.extend(loose)
        cut = [*head.stretches(), *self.chunks[1:-1], *tail.stretches()]
        return _extremes(_evenly(cut, stretches), first=head.points()[0], last=tail.points()[-1])

    def open(self, first: int, last: int) -> _Columns:
        """The points of the chunks that begin from `first` to `last`."""
        mine = (MetricChunk.job_id == self.job_id, MetricChunk.name == self.name)
        wanted = select(MetricChunk.points).where(*mine, MetricChunk.first_step.between(first, last))
        columns = _Columns()
        for packed in self.session.scalars(wanted.order_by(MetricChunk.first_step)):
            columns.extend(_Columns(*points.unpack(packed)))
        return columns


def _loose(session: Session, job_id: str, names: Collection[str], low: int, high: int) -> dict[str, _Columns]:
    query = select(Metric.name, Metric.step, Metric.value).where(
        Metric.job_id == job_id, Metric.step.between(low, high), *_named(Metric.name, names)
    )
    found: dict[str, _Columns] = {}
    for name, step, value in session.execute(query.order_by(Metric.name, Metric.step)):
        columns = found.setdefault(name, _Columns())
        columns.steps.append(step)
        columns.values.append(value)
    return found


def _packed(session: Session, job_id: str, names: Collection[str], low: int, high: int) -> dict[str, list[Stretch]]:
    kept = [getattr(MetricChunk, column) for column in Stretch._fields]
    query = select(MetricChunk.name, *kept).where(
        MetricChunk.job_id == job_id,
        MetricChunk.first_step <= high,
        MetricChunk.last_step >= low,
        *_named(MetricChunk.name, names),
    )
    found: dict[str, list[Stretch]] = {}
    for name, *numbers in session.execute(query.order_by(MetricChunk.name, MetricChunk.first_step)):
        found.setdefault(name, []).append(Stretch(*numbers))
    return found


def _named(column: InstrumentedAttribute[str], names: Collection[str]) -> Sequence[ColumnElement[bool]]:
    return [column.in_(names)] if names else []


# Thinning


def thin(points: Sequence[Point], max_points: int) -> list[Point]:
    """At most `max_points` of them, in order: the first, the last, and the lowest and highest of each stretch between.

    So no spike is lost, however far one zooms out.
    """
    return _thinned(_Columns([step for step, _ in points], [value for _, value in points]), max_points)


def _stretches(max_points: int | None) -> int | None:
    """In how many a curve is cut, so that two points of each and both ends are few enough; None: all points stay."""
    return None if max_points is None else max(0, (max_points - 2) // 2)


def _thinned(columns: _Columns, max_points: int | None) -> list[Point]:
    stretches, count = _stretches(max_points), len(columns.steps)
    if stretches is None or max_points is None or count <= max_points:
        return columns.points()
    ends = [(columns.steps[0], columns.values[0]), (columns.steps[-1], columns.values[-1])][:max_points]
    if not stretches:
        return ends
    # The ends are there anyway.
    edges = [1 + number * (count - 2) // stretches for number in range(stretches + 1)]
    cut = [[_stretch(columns.steps[start:end], columns.values[start:end])] for start, end in pairwise(edges)]
    return _extremes(cut, first=ends[0], last=ends[1])


def _evenly(cut: Sequence[Stretch], groups: int) -> Iterable[Sequence[Stretch]]:
    """`cut` in at most so many groups, each of neighbours, of about as many points."""
    total, before = sum(stretch.size for stretch in cut), 0
    gathered: dict[int, list[Stretch]] = {}
    for stretch in cut if groups else ():
        gathered.setdefault(before * groups // total, []).append(stretch)
        before += stretch.size
    return gathered.values()


def _extremes(groups: Iterable[Sequence[Stretch]], *, first: Point, last: Point) -> list[Point]:
    """Both ends, and the lowest and highest of each group."""
    kept = dict([first, last])
    for group in groups:
        lowest, highest = min(group, key=_low), max(group, key=_high)
        kept |= {lowest.low_step: lowest.low, highest.high_step: highest.high}
    return sorted(kept.items())


_low, _high = attrgetter("low"), attrgetter("high")


def _stretch(steps: Sequence[int], values: Sequence[float]) -> Stretch:
    known = values
    if isnan(sum(values)):
        # What is no number hides no extreme.
        known = [value for value in values if not isnan(value)] or values[:1]
    low, high = min(known), max(known)
    return Stretch(
        steps[0], steps[-1], len(steps), low, _step_of(low, steps, values), high, _step_of(high, steps, values)
    )


def _step_of(value: float, steps: Sequence[int], values: Sequence[float]) -> int:
    return steps[values.index(value)]
