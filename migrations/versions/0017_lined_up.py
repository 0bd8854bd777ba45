"""Places in the line go by when a job lined up, which the index of the line has beside when it was made."""

from __future__ import annotations

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

BEFORE = ["state", "priority", "created_at", "id"]


def upgrade() -> None:
    op.drop_index("jobs_in_line", "jobs")
    op.create_index("jobs_in_line", "jobs", [*BEFORE, "queued_at"])


def downgrade() -> None:
    op.drop_index("jobs_in_line", "jobs")
    op.create_index("jobs_in_line", "jobs", BEFORE)
