"""A step that a run comes to again after it went back has another checkpoint, beside the one that was left behind."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

SOUND = sa.text("NOT abandoned")


def upgrade() -> None:
    _change(add=False)
    op.create_index(
        "checkpoints_by_step",
        "checkpoints",
        ["job_id", "step"],
        unique=True,
        sqlite_where=SOUND,
        postgresql_where=SOUND,
    )


def downgrade() -> None:
    # Of each step one stays: that which was not gone back from, or else the newest.
    op.execute(
        "DELETE FROM checkpoints WHERE abandoned AND EXISTS (SELECT 1 FROM checkpoints AS other"
        " WHERE other.job_id = checkpoints.job_id AND other.step = checkpoints.step AND other.id <> checkpoints.id"
        " AND (NOT other.abandoned OR (other.created_at, other.id) > (checkpoints.created_at, checkpoints.id)))"
    )
    op.drop_index("checkpoints_by_step", "checkpoints")
    _change(add=True)


def _change(*, add: bool) -> None:
    # SQLite copies the table and drops the old one, and what hangs on its rows goes with that.
    op.execute("CREATE TABLE permissions_before AS SELECT * FROM checkpoint_permissions")
    op.execute("DELETE FROM checkpoint_permissions")
    with op.batch_alter_table("checkpoints") as table:
        if add:
            table.create_unique_constraint("uq_checkpoints_job_id_step", ["job_id", "step"])
        else:
            table.drop_constraint("uq_checkpoints_job_id_step", type_="unique")
    op.execute("INSERT INTO checkpoint_permissions SELECT * FROM permissions_before")
    op.drop_table("permissions_before")
