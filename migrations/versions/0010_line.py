"""Queued jobs have a place in line and an estimate of their start, and projects a share that fades."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

Id = sa.String(64)
UNCOUNTED = sa.text("NOT counted")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("queued_at", sa.Float(), nullable=True))
    op.create_table(
        "queue_places",
        sa.Column("job_id", Id, nullable=False),
        sa.Column("number", sa.Float(), nullable=False),
        sa.Column("estimated_start", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", name="pk_queue_places"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_queue_places_job_id", ondelete="CASCADE"),
    )
    op.create_index("ix_queue_places_number", "queue_places", ["number"])
    op.create_table(
        "shares",
        sa.Column("project_id", Id, nullable=False),
        sa.Column("usage", sa.Float(), nullable=False),
        sa.Column("as_of", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("project_id", name="pk_shares"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_shares_project_id", ondelete="CASCADE"),
    )
    op.add_column("holdings", sa.Column("counted", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.create_index("holdings_uncounted", "holdings", ["id"], sqlite_where=UNCOUNTED, postgresql_where=UNCOUNTED)


def downgrade() -> None:
    op.drop_index("holdings_uncounted", "holdings")
    op.drop_column("holdings", "counted")
    op.drop_table("shares")
    op.drop_table("queue_places")
    op.drop_column("jobs", "queued_at")
