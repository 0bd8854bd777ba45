"""What a job's ranks printed: from the run directory while it is on this host, from storage after the attempt."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from core.errors import NotFound
from core.models import Job
from core.settings import Settings
from core.storage import Storage, Stored

BLOCK_BYTES = 64 * 1024
"""The end of a log is looked for in pieces of this size, growing twofold."""
_KEY = re.compile(r"jobs/([^/]+)/logs/(\d+)/[^/]+")
MOST_BYTES = 256 * BLOCK_BYTES
"""No more than this is read, however long the lines are: a progress bar writes gigabytes without ending one."""


def keep(storage: Storage, job_id: str, attempt: int, folder: Path) -> None:
    """Store every log in `folder` for good. Again is fine."""
    for path in sorted(folder.glob("*.log")):
        storage.put_file(f"{_prefix(job_id)}/{attempt}/{path.name}", path)


def whose(key: str) -> tuple[str, int] | None:
    """Job and attempt whose log this object is; None where it is none."""
    match = _KEY.fullmatch(key)
    return None if match is None else (match[1], int(match[2]))


def telling_rank(settings: Settings, storage: Storage, job: Job) -> int:
    """Whose log to read first: that of the rank that the job failed by, where it left one, else rank 0's."""
    blamed = (job.error or {}).get("rank")
    return blamed if blamed is not None and any(_found(settings, storage, job.id, blamed)) else 0


def tail(settings: Settings, storage: Storage, job_id: str, rank: int, lines: int) -> str:
    """The last `lines` that a rank printed in the newest attempt that has a log of it; NotFound if there is none."""
    here, kept = _found(settings, storage, job_id, rank)
    newest = max({*here, *kept}, default=None)
    if newest is None:
        raise NotFound(f"Rank {rank} of job {job_id!r} has no log here: it hasn't started, or runs on another host.")
    if newest in here:
        try:
            with here[newest].open("rb") as file:
                return _last(lines, os.fstat(file.fileno()).st_size, lambda start: _from(file, start))
        except FileNotFoundError:
            # The attempt ended this moment. Its logs were stored before its directory went.
            pass
    key = f"{_prefix(job_id)}/{newest}/{_name(rank)}"
    return _last(lines, storage.size(key), lambda start: b"".join(storage.stream(key, start)))


def _found(settings: Settings, storage: Storage, job_id: str, rank: int) -> tuple[dict[int, Path], dict[int, Stored]]:
    """Logs of a rank by attempt: those on this host, and those in storage."""
    here = {int(path.parts[-3]): path for path in (settings.runs / job_id).glob(f"[0-9]*/logs/{_name(rank)}")}
    kept = {
        int(stored.key.split("/")[-2]): stored
        for stored in storage.list(_prefix(job_id))
        if stored.key.endswith(f"/{_name(rank)}")
    }
    return here, kept


def _name(rank: int) -> str:
    return f"rank-{rank}.log"


def _prefix(job_id: str) -> str:
    return f"jobs/{job_id}/logs"


def _from(file: BinaryIO, start: int) -> bytes:
    file.seek(start)
    return file.read()


def _last(lines: int, size: int, read_from: Callable[[int], bytes]) -> str:
    """The last `lines` of something with `size` bytes, reading no more of its beginning than it has to."""
    window = BLOCK_BYTES
    while True:
        start = max(0, size - window)
        text = read_from(start)
        # One more newline than lines, so that the first of them is known to be whole.
        if start == 0 or window >= MOST_BYTES or text.count(b"\n") > lines:
            return b"".join(text.splitlines(keepends=True)[-lines:] if lines else []).decode(errors="replace")
        window *= 2
