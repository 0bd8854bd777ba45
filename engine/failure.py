"""Why a run can't go on: from the exception to the `failed` event, and from one rank to whoever writes it."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from engine.config import RunConfig
from engine.data.format import InvalidData
from engine.events import NO_ROOM, ErrorCode, Failed

FOLDER = "failures"
ROOM_HINT = "Free space on the host, or keep fewer checkpoints (training.keep_checkpoints)."
_FULL = ("the disk is full", ROOM_HINT)
NO_ROOM_FOR = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    # Python ignores the signal that comes with it.
    errno.EFBIG: (
        "a file would grow beyond what a process may write on this host",
        "Raise the limit on the size of files (ulimit -f), or use more ranks, so that each writes a smaller one.",
    ),
}
"""Errors of a file that can't grow: what they mean, and what to do."""
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")
"""What torch's allocators say; those of the CPU raise a plain RuntimeError."""


class RunFailure(Exception):
    """The run can't go on, for a reason that the user can act on."""

    def __init__(self, code: ErrorCode, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.hint = hint


class LostContact(Exception):
    """Another rank is gone. Its own reason, where there is one, says more."""


def explain(error: BaseException, *, rank: int) -> Failed:
    """The `failed` event for `error`, raised on `rank`."""
    said = _first_line(error)
    match error:
        # Those that quote a user's words come first: whatever is looked for in a library's words may be among them.
        case RunFailure():
            return Failed(code=error.code, message=str(error), hint=error.hint, rank=rank)
        case InvalidData():
            return Failed(code="invalid_data", message=str(error), hint=error.hint, rank=rank)
        case ValidationError(title=RunConfig.__name__):
            return Failed(code="invalid_model", message=f"run.json: {_faults(error)}", rank=rank)
        case _ if lost_contact(error):
            return Failed(code="rank_lost", message=f"rank {rank} lost contact with another rank: {said}", rank=rank)
        case OSError(errno=number) if number in NO_ROOM_FOR:
            what, hint = NO_ROOM_FOR[number]
            return Failed(code="disk_full", message=f"{what}: {said}", hint=hint, rank=rank)
        case _ if isinstance(error, MemoryError) or any(phrase in said.lower() for phrase in OUT_OF_MEMORY):
            return Failed(
                code="out_of_memory",
                message=f"out of memory: {said or 'the host has none left'}",
                hint="Lower training.micro_batch or data.seq_len, recompute more, or use more ranks.",
                rank=rank,
            )
    return Failed(
        code="internal",
        message=f"{type(error).__name__}: {said}",
        hint=f"The traceback is in logs/rank-{rank}.log.",
        rank=rank,
    )


def exit_code(work: Callable[[], int]) -> int:
    """What `work` returns, or `NO_ROOM` where a full disk keeps it from saying how it ended."""
    try:
        return work()
    except OSError as error:
        # Be it what should be said about another.
        if error.errno is None or error.errno not in NO_ROOM_FOR:
            raise
        what, _ = NO_ROOM_FOR[error.errno]
        # A rank's log lies on that disk too.
        with suppress(OSError):
            sys.stderr.write(f"{what}: {error}\n")
        return NO_ROOM


def lost_contact(error: BaseException) -> bool:
    """Whether `error` only means that another rank is gone."""
    # torch.distributed's own errors, by name since this module must not load torch; gloo raises plain RuntimeErrors.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    by_gloo = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    return bool(kinds & {"LostContact", "DistError"}) or by_gloo


def hand_over(run_dir: Path, failed: Failed) -> None:
    """Leave `failed` where the launcher and the other ranks look for it."""
    path = run_dir / FOLDER / f"rank-{failed.rank}.json"
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(failed.model_dump_json())
    os.replace(unfinished, path)


def handed_over(run_dir: Path) -> Failed | None:
    """The reason that some rank left: the first that is not merely another rank's absence, else any."""
    paths = sorted((run_dir / FOLDER).glob("rank-*.json"), key=lambda path: path.stat().st_mtime_ns)
    reasons = [Failed.model_validate(json.loads(path.read_text())) for path in paths]
    causes = [reason for reason in reasons if reason.code != "rank_lost"]
    return next(iter(causes + reasons), None)


def forget(run_dir: Path) -> None:
    """Remove what the ranks of an earlier run in this folder left."""
    for path in (run_dir / FOLDER).glob("rank-*"):
        path.unlink()


def _faults(error: ValidationError) -> str:
    """Each field and what is wrong with it; the file as a whole has no field."""
    faults = ((".".join(map(str, fault["loc"])), fault["msg"]) for fault in error.errors())
    return "; ".join(f"{where}: {what}" if where else what for where, what in faults)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
