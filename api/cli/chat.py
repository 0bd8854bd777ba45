"""`trainshed chat`: talk with a model, at a terminal or through a pipe."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from api.cli import printable
from api.cli.answers import show_json
from api.cli.asking import JsonFlag, client
from api.cli.naming import ModelName
from api.cli.outcomes import Exit, fail
from api.client import ApiError, Client, Json, Unreachable

EXIT, NEW = "/exit", "/new"
HELP = f"{EXIT} or Ctrl-D ends the conversation, {NEW} begins another, Ctrl-C cuts an answer short."

app = typer.Typer()


@app.command(rich_help_panel="Results")
def chat(
    context: typer.Context,
    model: ModelName,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Ask this and leave.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.7,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Of the likeliest tokens, those that together have this share.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same one gives the same answer.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Talk with a model; it answers as it goes, and knows what was said before.

    What comes through a pipe is one message, and has one answer. At a terminal, /exit or Ctrl-D ends it.
    """
    options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    given: Json = {name: value for name, value in options.items() if value is not None}
    first: list[Json] = [{"role": "system", "content": system}] if system else []
    with client(context) as trainshed:
        if message is None and at_a_terminal():
            converse(trainshed, model, first, given, as_json=as_json)
            return
        said = sys.stdin.read().strip() if message is None else message
        if not said:
            fail("There is nothing to say: the message is empty.", Exit.USAGE)
        answer(trainshed, model, [*first, {"role": "user", "content": said}], given, as_json=as_json)


def converse(trainshed: Client, model: str, first: list[Json], options: Json, *, as_json: bool) -> None:
    """Turn for turn, until whoever sits there has had enough."""
    typer.echo(HELP, err=True)
    messages = list(first)
    while (said := ask()) != EXIT:
        if said == NEW:
            messages = list(first)
            typer.echo("A new conversation: what was said before is forgotten.", err=True)
        elif said:
            messages.append({"role": "user", "content": said})
            try:
                reply = answer(trainshed, model, messages, options, as_json=as_json)
            except (ApiError, Unreachable) as error:
                # The next turn may go better; this one is as if it had not been.
                typer.echo(f"\n{error}", err=True)
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": reply})


def answer(trainshed: Client, model: str, messages: list[Json], options: Json, *, as_json: bool) -> str:
    """Print the answer; returns what it says."""
    if as_json:
        whole = trainshed.chat(model, messages, **options)
        show_json(whole)
        said: str = whole["choices"][0]["message"]["content"]
        return said
    reply = ""
    try:
        for piece in trainshed.chat_stream(model, messages, **options):
            typer.echo(printable.text(piece) if sys.stdout.isatty() else piece, nl=False)
            reply += piece
    except KeyboardInterrupt:
        if not at_a_terminal():
            raise
        typer.echo(" …", nl=False)
    typer.echo()
    return reply


def at_a_terminal() -> bool:
    """Whether somebody sits there, who may say more."""
    return sys.stdin.isatty()


def ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        typer.echo()
        return EXIT
