"""One sender at a time takes messages to a webhook endpoint, so that they arrive in order."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("webhook_endpoints", sa.Column("held_until", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("webhook_endpoints", "held_until")
