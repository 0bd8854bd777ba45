"""A job in a few lines, as `show` and the end of `watch` print it."""

from __future__ import annotations

from datetime import datetime

from api.cli.answers import show_facts, size
from api.cli.picture import Picture
from api.client import Json


def in_line(queue: Json) -> str | None:
    """Its place, and when it should start; None where it doesn't wait, or nobody has looked yet."""
    if queue["position"] is None:
        return None
    at = queue["estimated_start"]
    return f"{queue['position']:,}" + (
        "" if at is None else f", starts about {datetime.fromtimestamp(at):%Y-%m-%d %H:%M}"
    )


def describe(job: Json) -> None:
    progress, queue, error = job["progress"], job["queue"], job["error"] or {}
    show_facts(
        {
            "job": f"{job['id']} ({job['kind']}) {job['name'] or ''}".rstrip(),
            "labels": ", ".join(f"{name}={value}" for name, value in job["labels"].items()),
            "priority": job["priority"] or None,
            "state": job["state"],
            "waits": queue["reason"],
            "in line": in_line(queue),
            "progress": Picture(job).line if progress["step"] else None,
            "plan": _compared(job["compared"]),
            "model": job["model"],
            "error": error.get("message"),
            "hint": error.get("hint"),
        }
    )


def _compared(compared: Json) -> str | None:
    """Of a job that has begun: what was planned, and what it was."""
    said = []
    if seconds := compared.get("step_seconds"):
        said.append(f"{seconds['planned']:.3g} s a step planned, {seconds['measured']:.3g} s measured")
    if held := compared.get("bytes_per_rank"):
        said.append(f"{size(held['planned'])} a rank planned, {size(held['measured'])} measured")
    return "; ".join(said) or None
