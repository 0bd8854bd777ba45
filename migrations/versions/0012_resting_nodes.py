"""A host that does not start the jobs it is given rests for a while."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("bounces", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("nodes", sa.Column("rests_until", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("nodes", "rests_until")
    op.drop_column("nodes", "bounces")
