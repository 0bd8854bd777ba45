"""Bring a database to the schema that this code expects. The steps themselves are in `migrations/versions`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, func, select, text

from core.db import open_engine

_STEPS = Path(__file__).parents[1] / "migrations"
"""By path: what a migration needs is here, and not the other way round."""


def upgrade(url: str, revision: str = "head") -> None:
    """Run the migrations that are missing, all in one transaction. Two processes may do so at once."""
    _run(url, "upgrade", revision)


def downgrade(url: str, revision: str) -> None:
    """Take back the migrations after `revision`; `base` takes back all."""
    _run(url, "downgrade", revision)


def is_current(engine: Engine) -> bool:
    """Whether the database has exactly the newest schema."""
    return _heads(engine) == _newest()


def is_behind(engine: Engine) -> bool:
    """Whether migrations are missing that this version has. A database that a newer version has migrated lacks none."""
    heads = _heads(engine)
    return heads != _newest() and heads <= {
        step.revision for step in ScriptDirectory.from_config(_config()).walk_revisions()
    }


def _heads(engine: Engine) -> set[str]:
    """The migrations that a database ends with; none where it has no tables."""
    with engine.connect() as connection:
        return set(MigrationContext.configure(connection).get_current_heads())


@cache
def _newest() -> frozenset[str]:
    """Every migration is read for this, and whoever asks whether the service is ready asks again and again."""
    return frozenset(ScriptDirectory.from_config(_config()).get_heads())


def _run(url: str, direction: str, revision: str) -> None:
    engine = open_engine(url)
    config = _config()
    try:
        with engine.begin() as connection:
            if engine.dialect.name == "postgresql":
                # Another process may take its time to migrate.
                connection.execute(text("SET LOCAL lock_timeout = 0"))
                connection.execute(select(func.pg_advisory_xact_lock(func.hashtextextended("migrations", 0))))
            config.attributes["connection"] = connection
            getattr(command, direction)(config, revision)
    finally:
        engine.dispose()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_STEPS))
    return config
