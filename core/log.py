"""Structured logs: for people on a terminal, else JSON lines. Never a key, a password in a URL, or training data."""

from __future__ import annotations

import logging
import re
import sys

import structlog

from core.settings import Settings, misspelt

# Without the frames' variables, which is structlog's default: keys and training data would be among them.
_tracebacks = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))


# JSON escapes all of these.
_COMMANDS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def _tame(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Let no text of others command the terminal, or look like a line of its own. A traceback keeps its lines."""
    return {
        name: _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), value)
        if isinstance(value, str) and name not in {"exception", "stack"}
        else value
        for name, value in event.items()
    }


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
        [_tame, structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
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
