"""Who archived a project is found by an index of its own, and not behind the ends of all its jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

OF_ARCHIVING = sa.text("action = 'project.archived'")


def upgrade() -> None:
    op.create_index(
        "audit_logs_of_archiving",
        "audit_logs",
        ["project_id", "created_at", "id"],
        sqlite_where=OF_ARCHIVING,
        postgresql_where=OF_ARCHIVING,
    )


def downgrade() -> None:
    op.drop_index("audit_logs_of_archiving", "audit_logs")
