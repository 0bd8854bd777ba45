"""Commands for jobs: list and show them, and say what they are to do."""

from __future__ import annotations

from typing import Annotated

import typer

from api.cli.answers import show_deleted, show_json, show_table
from api.cli.asking import JsonFlag, client
from api.cli.describing import describe
from api.cli.naming import JobId
from api.cli.outcomes import Exit, fail
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
    with client(context) as trainshed:
        pages = trainshed.jobs(state=state, kind=kind, label=labels(label or []), limit=min(limit, 100))
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
def resume(
    context: typer.Context,
    job: JobId,
    parallel: Annotated[
        list[str] | None,
        typer.Option(help="Ranks of an axis, as `tensor=2`; may be repeated. The others have one. Or `auto`."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Queue a paused job again; in another layout with --parallel."""
    with client(context) as trainshed:
        tell_state(trainshed.resume(job, **layout(parallel)), as_json=as_json)


def layout(said: list[str] | None) -> Json:
    """The body that asks for the axes that were said."""
    if not said:
        return {}
    if said == ["auto"]:
        return {"parallel": "auto"}
    pairs = [axis.partition("=") for axis in said]
    if wrong := next((axis for axis, (_, _, ranks) in zip(said, pairs, strict=True) if not ranks.isdecimal()), None):
        fail(f"--parallel {wrong}: say an axis and its ranks, such as tensor=2, or auto.", Exit.USAGE)
    return {"parallel": {name: int(ranks) for name, _, ranks in pairs}}


@app.command(rich_help_panel="Jobs")
def retry(context: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """Queue a job again that failed or was cancelled; it goes on from its newest checkpoint."""
    with client(context) as trainshed:
        tell_state(trainshed.retry(job), as_json=as_json)


@app.command(rich_help_panel="Jobs")
def delete(
    context: typer.Context,
    job: JobId,
    force: Annotated[
        bool, typer.Option("--force", help="Also checkpoints that other projects may use, or that others' adapt.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete a job that has ended, and all that it left: history, checkpoints, results and its models."""
    with client(context) as trainshed:
        deleted = trainshed.delete(job, force=force)
    show_deleted(deleted, as_json)


@app.command(rich_help_panel="Jobs")
def edit(
    context: typer.Context,
    job: JobId,
    name: Annotated[str | None, typer.Option(help="Its name; an empty one takes it away.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Set a label, name=value; `name=` takes it away. May be repeated.")
    ] = None,
    priority: Annotated[int | None, typer.Option(help="Higher goes first.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Change a job's name, labels or priority; what isn't said stays."""
    changes: Json = {} if priority is None else {"priority": priority}
    if name is not None:
        changes["name"] = name or None
    if label:
        changes["labels"] = {said: value or None for said, value in labels(label).items()}
    if not changes:
        fail("Say what to change: --name, --label or --priority.", Exit.USAGE)
    with client(context) as trainshed:
        changed = trainshed.edit(job, **changes)
    if as_json:
        show_json(changed)
    else:
        describe(changed)


def labels(said: list[str]) -> dict[str, str]:
    """`team=a` as a name and a value."""
    for one in said:
        if "=" not in one:
            fail(f"A label is name=value, which {one!r} is not.", Exit.USAGE)
    return dict(one.partition("=")[::2] for one in said)


def tell_state(job: Json, *, as_json: bool) -> None:
    if as_json:
        show_json(job)
    else:
        typer.echo(f"{job['id']} {job['state']}")
