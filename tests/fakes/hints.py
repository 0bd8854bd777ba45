"""Hears hints and remembers them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Heard:
    """Stands in for queue and bell."""

    nudges: int = 0
    starts: list[tuple[str, str]] = field(default_factory=list)
    """Job and node of each start."""
    rings: list[str] = field(default_factory=list)
    """Job of each ring."""

    def nudge(self) -> None:
        self.nudges += 1

    def start(self, job_id: str, node: str) -> None:
        self.starts.append((job_id, node))

    def ring(self, job_id: str) -> None:
        self.rings.append(job_id)
