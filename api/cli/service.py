"""Commands that start the service, or a part of it, on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.answers import show_json, show_table, size
from api.cli.asking import JsonFlag
from api.cli.outcomes import Exit, fail

app = typer.Typer()

OURS_ALONE = 0o077
"""The umask: keys' digests, signing secrets, data and weights lie in files."""


@app.command(rich_help_panel="The service")
def serve(
    data_dir: Annotated[Path | None, typer.Option(help="Where everything is kept. TRAINSHED_DATA_DIR too.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. TRAINSHED_HOST too.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, 0 for a free one. TRAINSHED_PORT too.")] = None,
) -> None:
    """Run all of it on this machine, in the foreground: broker, database, API, worker, upkeep."""
    given: dict[str, Any] = {"data_dir": data_dir, "host": host, "port": port}
    with starting():
        from api.serve import serve as run
        from core.settings import Settings

        run(Settings(**{name: value for name, value in given.items() if value is not None}), typer.echo)


@contextmanager
def starting() -> Iterator[None]:
    """For what is started on this machine: why it can't be becomes words and an exit code.

    What it and its children write is their account's alone, whatever mode a data directory had before.
    """
    # Here and not above: what only talks to a server need not load what a server is made of.
    from pydantic import ValidationError

    from api.serve import Refused
    from core.backup import Refused as CannotCopy
    from core.errors import Unavailable
    from core.settings import complaints, misspelt

    for said in misspelt():
        typer.echo(said, err=True)
    before = os.umask(OURS_ALONE)
    try:
        yield
    except ValidationError as error:
        fail(f"A setting can't be used: {complaints(error)}", Exit.USAGE)
    except (Refused, CannotCopy, Unavailable) as error:
        fail(str(error), Exit.USAGE)
    finally:
        os.umask(before)


@app.command(rich_help_panel="The service")
def worker() -> None:
    """Offer this machine's slots to a service elsewhere; DATABASE_URL, REDIS_URL and STORAGE_URL say where."""
    become("workers.node")


@app.command(rich_help_panel="The service")
def api() -> None:
    """Run the API alone, where the parts around it are run by something else."""
    become("api.server")


def become(module: str) -> None:
    """Run a part of the service as this process, if its settings and its database can be used."""
    with starting():
        from api.serve import require_schema
        from core.settings import Settings

        require_schema(Settings())
        os.execv(sys.executable, [sys.executable, "-m", module])


@app.command(rich_help_panel="The service")
def migrate(as_json: JsonFlag = False) -> None:
    """Bring the database to the schema of this version, and make the first key; for parts that run on their own."""
    with starting():
        from api.serve import prepare
        from core.settings import Settings

        secret = prepare(Settings())
    if as_json:
        show_json({"admin_key": secret})
    elif secret:
        typer.echo(f"The first admin key, shown this once and kept nowhere: {secret}")


Folder = Annotated[Path, typer.Argument(help="Folder of the backup.", file_okay=False)]


@app.command(rich_help_panel="The service")
def backup(folder: Folder, as_json: JsonFlag = False) -> None:
    """Copy the database and what it names in storage to a new folder, while the service runs."""
    with starting():
        from core import backup as copying
        from core.settings import Settings

        made = copying.backup(Settings(), folder)
    if as_json:
        show_json(asdict(made))
        return
    typer.echo(f"{folder} has the database and {made.objects} objects ({size(made.bytes)}), each verified.")


@app.command(rich_help_panel="The service")
def restore(folder: Folder, as_json: JsonFlag = False) -> None:
    """Make what a backup holds the data of a service that has none yet; then start it."""
    with starting():
        from core import backup as copying
        from core.settings import Settings

        made = copying.restore(Settings(), folder)
    if as_json:
        show_json(asdict(made))
        return
    typer.echo(
        f"The database and {made.objects} objects ({size(made.bytes)}) of {folder} are there; start the service."
    )


@app.command(rich_help_panel="The service")
def retention(
    rules: Annotated[str | None, typer.Option(help="Default: TRAINSHED_RETENTION.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Say what would go, and leave it.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove what has been kept for long enough, as upkeep does every hour; say how much that is."""
    with starting():
        from core import retention as keeping
        from core.services import Services
        from core.settings import Settings

        settings = Settings() if rules is None else Settings(retention=rules)
        with Services(settings) as services:
            tallies = keeping.sweep(services, settings.rules, dry_run=dry_run)
    if as_json:
        show_json({"dry_run": dry_run, "kinds": {kind: asdict(tally) for kind, tally in tallies.items()}})
        return
    rows = [{"kind": kind, "things": each.things, "objects": each.objects, "bytes": size(each.bytes)}
            for kind, each in tallies.items()]  # fmt: skip
    show_table(
        rows,
        {"would go" if dry_run else "gone": "kind", "things": "things", "objects": "objects", "bytes": "bytes"},
        none="",
    )


@app.command(rich_help_panel="The service")
def openapi() -> None:
    """Print the OpenAPI document of this version."""
    from api.openapi import main as write

    write()
