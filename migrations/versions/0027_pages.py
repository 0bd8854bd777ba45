"""Pages of all that there can be much of are read along an index, in their order."""

from __future__ import annotations

from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

PARENTS = {
    "api_keys": "project_id",
    "files": "project_id",
    "uploads": "project_id",
    "upload_parts": "upload_id",
    "checkpoints": "job_id",
    "webhook_endpoints": "project_id",
    "webhook_deliveries": "endpoint_id",
}
"""By whose page a table is read."""


def upgrade() -> None:
    for table, parent in PARENTS.items():
        op.drop_index(f"ix_{table}_{parent}", table)
        op.create_index(f"{table}_by_{parent.removesuffix('_id')}", table, [parent, "created_at", "id"])
    op.create_index("files_by_project_and_purpose", "files", ["project_id", "purpose", "created_at", "id"])


def downgrade() -> None:
    op.drop_index("files_by_project_and_purpose", "files")
    for table, parent in PARENTS.items():
        op.drop_index(f"{table}_by_{parent.removesuffix('_id')}", table)
        op.create_index(f"ix_{table}_{parent}", table, [parent])
