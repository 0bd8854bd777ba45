"""Cursor pages: some rows after a given one, and whether more follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from sqlalchemy import ColumnElement, Select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session

from core.errors import NotFound

Row = TypeVar("Row")
Order = Literal["asc", "desc"]


@dataclass(frozen=True)
class Page(Generic[Row]):
    """Up to `limit` rows in order."""

    data: Sequence[Row]
    has_more: bool


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
    if after is not None:
        mark = session.execute(query.with_only_columns(created_at, id_).where(id_ == after)).one_or_none()
        if mark is None:
            # Ignoring an unknown cursor would let a client loop over page one for ever.
            raise NotFound(f"There is no {after!r} to continue after.", param="after")
        here = tuple_(created_at, id_)
        query = query.where(here < tuple(mark) if order == "desc" else here > tuple(mark))
    return cut(session, query.where(*where), [created_at, id_], limit=limit, order=order)


def cut(
    session: Session,
    query: Select[Row],
    columns: Sequence[InstrumentedAttribute[Any]],
    *,
    limit: int,
    order: Order,
) -> Page[Row]:
    """The first `limit` rows of `query` in this order; one more is read to know whether that was all."""
    direction: Callable[[InstrumentedAttribute[Any]], Any] = (
        (lambda column: column.desc()) if order == "desc" else (lambda column: column.asc())
    )
    rows = session.scalars(query.order_by(*map(direction, columns)).limit(limit + 1)).all()
    return Page(rows[:limit], has_more=len(rows) > limit)
