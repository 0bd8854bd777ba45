"""Arguments that name something on the server, which the shell completes by asking it, if that answers at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Annotated

import typer

from api.cli.asking import Asking
from api.client import Client, TrainshedError

WAIT_SECONDS = 1.0
"""Whoever presses TAB waits no longer."""
MOST = 50

Named = Iterable[tuple[str, str]]
"""Names, and what is said beside each."""


def _asked(context: typer.Context, incomplete: str, find: Callable[[Client], Named]) -> list[tuple[str, str]]:
    said = context.find_root().params
    asking = Asking(said["url"], said["key"], patience=0.0)
    try:
        with Client(asking.url, asking.key or "", patience=0.0, timeout=WAIT_SECONDS) as trainshed:
            return [(name, about) for name, about in find(trainshed) if name.startswith(incomplete)]
    except (TrainshedError, ValueError):
        # There is no place to say what is wrong; the command itself will.
        return []


def jobs(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    def find(trainshed: Client) -> Named:
        newest = islice(trainshed.jobs(limit=MOST), MOST)
        return ((job["id"], f"{job['state']} {job['name'] or job['kind']}") for job in newest)

    return _asked(context, incomplete, find)


def files(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    def find(trainshed: Client) -> Named:
        return ((file["id"], file["filename"]) for file in islice(trainshed.files(limit=MOST), MOST))

    return _asked(context, incomplete, find)


def models(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    return _asked(
        context, incomplete, lambda trainshed: ((model["id"], model["owned_by"]) for model in trainshed.models())
    )


def projects(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    def find(trainshed: Client) -> Named:
        return ((project["id"], project["name"]) for project in islice(trainshed.projects(limit=MOST), MOST))

    return _asked(context, incomplete, find)


def keys(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    def find(trainshed: Client) -> Named:
        listed = trainshed.keys()
        return ((key["id"], key["name"]) for key in listed)

    return _asked(context, incomplete, find)


JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.", autocompletion=jobs)]
FileId = Annotated[str, typer.Argument(metavar="FILE", help="Id of the file.", autocompletion=files)]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Name of the model; `trainshed models list` has them all.", autocompletion=models
    ),
]
KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="key-…, as `keys list` shows it.", autocompletion=keys)]
ProjectId = Annotated[
    str,
    typer.Argument(metavar="PROJECT", help="Id of the project, as `projects list` shows it.", autocompletion=projects),
]
OfProject = Annotated[
    str | None,
    typer.Option(metavar="PROJECT", help="Of this project; default: your key's own.", autocompletion=projects),
]
Base = Annotated[
    str | None,
    typer.Option(help="A model: also say what becomes of each example under it.", autocompletion=models),
]
"""Of what may be looked at with a model or without one."""
BaseNeeded = Annotated[
    str, typer.Option(help="The model whose tokenizer and template render it.", autocompletion=models)
]
