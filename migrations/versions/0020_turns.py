"""Hosts say how many ranks they start at once."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("starts_at_once", sa.BigInteger()))


def downgrade() -> None:
    op.drop_column("nodes", "starts_at_once")
