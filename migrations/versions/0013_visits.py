"""Browsers that signed in."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

Id = sa.String(64)


def upgrade() -> None:
    op.create_table(
        "visits",
        sa.Column("id", Id, nullable=False),
        sa.Column("key_id", Id, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_visits"),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_visits_key_id", ondelete="CASCADE"),
    )
    op.create_index("ix_visits_key_id", "visits", ["key_id"])
    op.create_index("ix_visits_expires_at", "visits", ["expires_at"])


def downgrade() -> None:
    op.drop_table("visits")
