"""What an example is told on the command line, and where it then plays: on a running service, or on one of its own."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rehearsal
import smollm2
from api.client import ApiError, Client
from service import LOG, Failed, service
from showing import console

ROOT = Path(__file__).resolve().parent.parent
ANSWER_SECONDS = 180
"""How long the first answer of a model may take, whose process has to start first."""
HOME = ROOT / ".examples"
"""What examples make and fetch; nothing of it is needed afterwards."""


@dataclass(frozen=True)
class Scene:
    """A service, and what is asked of it."""

    client: Client
    base: str
    """Name of the model to start from."""
    base_folder: Path
    """Where it lies."""
    steps: int
    is_rehearsal: bool
    """The model is random: it learns, but nothing that makes sense."""
    folder: Path
    """What the example writes and brings down."""

    def share(self, count: int) -> int:
        """Of `count` rows or characters, as many as there is time for."""
        return count // 8 if self.is_rehearsal else count

    def upload(self, name: str, lines: Iterable[Any]) -> str:
        """A file of JSON Lines, made in the example's folder; its id."""
        path = self.folder / name
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        return self.send(path)

    def send(self, path: Path) -> str:
        identity: str = self.client.upload(path)["id"]
        return identity


def parser(about: str | None, *, steps: int, short_steps: int) -> argparse.ArgumentParser:
    """The arguments that all examples take."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--steps", type=int, help=f"optimizer steps (default: {steps}, and {short_steps} with --short)")
    made.add_argument("--base", help="name of a model in the models directory (default: SmolLM2-135M-Instruct)")
    made.add_argument("--short", action="store_true", help="rehearse on a tiny random model: seconds, and no download")
    made.add_argument("--url", default=os.environ.get("TRAINSHED_URL"), help="of a running service (default: its own)")
    made.add_argument("--key", default=os.environ.get("TRAINSHED_API_KEY"), help="for the running service")
    made.add_argument("--models-dir", type=Path, help="the service's, as `trainshed serve` names it at its start")
    made.add_argument("--into", type=Path, help="folder for what is made (default: beneath .examples)")
    made.set_defaults(default_steps=steps, default_short_steps=short_steps)
    return made


def with_files(
    made: argparse.ArgumentParser, arguments: Sequence[str] | None, *, data: str, held_out: str
) -> argparse.Namespace:
    """What was told, with `--data` and `--held-out`, whose help is given, both or neither."""
    made.add_argument("--data", type=Path, help=data)
    made.add_argument("--held-out", type=Path, help=held_out)
    told = made.parse_args(arguments)
    if (told.data is None) != (told.held_out is None):
        made.error("--data and --held-out go together")
    return told


@contextmanager
def scene(name: str, told: argparse.Namespace) -> Iterator[Scene]:
    """The scene that was asked for; a service of the example's own is gone afterwards."""
    folder: Path = (told.into or HOME / name).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    default = ROOT / "trainshed-data" / "models" if told.url else HOME / "models"
    models: Path = (told.models_dir or default).absolute()
    base = told.base or (rehearsal.base(models) if told.short else smollm2.base(models))
    with ExitStack() as stack:
        if told.url is None:
            shutil.rmtree(folder / "data", ignore_errors=True)
            client = stack.enter_context(service(folder, TRAINSHED_MODELS_DIR=str(models)))
            console.print(
                f"[bold]Trainshed[/] is up at {client.http.base_url}; its log is {folder / LOG}", soft_wrap=True
            )
        elif told.key is None:
            raise Failed("no key: set TRAINSHED_API_KEY, or give --key; `trainshed serve` shows the first one")
        else:
            client = stack.enter_context(Client(told.url, told.key))
        if base not in {model["id"] for model in client.models()}:
            raise Failed(f"the service sees no model {base}; is {models} its models directory? Name it by --models-dir")
        wait_until_it_answers(client, base)
        steps = told.steps or (told.default_short_steps if told.short else told.default_steps)
        yield Scene(client, base, models / base, steps, told.short and told.base is None, folder)


def wait_until_it_answers(client: Client, model: str) -> None:
    """A service takes jobs a moment before it answers questions; the first one also loads the model."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            client.complete(model, "Hello", max_tokens=1)
            return
        except ApiError as error:
            if error.status != 503 or time.monotonic() > deadline:
                raise
        time.sleep(0.2)
