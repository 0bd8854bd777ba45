"""Pages of a project's jobs in one state or of one kind, and places in the line, are read along an index."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("jobs_by_project_and_state", "jobs", ["project_id", "state", "created_at", "id"])
    op.create_index("jobs_by_project_and_kind", "jobs", ["project_id", "kind", "created_at", "id"])
    op.create_index("jobs_in_line", "jobs", ["state", "priority", "created_at", "id"])
    op.drop_index("jobs_by_state", "jobs")


def downgrade() -> None:
    op.create_index("jobs_by_state", "jobs", ["state", "created_at"])
    op.drop_index("jobs_in_line", "jobs")
    op.drop_index("jobs_by_project_and_kind", "jobs")
    op.drop_index("jobs_by_project_and_state", "jobs")
