"""Data that a spec names by path: found before anything is sent, and sent where the server does not have it yet."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from api.cli.outcomes import Exit
from api.cli.specs import Problem, Spec, judge
from api.cli.transfers import Transfers
from api.client import ApiError, Client, Json

FILE_ID = re.compile(r"file-[A-Za-z0-9]{1,58}")
STAND_IN = "file-0"
"""What stands for a file that isn't sent yet, while the spec is judged."""


@dataclass(frozen=True)
class Local:
    """A file of this machine, and the field that names it."""

    param: str
    path: Path
    purpose: str


def ready(trainshed: Client, spec: Spec, *, quiet: bool) -> Json:
    """The spec as the server takes it. Nothing is sent before it is judged, and no file twice."""
    local = list(local_files(spec))
    spec.refuse([*missing(local), *judge(standing_in(spec.asked, local))])
    _look_for_base(trainshed, spec)
    ids = {}
    with Transfers(quiet=quiet) as transfers:
        for file in local:
            sent = trainshed.upload(file.path, purpose=file.purpose, reuse=True, report=transfers.report)
            ids[file.param] = sent["id"]
    for file in () if quiet else local:
        typer.echo(f"{file.path} is {ids[file.param]}", err=True)
    return replaced(spec.asked, ids)


def local_files(spec: Spec) -> Iterator[Local]:
    """Each file that is named otherwise than by an id."""
    for param, name, purpose in _names(spec.asked):
        if isinstance(name, str) and not FILE_ID.fullmatch(name):
            yield Local(param, spec.folder / name, purpose)


def _names(asked: Json) -> Iterator[tuple[str, object, str]]:
    """Each place of a spec that names a file, as far as the spec has the shape of one."""
    data, tokenizer = asked.get("data"), asked.get("tokenizer")
    if isinstance(data, dict):
        train = data.get("train")
        for index, name in enumerate(train if isinstance(train, list) else ()):
            yield f"data.train.{index}", name, "fine-tune"
        for one in ("validation", "evaluation"):
            yield f"data.{one}", data.get(one), "fine-tune"
    if isinstance(tokenizer, dict):
        yield "tokenizer.file", tokenizer.get("file"), "tokenizer"


def missing(local: Sequence[Local]) -> list[Problem]:
    """What can't be sent."""
    return [
        Problem(file.param, f"{file.path.name!r} is neither a file id nor a file in {file.path.parent.absolute()}")
        for file in local
        if not file.path.is_file()
    ]


def standing_in(asked: Json, local: Sequence[Local]) -> Json:
    """The spec with an id where it names a file of this machine."""
    return replaced(asked, {file.param: STAND_IN for file in local})


def replaced(asked: Json, values: dict[str, str]) -> Json:
    """A copy with other values at these paths."""
    made = copy.deepcopy(asked)
    for param, value in values.items():
        *path, last = param.split(".")
        inner: Any = made
        for part in path:
            inner = inner[part]
        inner[int(last) if isinstance(inner, list) else last] = value
    return made


def _look_for_base(trainshed: Client, spec: Spec) -> None:
    """A base that isn't there is found out before gigabytes are sent."""
    model = spec.asked.get("model")
    if isinstance(model, dict) and isinstance(base := model.get("base"), str):
        try:
            trainshed.model(base)
        except ApiError as error:
            if error.status != 404:
                raise
            spec.refuse([Problem("model.base", f"{error} `trainshed models list` has them all.")], Exit.REFUSED)
