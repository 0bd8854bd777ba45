"""Which try of a create made a job, so that an earlier one that arrives later makes no second."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("made_by_retry", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("jobs", "made_by_retry")
