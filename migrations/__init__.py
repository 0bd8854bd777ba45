"""Steps of the database schema, run by `core.schema`."""
