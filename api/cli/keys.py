"""Commands for API keys."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated

import typer

from api.cli.answers import show_json, show_table
from api.cli.asking import JsonFlag, client
from api.cli.naming import KeyId, OfProject
from api.cli.outcomes import Exit, fail
from api.client import Json

app = typer.Typer(help="API keys.", no_args_is_help=True)


@app.command("create")
def create_key(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What it is for.")],
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", "--scopes", help="read, submit or admin; with commas between, or repeated."),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="When it ends: after such as 30d or 12h, or at a date such as 2030-01-31.")
    ] = None,
    project: OfProject = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a key; its secret is shown this once."""
    scopes = [one.strip() for said in scope or ["read,submit"] for one in said.split(",") if one.strip()]
    with client(context) as trainshed:
        made = trainshed.create_key(name, scopes, project=project, **end(expires))
    if as_json:
        show_json(made)
    else:
        typer.echo(made["secret"])


def end(expires: str | None) -> Json:
    """When a key ends, as the API takes it."""
    if expires is None:
        return {}
    if re.fullmatch(r"\d+(\.\d+)?\s*[a-z]+", expires.strip()):
        return {"expires_in": expires.strip()}
    try:
        # A date without a zone is this machine's.
        return {"expires_at": int(datetime.fromisoformat(expires).timestamp())}
    except ValueError:
        fail(f"{expires!r} is no end: give such as 30d or 12h, or a date such as 2030-01-31.", Exit.USAGE)


@app.command("list")
def list_keys(context: typer.Context, project: OfProject = None, as_json: JsonFlag = False) -> None:
    """List keys, newest first."""
    with client(context) as trainshed:
        rows = trainshed.keys(project=project)
    if as_json:
        show_json(rows)
    else:
        columns = {"id": "id", "name": "name", "project": "project", "scopes": "scopes", "made": "created_at",
                   "expires": "expires_at", "revoked": "revoked_at"}  # fmt: skip
        show_table(rows, columns, none="No keys yet.")


@app.command("revoke")
def revoke_key(context: typer.Context, key: KeyId, as_json: JsonFlag = False) -> None:
    """End a key at once."""
    with client(context) as trainshed:
        revoked = trainshed.revoke_key(key)
    if as_json:
        show_json(revoked)
    else:
        typer.echo(f"{revoked['id']} revoked")
