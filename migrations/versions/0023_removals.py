"""What is left of a deleted job is known, and its history and numbers no longer go in the transaction that deletes it.

SQLite copies the three tables for it, which takes some seconds for each million of events, and their size on the disk.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

AFTERWARDS = ("job_events", "metrics", "metric_chunks")


def upgrade() -> None:
    op.create_table(
        "removals",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_removals"),
    )
    for name in AFTERWARDS:
        with op.batch_alter_table(name) as table:
            table.drop_constraint(f"fk_{name}_job_id", type_="foreignkey")


def downgrade() -> None:
    op.drop_table("removals")
    for name in AFTERWARDS:
        op.execute(f"DELETE FROM {name} WHERE job_id NOT IN (SELECT id FROM jobs)")
        with op.batch_alter_table(name) as table:
            table.create_foreign_key(f"fk_{name}_job_id", "jobs", ["job_id"], ["id"], ondelete="CASCADE")
