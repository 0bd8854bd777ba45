"""Commands for API keys."""

from __future__ import annotations

from typing import Annotated

import typer

from api.cli.answers import show_json, show_table
from api.cli.asking import JsonFlag, client

app = typer.Typer(help="API keys.", no_args_is_help=True)


@app.command("create")
def create_key(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What it is for.")],
    scope: Annotated[list[str] | None, typer.Option(help="read, submit or admin; may be repeated.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a key; its secret is shown this once."""
    with client(context) as trainshed:
        made = trainshed.create_key(name, scope or ["read", "submit"])
    if as_json:
        show_json(made)
    else:
        typer.echo(made["secret"])


@app.command("list")
def list_keys(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List keys, newest first."""
    with client(context) as trainshed:
        rows = trainshed.keys()
    if as_json:
        show_json(rows)
    else:
        columns = {"id": "id", "name": "name", "scopes": "scopes", "made": "created_at", "expires": "expires_at",
                   "revoked": "revoked_at"}  # fmt: skip
        show_table(rows, columns, none="No keys yet.")


@app.command("revoke")
def revoke_key(
    context: typer.Context,
    key: Annotated[str, typer.Argument(metavar="KEY_ID", help="key-…, as `keys list` shows it.")],
    as_json: JsonFlag = False,
) -> None:
    """End a key at once."""
    with client(context) as trainshed:
        revoked = trainshed.revoke_key(key)
    if as_json:
        show_json(revoked)
    else:
        typer.echo(f"{revoked['id']} revoked")
