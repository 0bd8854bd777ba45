"""Commands for what a job leaves behind: logs, and the files of its result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from api.cli.answers import show_json
from api.cli.asking import JobId, JsonFlag, client

app = typer.Typer()


@app.command(rich_help_panel="Results")
def logs(
    context: typer.Context,
    job: JobId,
    rank: Annotated[int, typer.Option(help="Whose log.")] = 0,
    tail: Annotated[int, typer.Option(help="Last so many lines.")] = 200,
) -> None:
    """Print what a rank wrote."""
    with client(context) as trainshed:
        typer.echo(trainshed.logs(job, rank=rank, tail=tail), nl=False)


@app.command(rich_help_panel="Results")
def download(
    context: typer.Context,
    job: JobId,
    into: Annotated[Path | None, typer.Option(help="Folder; default: the job's id.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Download a job's artifacts, each verified. What is here already is kept, what broke off goes on."""
    folder = into or Path(job)
    bar = Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
                   console=Console(stderr=True), disable=as_json)  # fmt: skip
    tasks: dict[str, Any] = {}

    def report(path: str, here: int, total: int) -> None:
        task = tasks.setdefault(path, None) or bar.add_task(path, total=total)
        tasks[path] = task
        bar.update(task, completed=here)

    with client(context) as trainshed, bar:
        paths = trainshed.download(job, folder, report=report)
    if as_json:
        show_json([str(path) for path in paths])
    else:
        typer.echo(f"{len(paths)} files in {folder}, each verified" if paths else "The job has no artifacts yet.")
