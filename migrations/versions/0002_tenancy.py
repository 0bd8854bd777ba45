"""Names of models belong to projects, projects can be archived, and changes are written down."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

Id = sa.String(64)
Name = sa.String(255)
Json = sa.JSON().with_variant(JSONB(), "postgresql")
EVERYONES = sa.text("project_id IS NULL")

COLUMNS = "id, project_id, job_id, source, shape, created_at"
ONLY_ONE = "(SELECT count(*) FROM models_before AS other WHERE other.id = models_before.id) = 1"


def upgrade() -> None:
    op.add_column("projects", sa.Column("archived_at", sa.Float(), nullable=True))
    # A table of its own, since SQLite can't give a table another primary key.
    op.execute(f"CREATE TABLE models_before AS SELECT {COLUMNS} FROM models")
    op.drop_table("models")
    op.create_table(
        "models",
        sa.Column("key", Name, nullable=False),
        *_columns(),
        sa.PrimaryKeyConstraint("key", name="pk_models"),
        *_owners(),
        sa.UniqueConstraint("project_id", "id", name="uq_models_project_id_id"),
    )
    op.create_index("ix_models_project_id", "models", ["project_id"])
    op.create_index(
        "models_of_everyone", "models", ["id"], unique=True, sqlite_where=EVERYONES, postgresql_where=EVERYONES
    )
    op.execute(f"INSERT INTO models (key, {COLUMNS}) SELECT id, {COLUMNS} FROM models_before")
    op.drop_table("models_before")
    op.create_table(
        "audit_logs",
        sa.Column("id", Id, nullable=False),
        sa.Column("project_id", Id, nullable=False),
        sa.Column("actor_project_id", Id, nullable=False),
        sa.Column("actor_key_id", Id, nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("object_id", Name, nullable=False),
        sa.Column("data", Json, nullable=False),
        sa.Column("request_id", Id, nullable=True),
        sa.Column("address", Id, nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_logs"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_audit_logs_project_id"),
    )
    op.create_index("ix_audit_logs_created_at", "audit_logs", ["created_at"])
    op.create_index("audit_logs_by_project", "audit_logs", ["project_id", "created_at", "id"])


def downgrade() -> None:
    op.drop_table("audit_logs")
    op.execute(f"CREATE TABLE models_before AS SELECT key, {COLUMNS} FROM models")
    op.drop_table("models")
    op.create_table("models", *_columns(), sa.PrimaryKeyConstraint("id", name="pk_models"), *_owners())
    op.create_index("ix_models_project_id", "models", ["project_id"])
    # Where several have a name, none can keep it: it was everyone's before, and one's would show to the others.
    named = f"CASE WHEN {ONLY_ONE} THEN id ELSE key END"
    rest = COLUMNS.removeprefix("id, ")
    op.execute(f"INSERT INTO models ({COLUMNS}) SELECT {named}, {rest} FROM models_before")
    op.drop_table("models_before")
    op.drop_column("projects", "archived_at")


def _columns() -> list[sa.Column[object]]:
    return [
        sa.Column("id", Name, nullable=False),
        sa.Column("project_id", Id, nullable=True),
        sa.Column("job_id", Id, nullable=True),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("shape", Json, nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
    ]


def _owners() -> list[sa.ForeignKeyConstraint]:
    return [
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_models_project_id"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_models_job_id"),
    ]
