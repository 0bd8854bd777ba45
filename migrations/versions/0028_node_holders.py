"""A node's name belongs to whoever registered it, for as long as that one is heard."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("holder", sa.String(32), nullable=True))


def downgrade() -> None:
    op.drop_column("nodes", "holder")
