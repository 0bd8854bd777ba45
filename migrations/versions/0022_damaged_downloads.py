"""How often what came of a base was not what the hub describes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("hub_downloads", sa.Column("damages", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("hub_downloads", "damages")
