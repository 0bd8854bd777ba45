"""What surrounds one request, from its first byte on: dependencies find it there, and may add to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.types import Scope

_NAME = "trainshed.surroundings"


@dataclass
class Surroundings:
    """Made before anybody looks at the request, and heeded until its answer has gone out."""

    request_id: str
    headers: dict[str, str] = field(default_factory=dict)
    """What the answer gets, whatever it is."""


def put(scope: Scope, surroundings: Surroundings) -> None:
    scope[_NAME] = surroundings


def of(scope: Scope) -> Surroundings:
    """The surroundings of the request that `scope` is."""
    found: Surroundings = scope[_NAME]
    return found
