"""Projects have quotas, and what a job held of slots is kept to count from."""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

Id = sa.String(64)
QUOTAS = ("gpu_hours", "concurrent_jobs", "storage_bytes")


def upgrade() -> None:
    op.add_column("projects", sa.Column("gpu_hours", sa.Float(), nullable=True))
    op.add_column("projects", sa.Column("concurrent_jobs", sa.BigInteger(), nullable=True))
    op.add_column("projects", sa.Column("storage_bytes", sa.BigInteger(), nullable=True))
    op.create_table(
        "holdings",
        sa.Column("id", Id, nullable=False),
        sa.Column("project_id", Id, nullable=False),
        sa.Column("job_id", Id, nullable=True),
        sa.Column("slots", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_holdings"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_holdings_project_id"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_holdings_job_id", ondelete="SET NULL"),
    )
    op.create_index("ix_holdings_job_id", "holdings", ["job_id"])
    op.create_index("holdings_by_project", "holdings", ["project_id", "ended_at"])
    # What is held at this moment counts from now on.
    op.execute(
        "INSERT INTO holdings (id, project_id, job_id, slots, started_at)"
        f" SELECT id, project_id, id, slots, {time.time()!r} FROM jobs WHERE node IS NOT NULL"
    )


def downgrade() -> None:
    op.drop_table("holdings")
    for name in QUOTAS:
        op.drop_column("projects", name)
