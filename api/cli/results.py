"""Commands for what a job leaves behind: logs, events, metrics, checkpoints, and the files of its result."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from api.cli import printable
from api.cli.answers import show_json, show_table
from api.cli.asking import JsonFlag, client
from api.cli.curves import Curve, draw
from api.cli.naming import JobId
from api.cli.outcomes import Exit, fail
from api.cli.transfers import Transfers
from api.client import Json
from engine.counting import counted

app = typer.Typer()
PANEL = "Results"
CURVE_HEIGHT = 12
MOST_POINTS = 10_000
"""As many of each series as the server gives at once."""

FromStep = Annotated[int | None, typer.Option(min=0, help="From this step on.")]
ToStep = Annotated[int | None, typer.Option(min=0, help="Up to this step.")]
Names = Annotated[
    list[str] | None, typer.Option("--name", help="Such as loss, validation_loss or lr; may be repeated.")
]


@app.command(rich_help_panel=PANEL)
def logs(
    context: typer.Context,
    job: JobId,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Whose log; default: of the rank that the job failed by, else 0.")
    ] = None,
    tail: Annotated[int, typer.Option(min=1, max=10_000, help="Last so many lines.")] = 200,
    as_json: JsonFlag = False,
) -> None:
    """Print what a rank wrote."""
    with client(context) as trainshed:
        log = trainshed.log(job, rank=rank, tail=tail)
    if as_json:
        show_json({"job": job, "rank": log.rank, "lines": log.text.splitlines()})
    else:
        if rank is None and log.rank:
            typer.echo(f"of rank {log.rank}, by which the job failed:", err=True)
        # Into a file or a pipe it goes as it is.
        typer.echo(printable.text(log.text) if sys.stdout.isatty() else log.text, nl=False)


@app.command(rich_help_panel=PANEL)
def events(
    context: typer.Context,
    job: JobId,
    type: Annotated[
        list[str] | None, typer.Option(help="Only events of this type, such as state; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 50,
    as_json: JsonFlag = False,
) -> None:
    """List what happened to a job, the newest last."""
    with client(context) as trainshed:
        found = trainshed.events(job, order="desc", type=type, limit=min(limit, 100))
        rows = list(islice(found, limit))[::-1]
    if as_json:
        show_json(rows)
    else:
        columns = {"seq": "seq", "at": "created_at", "type": "type", "level": "level", "message": "message"}
        show_table(rows, columns, none="No such events." if type else "Nothing has happened yet.")


@app.command(rich_help_panel=PANEL)
def metrics(
    context: typer.Context,
    job: JobId,
    name: Names = None,
    from_step: FromStep = None,
    to_step: ToStep = None,
    points: Annotated[int, typer.Option(min=2, max=MOST_POINTS, help="At most so many of each.")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """Print a job's numbers over steps, so many of each at even distances; with --json, first, last and extremes."""
    with client(context) as trainshed:
        found = trainshed.metrics(
            job, names=name or ["loss", "validation_loss", "lr", "grad_norm", "tokens_per_second"],
            from_step=from_step, to_step=to_step, max_points=points if as_json else MOST_POINTS,
        )  # fmt: skip
    if as_json:
        show_json(found)
        return
    there = {name: dict(map(tuple, points)) for name, points in found["series"].items() if points}
    rows: list[Json] = [
        {"step": step} | {name: series.get(step) for name, series in there.items()}
        for step in even(there.values(), points)
    ]
    show_table(rows, {name: name for name in ["step", *there]}, none="Nothing of it has been measured yet.")


def even(series: Iterable[Mapping[int, float]], most: int) -> list[int]:
    """Steps at even distances, the first and the last among them; of what was measured seldom, all."""
    chosen: set[int] = set()
    for steps in map(sorted, series):
        last = len(steps) - 1
        chosen |= set(steps if last < most else (steps[round(last * at / (most - 1))] for at in range(most)))
    return sorted(chosen)


@app.command(rich_help_panel=PANEL)
def curve(
    context: typer.Context,
    job: JobId,
    name: Names = None,
    from_step: FromStep = None,
    to_step: ToStep = None,
    as_json: JsonFlag = False,
) -> None:
    """Draw a job's numbers over steps; the loss and that of validations unless --name says others."""
    console = Console()
    width = console.width
    with client(context) as trainshed:
        found = trainshed.metrics(
            job, names=name or ["loss", "validation_loss"], from_step=from_step, to_step=to_step,
            # Two dots in each column, and the extremes beside them.
            max_points=max(50, 4 * width),
        )  # fmt: skip
    if as_json:
        show_json(found)
        return
    curves = [Curve(name, points) for name, points in found["series"].items() if points]
    if not curves:
        typer.echo("Nothing of it has been measured yet.", err=True)
        return
    console.print(draw(curves, width=width, height=CURVE_HEIGHT, ascii_only=console.options.ascii_only))


@app.command(rich_help_panel=PANEL)
def checkpoints(
    context: typer.Context,
    job: JobId,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, newest first.")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """List a job's checkpoints, newest first; each is a model by its id. Its run went back from abandoned ones."""
    with client(context) as trainshed:
        rows = list(islice(trainshed.checkpoints(job, limit=min(limit, 100)), limit))
    if as_json:
        show_json(rows)
    else:
        columns = {"id": "id", "step": "step", "loss": "metrics.loss", "validation": "metrics.validation_loss",
                   "bytes": "bytes", "made": "created_at", "abandoned": "abandoned"}  # fmt: skip
        show_table(rows, columns, none="The job has no checkpoints yet.")


@app.command(rich_help_panel=PANEL)
def download(
    context: typer.Context,
    job: JobId,
    into: Annotated[Path | None, typer.Option(help="Folder; default: the job's id.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Download a job's artifacts, each verified. What is here already is kept, what broke off goes on."""
    folder = into or Path(job)
    try:
        with client(context) as trainshed, Transfers(quiet=as_json) as transfers:
            paths = trainshed.download(job, folder, report=transfers.report)
    except KeyboardInterrupt:
        fail(f"What is in {folder} stays; the same command goes on from there.", Exit.INTERRUPTED)
    except OSError as error:
        fail(f"{folder} can't be written to: {error}", Exit.USAGE)
    if as_json:
        show_json([str(path) for path in paths])
    else:
        typer.echo(
            f"{counted(len(paths), 'file')} in {folder}, each verified" if paths else "The job has no artifacts yet."
        )
