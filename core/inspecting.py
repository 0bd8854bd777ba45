"""What a file of ids holds, Parquet or Megatron's: asked of the engine, which reads it in a process of its own.

These are binary formats from a stranger: whatever they do to the libraries that read them, they do it there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import IO, Any

from core.errors import InvalidFile
from core.settings import trainer_environment
from engine.data.format import MEGATRON, PARQUET

INSPECT = (sys.executable, "-m", "engine", "inspect")
SECONDS = 900.0
"""For the largest file; a gigabyte takes seconds."""
_TAR_MAGIC_AT, _TAR_MAGIC = 257, b"ustar"
HEAD_BYTES = 512


def holds_ids(head: bytes) -> bool:
    """Whether a file that begins with `head` is to be read as ids."""
    if head.startswith(MEGATRON):
        raise InvalidFile("This is one of Megatron's two files: put the .idx and its .bin in one tar, and upload that.")
    return may_hold_ids(head)


def may_hold_ids(head: bytes) -> bool:
    """Whether what begins with `head` is a container that ids come in."""
    return head.startswith(PARQUET) or head[_TAR_MAGIC_AT:].startswith(_TAR_MAGIC)


def inspect(file: IO[bytes], *, most_ids: int) -> dict[str, Any]:
    """The report of a file of ids; one of more than `most_ids` is not unpacked, however small it is."""
    # The child shares the file's place with us, and our buffer relies on where it was.
    place = os.lseek(file.fileno(), 0, os.SEEK_CUR)
    try:
        ran = subprocess.run(
            [*INSPECT, "--most-ids", str(most_ids)],
            stdin=file,
            capture_output=True,
            timeout=SECONDS,
            check=False,
            env=trainer_environment(()) | {"OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired as error:
        raise InvalidFile(f"Reading the file takes longer than {SECONDS:g} s; split it.") from error
    finally:
        os.lseek(file.fileno(), place, os.SEEK_SET)
    if ran.returncode:
        raise InvalidFile(
            "The file of ids can't be read, or only with more memory than there is; write smaller row groups."
        )
    report: dict[str, Any] = json.loads(ran.stdout)
    return report
