"""A node says how fast its slots are."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

Json = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    op.add_column("nodes", sa.Column("rates", Json, nullable=True))


def downgrade() -> None:
    op.drop_column("nodes", "rates")
