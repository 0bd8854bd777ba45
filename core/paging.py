"""Cursor pages: some rows after a given one, and whether more follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from sqlalchemy import ColumnElement, Select, select, tuple_, union_all
from sqlalchemy.orm import InstrumentedAttribute, Session

from core.errors import NotFound

Row = TypeVar("Row")
Order = Literal["asc", "desc"]


@dataclass(frozen=True)
class Page(Generic[Row]):
    """Up to `limit` rows in order."""

    data: Sequence[Row]
    has_more: bool


Mark = tuple[float, str]
"""When a row was made, and its id: where a page ended."""


def by_age(
    session: Session,
    query: Select[Row],
    created_at: InstrumentedAttribute[float],
    id_: InstrumentedAttribute[str],
    *,
    after: str | None,
    limit: int,
    order: Order = "desc",
    where: Sequence[ColumnElement[bool]] = (),
) -> Page[Row]:
    """A page of `query` by creation time, ties by id: those rows that `where` lets through.

    `after` must be a row of `query`, whether `where` lets it through or not: it did when the page before was read.
    """
    reached = mark(session, query, created_at, id_, after=after)
    return beyond(session, query, created_at, id_, mark=reached, limit=limit, order=order, where=where)


def mark(
    session: Session,
    query: Select[Any],
    created_at: InstrumentedAttribute[float],
    id_: InstrumentedAttribute[str],
    *,
    after: str | None,
) -> Mark | None:
    """Where the row `after` of `query` stands; None where there is none to continue after."""
    if after is None:
        return None
    found = session.execute(query.with_only_columns(created_at, id_).where(id_ == after)).one_or_none()
    if found is None:
        # Ignoring an unknown cursor would let a client loop over page one for ever.
        raise NotFound(f"There is no {after!r} to continue after.", param="after")
    return found[0], found[1]


def beyond(
    session: Session,
    query: Select[Row],
    created_at: InstrumentedAttribute[float],
    id_: InstrumentedAttribute[str],
    *,
    mark: Mark | None,
    limit: int,
    order: Order = "desc",
    where: Sequence[ColumnElement[bool]] = (),
    either: Sequence[ColumnElement[bool]] = (),
) -> Page[Row]:
    """A page of `query` as `by_age` gives it, from `mark` on; of `either`, if there is any, one must be so of a row.

    Of several the beginnings are read apart, as far as a page could need, for none may be in order with another.
    """
    if mark is not None:
        here = tuple_(created_at, id_)
        query = query.where(here < mark if order == "desc" else here > mark)
    query = query.where(*where)
    if len(either) > 1:
        marks = query.with_only_columns(created_at, id_)
        parts = [_ordered(marks.where(one), [created_at, id_], order).limit(limit + 1) for one in either]
        found = session.execute(union_all(*(select(part.subquery()) for part in parts))).all()
        first = sorted(map(tuple, found), reverse=order == "desc")[: limit + 1]
        query = query.where(id_.in_([made_id for _, made_id in first]))
    else:
        query = query.where(*either)
    return cut(session, query, [created_at, id_], limit=limit, order=order)


def cut(
    session: Session,
    query: Select[Row],
    columns: Sequence[InstrumentedAttribute[Any]],
    *,
    limit: int,
    order: Order,
) -> Page[Row]:
    """The first `limit` rows of `query` in this order; one more is read to know whether that was all."""
    rows: Sequence[Row] = session.scalars(_ordered(query, columns, order).limit(limit + 1)).all()
    return Page(rows[:limit], has_more=len(rows) > limit)


def _ordered(query: Any, columns: Sequence[InstrumentedAttribute[Any]], order: Order) -> Any:
    return query.order_by(*(column.desc() if order == "desc" else column.asc() for column in columns))
