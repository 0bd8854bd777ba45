"""Pages of jobs by name, by state and kind, by label, without labels or from a base are read along an index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

Id = sa.String(64)
SOME = {
    "jobs_by_project_and_name": (["project_id", "name", "created_at", "id"], "name IS NOT NULL"),
    "jobs_without_labels": (["project_id", "created_at", "id"], "labels = '{}'"),
    "jobs_from_a_base": (["project_id", "created_at", "id"], "base_model IS NOT NULL"),
}
"""Indices over some rows: their columns, and which rows."""


def upgrade() -> None:
    for name, (columns, rows) in SOME.items():
        op.create_index(name, "jobs", columns, sqlite_where=sa.text(rows), postgresql_where=sa.text(rows))
    op.create_index("jobs_by_project_state_and_kind", "jobs", ["project_id", "state", "kind", "created_at", "id"])
    op.create_table(
        "job_labels",
        sa.Column("job_id", Id, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("value", sa.String(512), nullable=False),
        sa.Column("project_id", Id, nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "name", name="pk_job_labels"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_labels_job_id", ondelete="CASCADE"),
    )
    each = "jsonb_each_text" if op.get_bind().dialect.name == "postgresql" else "json_each"
    op.execute(
        "INSERT INTO job_labels (job_id, name, value, project_id, created_at) "
        "SELECT jobs.id, label.key, label.value, jobs.project_id, jobs.created_at "
        f"FROM jobs, {each}(jobs.labels) AS label"
    )
    op.create_index("job_labels_by_project", "job_labels", ["project_id", "name", "value", "created_at", "job_id"])


def downgrade() -> None:
    op.drop_table("job_labels")
    op.drop_index("jobs_by_project_state_and_kind", "jobs")
    for name in SOME:
        op.drop_index(name, "jobs")
