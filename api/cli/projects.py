"""Commands for projects: who owns what, and how much of it they may use."""

from __future__ import annotations

import re
from enum import StrEnum
from itertools import islice
from typing import Annotated, Any

import typer

from api.cli.answers import cell, show_facts, show_json, show_table, size
from api.cli.asking import JsonFlag, client
from api.cli.naming import ProjectId
from api.cli.outcomes import Exit, fail
from api.client import Json

app = typer.Typer(
    help="Projects and their quotas; most of it is for an admin of the organisation.", no_args_is_help=True
)


class Whose(StrEnum):
    NEVER = "never"
    OWN = "own"
    ANY = "any"


WORDS = {
    Whose.NEVER: "nobody",
    Whose.OWN: "its own jobs of higher priority",
    Whose.ANY: "all jobs of higher priority",
}
NO_LIMIT = "none"
UNITS = {
    "": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}

GpuHours = Annotated[
    str | None, typer.Option(help=f"Hours of GPUs (or CPU slots) in a calendar month; {NO_LIMIT} takes the limit away.")
]
ConcurrentJobs = Annotated[
    str | None, typer.Option(help=f"Jobs that hold slots at once; {NO_LIMIT} takes the limit away.")
]
Storage = Annotated[
    str | None, typer.Option(help=f"Bytes, or such as 50GiB, in storage; {NO_LIMIT} takes the limit away.")
]

Preemption = Annotated[
    Whose | None,
    typer.Option(help="Whose jobs of higher priority may stop its jobs, which save their state and wait again."),
]


@app.command("list")
def list_projects(
    context: typer.Context,
    archived: Annotated[bool, typer.Option("--archived", help="Also those that are closed.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, newest first.")] = 100,
    as_json: JsonFlag = False,
) -> None:
    """List projects, newest first: your own, or all for an admin of the organisation."""
    with client(context) as trainshed:
        found = trainshed.projects(include_archived=archived, limit=min(limit, 100))
        rows = list(islice(found, limit))
    if as_json:
        show_json(rows)
    else:
        columns = {"id": "id", "name": "name", "status": "status", "running": "usage.concurrent_jobs",
                   "gpu hours": "usage.gpu_hours", "bytes": "usage.storage_bytes", "made": "created_at"}  # fmt: skip
        show_table(rows, columns, none="No projects.")


@app.command("show")
def show_project(context: typer.Context, project: ProjectId, as_json: JsonFlag = False) -> None:
    """Show a project: what it may use, and what it uses."""
    with client(context) as trainshed:
        tell(trainshed.project(project), as_json)


@app.command("create")
def create_project(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What people call it.")],
    gpu_hours: GpuHours = None,
    concurrent_jobs: ConcurrentJobs = None,
    storage: Storage = None,
    preemption: Preemption = Whose.NEVER,
    as_json: JsonFlag = False,
) -> None:
    """Make a project. It has no keys yet: `trainshed keys create … --project` makes them."""
    wanted = quotas(gpu_hours, concurrent_jobs, storage)
    with client(context) as trainshed:
        made = trainshed.create_project(name, preemption=preemption or Whose.NEVER, **wanted)
    if as_json:
        show_json(made)
    else:
        typer.echo(made["id"])


@app.command("edit")
def edit_project(
    context: typer.Context,
    project: ProjectId,
    name: Annotated[str | None, typer.Option(help="What people call it.")] = None,
    gpu_hours: GpuHours = None,
    concurrent_jobs: ConcurrentJobs = None,
    storage: Storage = None,
    preemption: Preemption = None,
    as_json: JsonFlag = False,
) -> None:
    """Change a project's name, quotas, or whose jobs may stop its own; what isn't said stays."""
    said = {"name": name, "preemption": preemption}
    changes: Json = {field: value for field, value in said.items() if value is not None}
    if wanted := quotas(gpu_hours, concurrent_jobs, storage):
        changes["quotas"] = wanted
    if not changes:
        fail("Say what to change: --name, --gpu-hours, --concurrent-jobs, --storage or --preemption.", Exit.USAGE)
    with client(context) as trainshed:
        tell(trainshed.edit_project(project, **changes), as_json)


@app.command("archive")
def archive_project(context: typer.Context, project: ProjectId, as_json: JsonFlag = False) -> None:
    """Close a project for good: its keys open nothing from now on, and its jobs are cancelled."""
    with client(context) as trainshed:
        archived = trainshed.archive_project(project)
    if as_json:
        show_json(archived)
    else:
        typer.echo(f"{archived['id']} archived")


def quotas(gpu_hours: str | None, concurrent_jobs: str | None, storage: str | None) -> Json:
    """The quotas that were said, as the API takes them."""
    said = {"gpu_hours": gpu_hours, "concurrent_jobs": concurrent_jobs, "storage_bytes": storage}
    return {name: _limit(name, value) for name, value in said.items() if value is not None}


def _limit(name: str, said: str) -> float | int | None:
    if said == NO_LIMIT:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", said.strip().lower())
    scale = UNITS.get(match[2]) if match and (name == "storage_bytes" or not match[2]) else None
    number = float(match[1]) * scale if match and scale else None
    if number is None or (name == "concurrent_jobs" and not number.is_integer()):
        fail(f"{said!r} is no limit: give a number, or {NO_LIMIT}.", Exit.USAGE)
    return number if name == "gpu_hours" else int(number)


def tell(project: Json, as_json: bool) -> None:
    if as_json:
        show_json(project)
        return
    limits, used = project["quotas"], project["usage"]
    show_facts(
        {
            "id": project["id"],
            "name": project["name"],
            "status": project["status"],
            "made": cell(project, "created_at"),
            "archived": project["archived_at"] and cell(project, "archived_at"),
            "gpu hours": _used(f"{used['gpu_hours']:.2f}", limits["gpu_hours"]),
            "running": _used(used["concurrent_jobs"], limits["concurrent_jobs"]),
            "gives way to": WORDS[project["preemption"]],
            "storage": _used(size(used["storage_bytes"]), _size(limits["storage_bytes"])),
        }
    )


def _size(number: Any) -> str | None:
    return None if number is None else size(number)


def _used(used: object, limit: object) -> str:
    return f"{used} of {limit}" if limit is not None else f"{used}, no limit"
