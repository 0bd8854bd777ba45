"""How a full disk shows itself, whoever meets it: the file system, the storage library or a database."""

from __future__ import annotations

import errno

_FULL = {errno.ENOSPC, errno.EDQUOT}
_WORDS = ("No space left", "disk is full", "Disk quota exceeded")
"""What the storage library and the databases say; they pass no number on."""


def is_full(error: BaseException) -> bool:
    """Whether this went wrong for want of space. What it was raised from counts as well."""
    found: BaseException | None = error
    while found is not None:
        if getattr(found, "errno", None) in _FULL or any(words in str(found) for words in _WORDS):
            return True
        found = found.__cause__
    return False
