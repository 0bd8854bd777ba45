"""Structured logs: for people on a terminal, else JSON lines. Never a key, a password in a URL, or training data."""

from __future__ import annotations

import logging
import sys

import structlog

from core.settings import Settings, misspelt

# Without the frames' variables, which is structlog's default: keys and training data would be among them.
_tracebacks = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))


def begin(settings: Settings) -> None:
    """`setup` for a process that somebody starts, which also names the variables that somebody misspelt."""
    setup(settings.log_level)
    for said in misspelt():
        structlog.get_logger(__name__).warning("a variable is ignored", why=said)


def setup(level: str = "INFO") -> None:
    """Send structlog's and the standard library's records to standard error in one form. Call it once per process."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    on_terminal = sys.stderr.isatty()
    rendering: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if on_terminal
        else [_tracebacks, structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "kombu", "amqp", "alembic.runtime"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
