"""Commands for models: list, name and delete them."""

from __future__ import annotations

from typing import Annotated

import typer

from api.cli.answers import moment, show_deleted, show_facts, show_json, show_table
from api.cli.asking import JsonFlag, client
from api.cli.naming import ModelName

app = typer.Typer(help="Models.", no_args_is_help=True)


@app.command("list")
def list_models(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List models."""
    with client(context) as trainshed:
        rows = trainshed.models()
    if as_json:
        show_json(rows)
    else:
        columns = {"model": "id", "owner": "owned_by", "job": "job_id", "status": "status"}
        none = "No models yet: put one into the server's models directory, add one of a hub, or pretrain one."
        show_table(rows, columns, none=none)


@app.command("add")
@app.command("register")
def register_model(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What it is called.")],
    source: Annotated[
        str, typer.Argument(help="hf://org/name@revision, a folder in the server's models directory, or a job's id.")
    ],
    as_json: JsonFlag = False,
) -> None:
    """Name a model that jobs can start from; one of a hub is fetched in the background, see `models show`."""
    with client(context) as trainshed:
        of_job, said = source.startswith("job-"), source.startswith(("dir:", "hf://"))
        made = trainshed.register_model(name, {"job": source} if of_job else source if said else f"dir:{source}")
    if as_json:
        show_json(made)
    else:
        typer.echo(made["id"])


@app.command("show")
def show_model(context: typer.Context, model: ModelName, as_json: JsonFlag = False) -> None:
    """Show a model."""
    with client(context) as trainshed:
        found = trainshed.model(model)
    if as_json:
        show_json(found)
        return
    shape, download = found["shape"], found.get("download") or {}
    sizes = ("architecture", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "vocab_size", "max_seq_len")
    show_facts(
        {
            "model": found["id"],
            "owner": found["owned_by"],
            "made": moment(found["created"]),
            "by": found["job_id"],
            "status": found.get("status"),
            "from": download.get("source"),
            "bytes": f"{download['bytes']:,} of {download['total_bytes']:,}" if download else None,
            "reason": download.get("reason"),
            "shape": ", ".join(f"{name} {shape[name]}" for name in sizes if shape.get(name) is not None),
        }
    )


@app.command("delete")
def delete_model(
    context: typer.Context,
    model: ModelName,
    force: Annotated[
        bool, typer.Option("--force", help="Also where checkpoints are adapters on it, which can't be used then.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Let go of a model's name; one that a job still needs stays."""
    with client(context) as trainshed:
        deleted = trainshed.delete_model(model, force=force)
    show_deleted(deleted, as_json)
