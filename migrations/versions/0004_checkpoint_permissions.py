"""Checkpoints that another project may use."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

Id = sa.String(64)


def upgrade() -> None:
    op.create_table(
        "checkpoint_permissions",
        sa.Column("id", Id, nullable=False),
        sa.Column("checkpoint_id", Id, nullable=False),
        sa.Column("project_id", Id, nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoint_permissions"),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name="fk_checkpoint_permissions_checkpoint_id", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name="fk_checkpoint_permissions_project_id", ondelete="CASCADE"
        ),
        sa.UniqueConstraint("checkpoint_id", "project_id", name="uq_checkpoint_permissions_checkpoint_id_project_id"),
    )
    op.create_index("ix_checkpoint_permissions_project_id", "checkpoint_permissions", ["project_id"])


def downgrade() -> None:
    op.drop_table("checkpoint_permissions")
