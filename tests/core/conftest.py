"""Fixtures for `core` alone."""

from __future__ import annotations

import datetime
import time
from concurrent.futures import Future
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from sqlalchemy import text

from core.db import Database
from core.settings import Settings


@pytest.fixture
def tmp_settings(tmp_path: Path) -> Settings:
    """Settings for functions that look at folders only."""
    return Settings(data_dir=tmp_path)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate that says to be localhost, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.2"))])
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(names, critical=False).sign(key, hashes.SHA256())
    )  # fmt: skip
    form = serialization.PrivateFormat.PKCS8
    secret = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    path = tmp_path / "certificate.pem"
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + secret)
    return path


def waiting_for_locks(database: Database) -> int:
    """How many sessions of a PostgreSQL database wait for what another one holds."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with database.reading() as session:
        return int(session.execute(text(query)).scalar_one())


def waits_or_is_done(database: Database, removing: Future[Any]) -> None:
    """Returns once `removing` waits for a lock of somebody's transaction, or has come to an end without."""
    if database.engine.dialect.name == "sqlite":
        # A writer waits for the one before in any case.
        return
    deadline = time.monotonic() + 30
    while not removing.done() and time.monotonic() < deadline:
        if waiting_for_locks(database):
            return
    assert removing.done()
