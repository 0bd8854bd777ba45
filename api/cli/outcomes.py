"""How a command ends: a number that scripts can use, and words on the standard error that say why."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from api.cli import printable
from api.client import ApiError, Damaged, Occupied, Unreachable


class Exit(IntEnum):
    """What a script can tell the outcome by; `MEANINGS` says each in words."""

    OK = 0
    JOB_FAILED = 1
    USAGE = 2
    REFUSED = 3
    UNREACHABLE = 4
    JOB_CANCELLED = 5
    DAMAGED = 6
    INTERRUPTED = 130
    """Ctrl-C, as shells number it."""


MEANINGS = {
    Exit.OK: "done (or the watched job succeeded)",
    Exit.JOB_FAILED: "the watched job failed",
    Exit.USAGE: "wrong usage, a setting that can't be used, or a spec that is no job (nothing was sent)",
    Exit.REFUSED: "the server refused, and said why",
    Exit.UNREACHABLE: "no server answers (for as long as `--patience` allows)",
    Exit.JOB_CANCELLED: "the watched job was cancelled",
    Exit.DAMAGED: "a download is not what the manifest says",
    Exit.INTERRUPTED: "Ctrl-C (a watched job goes on)",
}
EPILOG = "Exit codes: " + "; ".join(f"{code:d} {meaning}" for code, meaning in MEANINGS.items()) + "."


class Fault(Exception):
    """A command can't do what it was asked; ends it with words and a code."""

    def __init__(self, message: str, code: Exit, detail: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.detail = {"message": message, **(detail or {})}
        """What `--json` prints as the error."""


def fail(message: str, code: Exit, detail: Mapping[str, Any] | None = None) -> NoReturn:
    raise Fault(message, code, detail)


class Command(TyperGroup):
    """The one place where what goes wrong becomes words and an exit code."""

    # The context's own type is private to typer.
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (Fault, ApiError, Unreachable, Damaged, Occupied) as error:
            fault = error if isinstance(error, Fault) else _fault(error)
            end(fault, as_json=getattr(ctx.obj, "as_json", False))


def end(fault: Fault, *, as_json: bool) -> NoReturn:
    """Say it where it does not get between a script and its data."""
    said = json.dumps({"error": fault.detail, "exit_code": int(fault.code)}, ensure_ascii=False)
    typer.echo(said if as_json else printable.text(str(fault)), err=True)
    raise typer.Exit(fault.code)


def _fault(error: ApiError | Unreachable | Damaged | Occupied) -> Fault:
    match error:
        case ApiError():
            where = f" [{error.param}]" if _helps(error) else ""
            which = f" ({error.request_id})" if error.status >= 500 and error.request_id else ""
            told = error.error | {"message": str(error), "status": error.status, "request_id": error.request_id}
            said = f"{error}{where}{which}".replace("`force=true`", "`--force`")
            return Fault("\n".join([said, *_further(error.error)]), Exit.REFUSED, told)
        case Unreachable():
            hint = "Is it running? `trainshed serve` starts one; --url says where it is."
            return Fault(f"{error}. {hint}", Exit.UNREACHABLE, {"code": "unreachable"})
        case Damaged():
            return Fault(str(error), Exit.DAMAGED, {"code": "damaged"})
        case Occupied():
            said = f"{error}: choose another folder with --into, or move what is there away."
            return Fault(said, Exit.USAGE, {"code": "occupied"})


def _helps(error: ApiError) -> bool:
    """Whether the field's name says where to look: an id stands in the command, a line in the message."""
    param = error.param or ""
    return bool(param) and param not in str(error) and not re.search(r"_id$|:\d+$", param)


def _further(told: Mapping[str, Any]) -> list[str]:
    """Of a file's findings those behind the first, which the message has."""
    # Here and not above: few commands need it, and all would wait for it.
    from engine.data.format import Finding

    further = [each for each in (told.get("errors") or ())[1:] if each.get("line")]
    return [str(Finding(each["line"], each["message"], each.get("column"), each.get("field"))) for each in further]
