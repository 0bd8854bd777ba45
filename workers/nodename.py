"""A node's name, which one process has at a time: of its data directory by a lock, and of the cluster by its row."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import monotonic
from typing import IO
from urllib.parse import quote
from uuid import uuid4

import structlog

from core import filelocks
from core.errors import InUse
from core.settings import Settings
from workers.orders import Orders

log = structlog.get_logger(__name__)

LOOK_SECONDS = 0.2
"""How often it is looked whether one that goes down has gone."""
ENDS_WITHIN_SECONDS = 30.0
"""What a node that goes down gets beyond the grace of its runs before nobody waits for it any more."""


@dataclass(frozen=True)
class Note:
    """What the file of a name says to others."""

    holder: str = ""
    pid: int = 0
    goes_down: bool = False


class NodeName:
    """A name that is ours."""

    def __init__(self, file: IO[bytes], holder: str) -> None:
        self._file = file
        self.holder = holder
        """Of this data directory, the same each time: a row that names it is left from one that has ended."""
        self._note(goes_down=False)

    def goes_down(self) -> None:
        """Let the next one wait for the end of this one."""
        self._note(goes_down=True)

    def _note(self, *, goes_down: bool) -> None:
        note = json.dumps(asdict(Note(self.holder, os.getpid(), goes_down))) + "\n"
        try:
            # Over what is there, in one write: whoever reads meanwhile finds the old or the new.
            self._file.seek(0)
            self._file.write(note.encode())
            self._file.truncate()
        except OSError as error:  # the disk is full, say: the lock is what counts
            log.warning("others are not told who has the node's name", error=str(error))


@contextmanager
def held(settings: Settings, orders: Orders) -> Iterator[NodeName]:
    """Have the name of this data directory's node, until the end of the block or of the process.

    One that is going down is waited for, unless a wish comes first. Raises InUse where another node has the name.
    """
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    deadline: float | None = None
    path = settings.data_dir / f"node-{quote(settings.node_name, safe='')}.lock"
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
        while not filelocks.take(file):
            other = _noted(file)
            if deadline is None:
                deadline = monotonic() + settings.stop_grace_seconds + ENDS_WITHIN_SECONDS
                log.info(
                    "another node has this name", node=settings.node_name, pid=other.pid, goes_down=other.goes_down
                )
            waits = other.goes_down and monotonic() < deadline
            if not waits or orders.wait(LOOK_SECONDS) is not None:
                raise InUse(
                    f"The node {settings.node_name!r} of {settings.data_dir.absolute()} runs already, as process "
                    f"{other.pid or 'unknown'}; `trainshed serve` starts one itself, and one offers all of this "
                    "host's slots. End that one, or give this one another TRAINSHED_NODE_NAME."
                )
        yield NodeName(file, _noted(file).holder or uuid4().hex)


def _noted(file: IO[bytes]) -> Note:
    """What the holder has written last; nothing of a new file, nor of one that a power cut has spoilt."""
    file.seek(0)
    try:
        return Note(**json.loads(file.read()))
    except (ValueError, TypeError):
        return Note()
