"""Uploads whose hour is over, and those that ended long ago, are found along an index, each apart from the others."""

from __future__ import annotations

from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_uploads_expires_at", "uploads")
    op.create_index("uploads_by_end", "uploads", ["status", "expires_at"])


def downgrade() -> None:
    op.drop_index("uploads_by_end", "uploads")
    op.create_index("ix_uploads_expires_at", "uploads", ["expires_at"])
