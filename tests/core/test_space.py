"""A full disk is known for what it is, from what those who meet it really raise."""

from __future__ import annotations

import errno
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from obstore.exceptions import GenericError
from sqlalchemy import create_engine, text

from core import space


def a_file() -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        full.write(b"x")


def sqlite() -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA max_page_count = 2")
    connection.execute("CREATE TABLE t (x)")
    connection.execute("INSERT INTO t VALUES (zeroblob(100000))")


def sqlalchemy() -> None:
    with create_engine("sqlite://").connect() as connection:
        connection.execute(text("PRAGMA max_page_count = 2"))
        connection.execute(text("CREATE TABLE t (x)"))
        connection.execute(text("INSERT INTO t VALUES (zeroblob(100000))"))


def storage() -> None:
    # Its words on a full file system; `StorageFull` in its details has no counterpart in Python.
    raise GenericError("Generic LocalFileSystem error: Unable to copy data to file: No space left on device")


def a_quota() -> None:
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


def something_after_it() -> None:
    try:
        a_quota()
    except OSError as error:
        raise RuntimeError("the checkpoint was not written") from error


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize("fail", [a_file, sqlite, sqlalchemy, storage, a_quota, something_after_it])
def test_a_full_disk_is_known_by_whoever_met_it(fail: Callable[[], None]) -> None:
    with pytest.raises(Exception) as met:  # noqa: PT011
        fail()
    assert space.is_full(met.value)


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "Permission denied"), ValueError("x"), RuntimeError()])
def test_other_mishaps_are_not_taken_for_it(error: Exception) -> None:
    assert not space.is_full(error)
