"""Points of metrics are packed, all but the newest, with their extremes beside them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

Id = sa.String(64)
POINTS = 256
"""In a chunk."""
AT_ONCE = 100 * POINTS
"""Points that are in memory."""

metrics = sa.table(
    "metrics", sa.column("job_id", Id), sa.column("name", sa.String(64)), sa.column("step", sa.BigInteger()),
    sa.column("value", sa.Float()),
)  # fmt: skip
chunks = sa.table(
    "metric_chunks", sa.column("job_id", Id), sa.column("name", sa.String(64)),
    *(sa.column(name, sa.BigInteger()) for name in ("first_step", "last_step", "size")),
    sa.column("low", sa.Float()), sa.column("low_step", sa.BigInteger()), sa.column("high", sa.Float()),
    sa.column("high_step", sa.BigInteger()), sa.column("points", sa.LargeBinary()),
)  # fmt: skip


def upgrade() -> None:
    op.create_table(
        "metric_chunks",
        sa.Column("job_id", Id, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("low", sa.Float(), nullable=False),
        sa.Column("low_step", sa.BigInteger(), nullable=False),
        sa.Column("high", sa.Float(), nullable=False),
        sa.Column("high_step", sa.BigInteger(), nullable=False),
        sa.Column("points", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "name", "first_step", name="pk_metric_chunks"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_metric_chunks_job_id", ondelete="CASCADE"),
    )
    # As a script there are no rows to read; those that are not packed are as good, only slower.
    if not op.get_context().as_sql:
        _pack(op.get_bind())


def downgrade() -> None:
    if not op.get_context().as_sql:
        _unpack(op.get_bind())
    op.drop_table("metric_chunks")


def _pack(bind: sa.Connection) -> None:
    each = (metrics.c.job_id, metrics.c.name)
    counted = sa.select(*each, sa.func.count().label("count")).group_by(*each).having(sa.func.count() >= POINTS)
    for job_id, name, count in bind.execute(counted).all():
        mine = sa.and_(metrics.c.job_id == job_id, metrics.c.name == name)
        oldest = sa.select(metrics.c.step, metrics.c.value).where(mine).order_by(metrics.c.step)
        left = count - count % POINTS
        while left:
            rows = bind.execute(oldest.limit(min(left, AT_ONCE))).all()
            cut = [rows[start : start + POINTS] for start in range(0, len(rows), POINTS)]
            bind.execute(sa.insert(chunks), [_chunk(job_id, name, part) for part in cut])
            bind.execute(sa.delete(metrics).where(mine, metrics.c.step <= rows[-1].step))
            left -= len(rows)


def _chunk(job_id: str, name: str, rows: Sequence[Any]) -> dict[str, object]:
    steps, values = [row.step for row in rows], [row.value for row in rows]
    low, high = min(values), max(values)
    return {
        "job_id": job_id, "name": name, "first_step": steps[0], "last_step": steps[-1], "size": len(rows),
        "low": low, "low_step": steps[values.index(low)], "high": high, "high_step": steps[values.index(high)],
        "points": struct.pack(f"<{len(rows)}q{len(rows)}d", *steps, *values),
    }  # fmt: skip


def _unpack(bind: sa.Connection) -> None:
    keys = bind.execute(sa.select(chunks.c.job_id, chunks.c.name, chunks.c.first_step)).all()
    for job_id, name, first in keys:
        mine = (chunks.c.job_id == job_id, chunks.c.name == name, chunks.c.first_step == first)
        packed = bind.execute(sa.select(chunks.c.points).where(*mine)).scalar_one()
        count = len(packed) // 16
        numbers = struct.unpack(f"<{count}q{count}d", packed)
        pairs = zip(numbers[:count], numbers[count:], strict=True)
        rows = [{"job_id": job_id, "name": name, "step": step, "value": value} for step, value in pairs]
        bind.execute(sa.insert(metrics), rows)
