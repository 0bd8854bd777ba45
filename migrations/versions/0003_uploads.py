"""Files that expire, and files that come in parts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

Id = sa.String(64)
Name = sa.String(255)
Json = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    op.add_column("files", sa.Column("expires_at", sa.Float(), nullable=True))
    op.create_index("ix_files_expires_at", "files", ["expires_at"])
    op.create_table(
        "uploads",
        sa.Column("id", Id, nullable=False),
        sa.Column("project_id", Id, nullable=False),
        sa.Column("filename", Name, nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("received", sa.BigInteger(), nullable=False),
        sa.Column("num_parts", sa.BigInteger(), nullable=False),
        sa.Column("part_ids", Json, nullable=True),
        sa.Column("file_expires_after", sa.BigInteger(), nullable=True),
        sa.Column("file_id", Id, nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_uploads"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_uploads_project_id"),
    )
    op.create_index("ix_uploads_project_id", "uploads", ["project_id"])
    op.create_index("ix_uploads_expires_at", "uploads", ["expires_at"])
    op.create_table(
        "upload_parts",
        sa.Column("id", Id, nullable=False),
        sa.Column("upload_id", Id, nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("md5", sa.String(32), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_upload_parts"),
        sa.ForeignKeyConstraint(["upload_id"], ["uploads.id"], name="fk_upload_parts_upload_id", ondelete="CASCADE"),
    )
    op.create_index("ix_upload_parts_upload_id", "upload_parts", ["upload_id"])


def downgrade() -> None:
    op.drop_table("upload_parts")
    op.drop_table("uploads")
    op.drop_index("ix_files_expires_at", "files")
    op.drop_column("files", "expires_at")
