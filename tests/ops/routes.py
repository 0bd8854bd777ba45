"""Whether the application has a route for a method and a path, without starting anything."""

from __future__ import annotations

from typing import Any, cast

from starlette.routing import Match

from api.app import create_app
from core.services import Services

_app = create_app(cast(Services, None))


def exists(method: str, path: str) -> bool:
    scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "headers": [], "root_path": ""}
    return any(route.matches(scope)[0] is Match.FULL for route in _app.routes)
