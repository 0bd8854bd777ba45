"""Our contestant: the engine's trainer on a run directory, held at the end of each step until its next turn."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.turns import Turns
from engine.config import RunConfig
from engine.events import Event, Started, Step
from engine.stop import StopWish


def main(folder: Path) -> None:
    """Train the run in `folder` for as long as there are turns."""
    turns = Turns()

    def emit(event: Event) -> None:
        if isinstance(event, Started):
            turns.ready()
        elif isinstance(event, Step):
            turns.done(event.loss)

    from engine.trainer import train

    train(RunConfig.model_validate_json((folder / "run.json").read_bytes()), folder, emit, StopWish())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
