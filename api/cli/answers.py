"""What a command prints of an answer: JSON for scripts, or a table with a line for each row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import typer
from rich.cells import cell_len

from api.cli import printable
from api.client import Json


def show_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def show_deleted(deleted: Json, as_json: bool) -> None:
    """What a server says that it has deleted."""
    if as_json:
        show_json(deleted)
    else:
        typer.echo(f"{deleted['id']} deleted")


def show_line(value: object) -> None:
    """One JSON value in one line, for streams of them."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def show_table(rows: Sequence[Json], columns: dict[str, str], *, none: str) -> None:
    """Chosen fields of each row, a dot goes deeper; or why there are no rows.

    A row is one line however narrow the terminal is: ids are there to be copied, and pipes read lines.
    """
    if not rows:
        typer.echo(none, err=True)
        return
    lines = [list(columns), *([cell(row, path) for path in columns.values()] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (text + " " * (width - cell_len(text)) for text, width in zip(line, widths, strict=True))
        typer.echo("  ".join(padded).rstrip())


def show_facts(facts: dict[str, object]) -> None:
    """Names and values under one another; what there is none of is left out."""
    width = max(map(len, facts)) + 1
    for name, value in facts.items():
        if value not in (None, ""):
            typer.echo(f"{name:{width}} {printable.text(str(value))}")


def cell(row: Json, path: str) -> str:
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case list():
            return printable.line(", ".join(map(str, value)))
        case int() | float() if path.endswith("_at"):
            return moment(value)
        case float():
            return f"{value:.4g}" if 0 < abs(value) < 0.1 else f"{value:.4f}"
    return printable.line(str(value))


def moment(seconds: float) -> str:
    """Unix seconds as a local date and time."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def size(number: float) -> str:
    """Bytes in the largest unit that leaves at least one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
