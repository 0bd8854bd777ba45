"""What surrounds one request, from its first byte on: dependencies find it there, and may add to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

from starlette.types import Scope

MULTIPART_BYTES = 64 * 1024
"""What the form around an uploaded file may take."""
_NAME = "trainshed.surroundings"


@dataclass(frozen=True)
class Limit:
    """How large a body may be, and what is raised as soon as it is larger."""

    most_bytes: int
    refusal: Exception


@dataclass
class Surroundings:
    """Made before anybody looks at the request, and heeded until its answer has gone out."""

    request_id: str
    came_at: float = field(default_factory=monotonic)
    """When it came, on the monotonic clock."""
    headers: dict[str, str] = field(default_factory=dict)
    """What the answer gets, whatever it is."""
    limit: Limit | None = None
    """Of the body; None before it is known what is asked for."""
    was_refused: bool = False
    """Whether the key was lately told to come again later."""
    first_try: str | None = None
    """Digest of the create that this is the first try of."""

    def tighten(self, limit: Limit) -> None:
        """Refuse a body sooner than it would have been."""
        if self.limit is None or limit.most_bytes < self.limit.most_bytes:
            self.limit = limit


def put(scope: Scope, surroundings: Surroundings) -> None:
    scope[_NAME] = surroundings


def of(scope: Scope) -> Surroundings:
    """The surroundings of the request that `scope` is."""
    found: Surroundings = scope[_NAME]
    return found
