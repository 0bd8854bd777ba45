"""A job in a few lines, as `show` and the end of `watch` print it."""

from __future__ import annotations

import typer

from api.cli.screen import Picture
from api.client import Json


def describe(job: Json) -> None:
    progress, queue, error = job["progress"], job["queue"], job["error"] or {}
    lines = {
        "job": f"{job['id']} ({job['kind']}) {job['name'] or ''}".rstrip(),
        "state": job["state"],
        "waits": queue["reason"],
        "progress": Picture(job).line if progress["step"] else None,
        "model": job["model"],
        "error": error.get("message"),
        "hint": error.get("hint"),
    }
    for name, value in lines.items():
        if value:
            typer.echo(f"{name:9} {value}")
