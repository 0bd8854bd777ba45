"""Checkpoints that a run has gone back from are known as such, and bases are found by who starts from them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

HAS_A_BASE = sa.text("base_model IS NOT NULL")


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("abandoned", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.create_index("jobs_by_base", "jobs", ["base_model"], sqlite_where=HAS_A_BASE, postgresql_where=HAS_A_BASE)


def downgrade() -> None:
    op.drop_index("jobs_by_base", "jobs")
    op.drop_column("checkpoints", "abandoned")
