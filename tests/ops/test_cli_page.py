"""docs/cli.md shows every command as it is, and the exit codes that there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from api.cli import app
from api.cli.outcomes import EPILOG, MEANINGS, Exit

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
ROOT: Any = typer.main.get_command(app)
EXAMPLES = re.findall(r"trainshed((?: [^\n)|;]+)?)", "\n".join(re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)))
COMMANDS = {name: command for name, command in ROOT.commands.items() if not hasattr(command, "commands")} | {
    f"{name} {deeper}": command
    for name, group in ROOT.commands.items()
    for deeper, command in getattr(group, "commands", {}).items()
}


def words_of(example: str) -> list[str]:
    words = shlex.split(example, comments=True)
    return words[: next((at for at, word in enumerate(words) if word in {"<", ">"}), len(words))]


def command_of(words: list[str]) -> str:
    return next(name for name in (" ".join(words[:2]), *words[:1]) if name in COMMANDS)


SHOWN = [words for words in map(words_of, EXAMPLES) if words and words != ["--help"]]


def test_every_command_is_shown():
    assert {command_of(words) for words in SHOWN} == set(COMMANDS)


@pytest.mark.parametrize("words", SHOWN, ids=" ".join)
def test_every_example_can_be_parsed(words: list[str]):
    name = command_of(words)
    given = words[len(name.split()) :]
    # A file that an example names need not be here to see that the words are right.
    given = [str(Path(__file__)) if word.endswith((".jsonl", ".yaml")) else word for word in given]
    COMMANDS[name].make_context(name, list(given))


def test_the_exit_codes_are_those_of_the_code():
    table = dict(re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.MULTILINE))
    assert table == {str(int(code)): meaning for code, meaning in MEANINGS.items()}
    assert set(MEANINGS) == set(Exit)
    assert all(f"{code:d} {meaning}" in EPILOG for code, meaning in MEANINGS.items())
