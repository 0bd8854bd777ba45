"""Commands for jobs: list and show them, and say what they are to do."""

from __future__ import annotations

from typing import Annotated

import typer

from api.cli.answers import show_json, show_table
from api.cli.asking import JobId, JsonFlag, client
from api.cli.describing import describe
from api.client import Json

app = typer.Typer()


@app.command("list", rich_help_panel="Jobs")
def list_jobs(
    context: typer.Context,
    state: Annotated[str | None, typer.Option(help="Only jobs in this state, such as running.")] = None,
    kind: Annotated[str | None, typer.Option(help="pretrain or finetune.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Only jobs with this label, name=value; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many, newest first.")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """List jobs, newest first."""
    labels = dict(one.partition("=")[::2] for one in label or [])
    with client(context) as trainshed:
        pages = trainshed.jobs(state=state, kind=kind, label=labels, limit=min(limit, 100))
        rows = [job for job, _ in zip(pages, range(limit), strict=False)]
    if as_json:
        show_json(rows)
    else:
        columns = {"id": "id", "name": "name", "kind": "kind", "state": "state", "step": "progress.step",
                   "of": "progress.total_steps", "loss": "progress.loss", "model": "model"}  # fmt: skip
        filtered = state or kind or label
        show_table(rows, columns, none="No such jobs." if filtered else "No jobs yet; `trainshed submit` makes one.")


@app.command(rich_help_panel="Jobs")
def show(context: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """Show one job."""
    with client(context) as trainshed:
        found = trainshed.job(job)
    if as_json:
        show_json(found)
    else:
        describe(found)


@app.command(rich_help_panel="Jobs")
def cancel(context: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """End a job."""
    with client(context) as trainshed:
        tell_state(trainshed.cancel(job), as_json=as_json)


@app.command(rich_help_panel="Jobs")
def pause(context: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """Save a job's progress and give its slots back."""
    with client(context) as trainshed:
        tell_state(trainshed.pause(job), as_json=as_json)


@app.command(rich_help_panel="Jobs")
def resume(context: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """Queue a paused job again."""
    with client(context) as trainshed:
        tell_state(trainshed.resume(job), as_json=as_json)


def tell_state(job: Json, *, as_json: bool) -> None:
    if as_json:
        show_json(job)
    else:
        typer.echo(f"{job['id']} {job['state']}")
