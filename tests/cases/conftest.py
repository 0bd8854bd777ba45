"""The API that cases are sent to, over a real socket."""

from __future__ import annotations

from tests.api.conftest import live, quiet_logs

__all__ = ["live", "quiet_logs"]
