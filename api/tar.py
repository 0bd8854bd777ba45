"""A tar archive made while it is sent: no file of it ever lies on this machine's disk."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

PADDED = tarfile.BLOCKSIZE


@dataclass(frozen=True)
class Entry:
    """One file to come."""

    path: str
    size: int
    modified_at: int
    open_: Callable[[], Iterator[bytes]]

    @property
    def header(self) -> bytes:
        info = tarfile.TarInfo(self.path)
        info.size, info.mtime, info.mode = self.size, self.modified_at, 0o644
        return info.tobuf(tarfile.PAX_FORMAT)

    @property
    def padding(self) -> bytes:
        return bytes(-self.size % PADDED)


def length(entries: Sequence[Entry]) -> int:
    """Bytes of the whole archive, known before the first is sent."""
    return sum(len(entry.header) + entry.size + len(entry.padding) for entry in entries) + 2 * PADDED


def stream(entries: Sequence[Entry]) -> Iterator[bytes]:
    for entry in entries:
        yield entry.header
        yield from entry.open_()
        yield entry.padding
    yield bytes(2 * PADDED)
