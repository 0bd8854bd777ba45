"""`trainshed submit`: a spec in a file becomes a job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from api.cli.answers import show_json
from api.cli.asking import JsonFlag, client
from api.cli.outcomes import Exit, fail
from api.cli.specs import read_spec
from api.cli.watching import stay
from api.client import Client, Json

FILE_ID = re.compile(r"file-[A-Za-z0-9]+")

app = typer.Typer()


@app.command(rich_help_panel="Jobs")
def submit(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A JobSpec in JSON or YAML.")],
    watch: Annotated[bool, typer.Option("--watch", help="Stay and watch it.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Submit a job. Data may be named by a path beside the spec instead of a file id; it is uploaded first."""
    spec = read_spec(file)
    with client(context) as trainshed:
        job = trainshed.submit(upload_data(trainshed, spec, file.parent))
        if as_json and not watch:
            show_json(job)
        elif not as_json:
            typer.echo(job["id"])
        if watch:
            stay(trainshed, job, as_json=as_json)


def upload_data(trainshed: Client, spec: Json, folder: Path) -> Json:
    """The spec with ids where it named files of this machine."""
    data = spec.get("data")
    if not isinstance(data, dict):
        return spec

    def id_of(name: object) -> object:
        if not isinstance(name, str) or FILE_ID.fullmatch(name):
            return name
        path = folder / name
        if not path.is_file():
            fail(f"{name!r} is neither a file id nor a file in {folder.absolute()}.", Exit.USAGE)
        typer.echo(f"uploading {path} … ", nl=False, err=True)
        uploaded = trainshed.upload(path)["id"]
        typer.echo(uploaded, err=True)
        return uploaded

    train = data.get("train")
    changed: Json = {"train": [id_of(name) for name in train]} if isinstance(train, list) else {}
    for name in ("validation", "evaluation"):
        if isinstance(data.get(name), str):
            changed[name] = id_of(data[name])
    return spec | {"data": data | changed}
