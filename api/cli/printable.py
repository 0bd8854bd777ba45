"""Text of others, fit for a terminal: an escape sequence in it would be a command to that, a line end a forged line."""

from __future__ import annotations

import re

_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BREAKS = re.compile(r"[\t\n\u2028\u2029]+")


def text(said: str) -> str:
    """Without what a terminal would obey; lines and tabs stay."""
    return _COMMANDS.sub("\ufffd", said.replace("\r\n", "\n"))


def line(said: str) -> str:
    """The same in one line."""
    return text(_BREAKS.sub(" ", said))
