"""The API that is attacked, over a real socket."""

from __future__ import annotations

from tests.api.conftest import http, key, live, organization, quiet_logs

__all__ = ["http", "key", "live", "organization", "quiet_logs"]
