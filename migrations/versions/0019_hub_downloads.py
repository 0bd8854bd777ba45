"""Bases that come from a hub."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

Json = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "hub_downloads",
        sa.Column("model_key", sa.String(255), nullable=False),
        sa.Column("repo", sa.String(255), nullable=False),
        sa.Column("commit_hash", sa.String(64), nullable=False),
        sa.Column("files", Json, nullable=False),
        sa.Column("total_bytes", sa.BigInteger(), nullable=False),
        sa.Column("done_bytes", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("failures", sa.BigInteger(), nullable=False),
        sa.Column("due_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("model_key", name="pk_hub_downloads"),
        sa.ForeignKeyConstraint(["model_key"], ["models.key"], name="fk_hub_downloads_model_key", ondelete="CASCADE"),
    )
    op.create_index("ix_hub_downloads_due_at", "hub_downloads", ["due_at"])


def downgrade() -> None:
    # What was still to come is understood by nobody then.
    op.execute("DELETE FROM models WHERE source LIKE 'hf://%'")
    op.drop_table("hub_downloads")
