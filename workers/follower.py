"""Follow a growing `events.jsonl`, one whole line at a time. What the events mean is `engine.events`' business."""

from __future__ import annotations

from pathlib import Path

import structlog
from pydantic import ValidationError

from engine.events import Event, adapter

log = structlog.get_logger(__name__)

CHUNK_BYTES = 64 * 1024
"""Read at most this much at once, so that a long backlog is recorded in several short transactions."""


class Follower:
    """Reads on from where it stopped. A line without its newline is not there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """Bytes that were read as whole lines."""

    def read(self) -> list[Event]:
        """The events since the last call, in order; empty when there are none, or no file yet."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                chunk = file.read(CHUNK_BYTES)
                while chunk and b"\n" not in chunk and (more := file.read(CHUNK_BYTES)):
                    chunk += more
        except FileNotFoundError:
            return []
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [event for line in whole.splitlines() if (event := self._parse(line)) is not None]

    def _parse(self, line: bytes) -> Event | None:
        try:
            return adapter.validate_json(line)
        except ValidationError as error:
            # A newer engine may say what this service does not know; its other lines still count.
            log.warning("event not understood", path=str(self.path), problems=error.error_count())
            return None
