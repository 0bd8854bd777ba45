"""`trainshed watch`: stay with a job until it ends."""

from __future__ import annotations

from itertools import islice

import typer
from rich.console import Console

from api.cli import screen
from api.cli.answers import show_line
from api.cli.asking import JsonFlag, client
from api.cli.describing import describe
from api.cli.naming import JobId
from api.cli.outcomes import Exit, fail
from api.cli.picture import SERIES, Picture
from api.client import Client, Event, Json

RECENT = 50
"""Events that tell where a job is that has run for a while; its curves come from its metrics."""
OUTCOMES = {"failed": Exit.JOB_FAILED, "cancelled": Exit.JOB_CANCELLED}

app = typer.Typer()


@app.command(rich_help_panel="Jobs")
def watch(context: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """Watch a job until it ends: a bar and curves in a terminal, else lines; with --json, each event in a line."""
    with client(context) as trainshed:
        stay(trainshed, trainshed.job(job), as_json=as_json)


def stay(trainshed: Client, job: Json, *, as_json: bool) -> None:
    """Watch until the end; the exit code is the job's outcome."""
    try:
        ended = _told(trainshed, job) if as_json else _shown(trainshed, job)
    except KeyboardInterrupt:
        # The code of an aborted command would be that of a failed job.
        fail(f"The job goes on. `trainshed cancel {job['id']}` ends it; `watch` shows it again.", Exit.INTERRUPTED)
    if not as_json:
        describe(ended)
    raise typer.Exit(OUTCOMES.get(ended["state"], Exit.OK))


def _told(trainshed: Client, job: Json) -> Json:
    for event in trainshed.follow(job["id"]):
        show_line({"event": event.name, **event.data})
    ended: Json = event.data["job"]
    return ended


def _shown(trainshed: Client, job: Json) -> Json:
    console = Console()
    moves = screen.moves(console)
    outage = screen.Outage(None if moves else Console(stderr=True))
    trainshed.waiting = outage.hear
    picture, after = _so_far(trainshed, job) if moves else (Picture(job), 0)
    return screen.watch(picture, trainshed.follow(job["id"], after=after), console, outage)


def _so_far(trainshed: Client, job: Json) -> tuple[Picture, int]:
    """The job as it stands, without all of its past, and the last event that is in it."""
    newest = list(islice(trainshed.events(job["id"], order="desc", limit=RECENT), RECENT))
    # What comes in between is in the series already and comes once more, which a picture does not mind.
    series = trainshed.metrics(job["id"], names=list(SERIES), max_points=1000)["series"]
    picture = Picture(trainshed.job(job["id"]), series)
    for event in reversed(newest):
        picture.take(Event("", event["id"], event))
    return picture, newest[0]["seq"] if newest else 0
