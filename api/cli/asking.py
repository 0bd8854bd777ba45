"""The server that a command asks: where it is, the key, and for how long it may be away."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Annotated

import typer

from api.cli.outcomes import Exit, fail
from api.client import Client

DEFAULT_URL = "http://127.0.0.1:8642"
PATIENCE_SECONDS = 30.0


@dataclass
class Asking:
    """What the options before the command say, and whether the command is to answer in JSON."""

    url: str
    key: str | None
    patience: float
    as_json: bool = False
    away: bool = False
    """Word was given that no server answers."""

    def client(self) -> Client:
        """A client for one command."""
        if not self.url.startswith(("http://", "https://")):
            fail(f"{self.url!r} is no URL of a server: it must begin with http:// or https://.", Exit.USAGE)
        if not self.key:
            fail("No key: set TRAINSHED_API_KEY, or give --key. `trainshed serve` shows the first one.", Exit.USAGE)
        return Client(self.url, self.key, patience=self.patience, waiting=self.tell)

    def tell(self, error: Exception, seconds: float) -> None:
        """Why nothing happens: once, for it is tried often."""
        if not (self.away or self.as_json):
            typer.echo(f"{error}; trying again for {seconds:.0f} s.", err=True)
        self.away = True


def tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"trainshed {metadata.version('trainshed')}")
        raise typer.Exit


def options(
    context: typer.Context,
    url: Annotated[str, typer.Option(envvar="TRAINSHED_URL", help="Where the server is.")] = DEFAULT_URL,
    key: Annotated[
        str | None, typer.Option(envvar="TRAINSHED_API_KEY", help="The API key.", show_default=False)
    ] = None,
    patience: Annotated[
        float,
        typer.Option(envvar="TRAINSHED_PATIENCE", min=0, help="Seconds to try again while no server answers."),
    ] = PATIENCE_SECONDS,
    version: Annotated[
        bool, typer.Option("--version", callback=tell_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    context.obj = Asking(url, key, patience)


def client(context: typer.Context) -> Client:
    """The client for this command; close it."""
    asking: Asking = context.obj
    return asking.client()


def _note(context: typer.Context, as_json: bool) -> bool:
    if context.obj is not None:
        context.obj.as_json = as_json
    return as_json


JsonFlag = Annotated[
    bool, typer.Option("--json", callback=_note, help="Print what the server answers, errors too, as JSON.")
]
