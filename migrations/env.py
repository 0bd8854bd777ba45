"""Run migrations on the connection that `core.schema` hands over; from the command line, on the settings' database."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine

from core.models import Base
from core.settings import Settings


def run(connection: Connection) -> None:
    # Batch mode: SQLite changes a table by copying it.
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True, compare_type=True)
    with context.begin_transaction():
        context.run_migrations()


def run_as_script() -> None:
    context.configure(
        url=Settings().database, target_metadata=Base.metadata, literal_binds=True, dialect_opts={"paramstyle": "named"}
    )
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    run_as_script()
elif (given := context.config.attributes.get("connection")) is not None:
    run(given)
else:
    with create_engine(context.config.attributes.get("url") or Settings().database).begin() as own:
        run(own)
