"""`trainshed completion`: what a shell reads to complete commands, options, and names of what is on the server."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]

NAME = "trainshed"
VARIABLE = "_TRAINSHED_COMPLETE"

app = typer.Typer()


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command(rich_help_panel="The command line")
def completion(shell: Annotated[Shell, typer.Argument(help="Whose language.")]) -> None:
    """Print what makes a shell complete this command.

    In ~/.bashrc: eval "$(trainshed completion bash)"; in ~/.zshrc, after compinit: eval "$(trainshed completion zsh)";
    for fish: trainshed completion fish > ~/.config/fish/completions/trainshed.fish
    """
    typer.echo(get_completion_script(prog_name=NAME, complete_var=VARIABLE, shell=shell.value))


completion_init()
