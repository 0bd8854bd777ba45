"""Locks of files, which end with whoever holds them, however that ends."""

from __future__ import annotations

import fcntl
from typing import IO, Any


def take(file: IO[Any]) -> bool:
    """Whether the open file's lock was free, and so is this process's until it is closed, there and where inherited."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
