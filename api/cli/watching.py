"""`trainshed watch`: stay with a job until it ends."""

from __future__ import annotations

import json

import typer
from rich.console import Console

from api.cli import screen
from api.cli.asking import JobId, JsonFlag, client
from api.cli.describing import describe
from api.cli.outcomes import Exit, fail
from api.client import Client, Json

app = typer.Typer()


@app.command(rich_help_panel="Jobs")
def watch(context: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """Watch a job until it ends: a live bar with the loss; with --json, each event in a line."""
    with client(context) as trainshed:
        stay(trainshed, trainshed.job(job), as_json=as_json)


def stay(trainshed: Client, job: Json, *, as_json: bool) -> None:
    """Watch until the end; the exit code is the job's outcome."""
    events = trainshed.follow(job["id"])
    try:
        if as_json:
            for event in events:
                typer.echo(json.dumps({"event": event.name, **event.data}, ensure_ascii=False))
            ended = event.data["job"]
        else:
            ended = screen.watch(job, events, Console())
            describe(ended)
    except KeyboardInterrupt:
        # The code of an aborted command would be that of a failed job.
        fail(f"The job goes on. `trainshed cancel {job['id']}` ends it; `watch` shows it again.", Exit.INTERRUPTED)
    outcomes = {"failed": Exit.JOB_FAILED, "cancelled": Exit.JOB_CANCELLED}
    raise typer.Exit(outcomes.get(ended["state"], Exit.OK))
