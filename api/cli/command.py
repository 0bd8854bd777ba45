"""The `trainshed` command, put together from its parts."""

from __future__ import annotations

import typer

from api.cli import (
    asking,
    chat,
    completion,
    files,
    jobs,
    keys,
    models,
    nodes,
    projects,
    results,
    service,
    submitting,
    watching,
)
from api.cli.outcomes import EPILOG, Command

app = typer.Typer(
    cls=Command,
    no_args_is_help=True,
    epilog=EPILOG,
    help="Training as a service.",
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.callback()(asking.options)
for part in (submitting, jobs, watching, results, chat, service, nodes, completion):
    app.add_typer(part.app)
for name, part in {"files": files, "models": models, "keys": keys, "projects": projects}.items():
    app.add_typer(part.app, name=name, rich_help_panel="Files, models, keys, projects")


def main() -> None:
    # By its name however it was started: shells complete a command by the name that they know.
    app(prog_name=completion.NAME)
