"""Another try of a create is found by what was asked, however much else its project asked for lately."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

BY_REQUEST = ["project_id", "request_digest", "created_at"]
OWES_A_TRY = sa.text("made_by_retry > 0")


def upgrade() -> None:
    op.drop_index("ix_jobs_request_digest", "jobs")
    op.create_index("jobs_by_request", "jobs", BY_REQUEST)
    op.create_index("jobs_that_owe_a_try", "jobs", BY_REQUEST, sqlite_where=OWES_A_TRY, postgresql_where=OWES_A_TRY)


def downgrade() -> None:
    op.drop_index("jobs_that_owe_a_try", "jobs")
    op.drop_index("jobs_by_request", "jobs")
    op.create_index("ix_jobs_request_digest", "jobs", ["request_digest"])
