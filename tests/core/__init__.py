"""Tests of `core`, on SQLite and PostgreSQL alike."""
