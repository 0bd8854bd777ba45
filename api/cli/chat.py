"""`trainshed chat`: talk with a model, at a terminal or through a pipe."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from api.cli.answers import show_json
from api.cli.asking import JsonFlag, client
from api.client import Json

app = typer.Typer()


@app.command(rich_help_panel="Results")
def chat(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Name of the model; `trainshed models list` has them all.")],
    message: Annotated[str | None, typer.Option("--message", "-m", help="Ask this and leave.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.7,
    as_json: JsonFlag = False,
) -> None:
    """Talk with a model; an empty line or Ctrl-D ends it."""
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    with client(context) as trainshed:
        if message is None and sys.stdin.isatty():
            typer.echo("An empty line or Ctrl-D ends the conversation.", err=True)
        while said := message or ask():
            messages.append({"role": "user", "content": said})
            options: Json = {"max_tokens": max_tokens, "temperature": temperature}
            if as_json:
                answer = trainshed.chat(model, messages, **options)
                reply = answer["choices"][0]["message"]["content"]
                show_json(answer)
            else:
                reply = ""
                for piece in trainshed.chat_stream(model, messages, **options):
                    typer.echo(piece, nl=False)
                    reply += piece
                typer.echo()
            messages.append({"role": "assistant", "content": reply})
            if message:
                return


def ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
