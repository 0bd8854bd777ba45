"""Projects say whose jobs may stop theirs, and a job that makes way for another is told so in its row."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("projects", sa.Column("preemption", sa.String(8), nullable=False, server_default="never"))
    op.add_column("jobs", sa.Column("makes_way", sa.Boolean(), nullable=False, server_default=sa.false()))


def downgrade() -> None:
    op.drop_column("jobs", "makes_way")
    op.drop_column("projects", "preemption")
