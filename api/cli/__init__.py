"""The `trainshed` command: start the service, and use one over its public routes."""

from api.cli.command import app, main
from api.cli.outcomes import Exit

__all__ = ["Exit", "app", "main"]
