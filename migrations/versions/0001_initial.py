"""Projects, keys, files, jobs and their events, metrics, checkpoints and artifacts, models, nodes and slots."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Id = sa.String(64)
Name = sa.String(255)
Json = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "projects",
        sa.Column("id", Id, nullable=False),
        sa.Column("name", Name, nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_projects"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", Id, nullable=False),
        sa.Column("project_id", Id, nullable=False),
        sa.Column("name", Name, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("scopes", Json, nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_api_keys_project_id"),
    )
    op.create_index("ix_api_keys_project_id", "api_keys", ["project_id"])
    op.create_table(
        "files",
        sa.Column("id", Id, nullable=False),
        sa.Column("project_id", Id, nullable=False),
        sa.Column("filename", Name, nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("storage_key", sa.Text(), nullable=False),
        sa.Column("report", Json, nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_files_project_id"),
    )
    op.create_index("ix_files_project_id", "files", ["project_id"])
    op.create_table(
        "jobs",
        sa.Column("id", Id, nullable=False),
        sa.Column("project_id", Id, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("name", Name, nullable=True),
        sa.Column("labels", Json, nullable=False),
        sa.Column("priority", sa.BigInteger(), nullable=False),
        sa.Column("max_runtime", sa.Float(), nullable=True),
        sa.Column("spec", Json, nullable=False),
        sa.Column("run_config", Json, nullable=False),
        sa.Column("plan", Json, nullable=False),
        sa.Column("base_model", Name, nullable=True),
        sa.Column("slots", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("node", Name, nullable=True),
        sa.Column("holder", Name, nullable=True),
        sa.Column("lease_expires_at", sa.Float(), nullable=True),
        sa.Column("losses", sa.BigInteger(), nullable=False),
        sa.Column("retry_at", sa.Float(), nullable=True),
        sa.Column("queue_reason", sa.Text(), nullable=True),
        sa.Column("error", Json, nullable=True),
        sa.Column("progress", Json, nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("engine_seq", sa.BigInteger(), nullable=False),
        sa.Column("last_event", sa.BigInteger(), nullable=False),
        sa.Column("result_model", Name, nullable=True),
        sa.Column("idempotency_key", Name, nullable=True),
        sa.Column("request_digest", sa.String(64), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_jobs_project_id"),
        sa.UniqueConstraint("project_id", "idempotency_key", name="uq_jobs_project_id_idempotency_key"),
    )
    op.create_index("jobs_by_project", "jobs", ["project_id", "created_at", "id"])
    op.create_index("jobs_by_state", "jobs", ["state", "created_at"])
    op.create_index("ix_jobs_request_digest", "jobs", ["request_digest"])
    op.create_table(
        "job_events",
        sa.Column("job_id", Id, nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("level", sa.String(8), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", Json, nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "seq", name="pk_job_events"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_events_job_id", ondelete="CASCADE"),
    )
    op.create_table(
        "metrics",
        sa.Column("job_id", Id, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("value", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "name", "step", name="pk_metrics"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_metrics_job_id", ondelete="CASCADE"),
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", Id, nullable=False),
        sa.Column("job_id", Id, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("storage_prefix", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("metrics", Json, nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoints"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_checkpoints_job_id", ondelete="CASCADE"),
        sa.UniqueConstraint("job_id", "step", name="uq_checkpoints_job_id_step"),
    )
    op.create_index("ix_checkpoints_job_id", "checkpoints", ["job_id"])
    op.create_table(
        "artifacts",
        sa.Column("job_id", Id, nullable=False),
        sa.Column("path", sa.String(512), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("storage_key", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "path", name="pk_artifacts"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_artifacts_job_id", ondelete="CASCADE"),
    )
    op.create_table(
        "models",
        sa.Column("id", Name, nullable=False),
        sa.Column("project_id", Id, nullable=True),
        sa.Column("job_id", Id, nullable=True),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("shape", Json, nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_models"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_models_project_id"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_models_job_id"),
    )
    op.create_index("ix_models_project_id", "models", ["project_id"])
    op.create_table(
        "nodes",
        sa.Column("name", Name, nullable=False),
        sa.Column("device", sa.String(16), nullable=False),
        sa.Column("num_slots", sa.BigInteger(), nullable=False),
        sa.Column("slot_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("slot_peak_flops", sa.Float(), nullable=True),
        sa.Column("heartbeat_at", sa.Float(), nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_nodes"),
    )
    op.create_table(
        "slots",
        sa.Column("node", Name, nullable=False),
        sa.Column("index", sa.BigInteger(), nullable=False),
        sa.Column("job_id", Id, nullable=True),
        sa.PrimaryKeyConstraint("node", "index", name="pk_slots"),
        sa.ForeignKeyConstraint(["node"], ["nodes.name"], name="fk_slots_node", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_slots_job_id", ondelete="SET NULL"),
    )
    op.create_index("ix_slots_job_id", "slots", ["job_id"])


def downgrade() -> None:
    for table in (
        "slots", "nodes", "models", "artifacts", "checkpoints", "metrics", "job_events", "jobs", "files", "api_keys",
        "projects",
    ):  # fmt: skip
        op.drop_table(table)
