"""A job knows the furthest step that was saved of it, whatever has become of the checkpoint."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("saved_step", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute(
        "UPDATE jobs SET saved_step = (SELECT max(step) FROM checkpoints WHERE checkpoints.job_id = jobs.id)"
        " WHERE EXISTS (SELECT 1 FROM checkpoints WHERE checkpoints.job_id = jobs.id)"
    )


def downgrade() -> None:
    op.drop_column("jobs", "saved_step")
