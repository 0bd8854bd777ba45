"""One rank of a run, which writes what each step took by the clock and of its processor, and leaves before the last."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from time import perf_counter, process_time

from engine.config import RunConfig
from engine.events import Event, Step
from engine.stop import StopWish


def main(run_file: Path) -> None:
    """Train the run in its folder, and write `steps-RANK.jsonl` there."""
    run = RunConfig.model_validate_json(run_file.read_bytes())
    with (run_file.parent / f"steps-{os.environ['RANK']}.jsonl").open("w") as told:
        last = perf_counter(), process_time()

        def emit(event: Event) -> None:
            nonlocal last
            if not isinstance(event, Step):
                return
            now = perf_counter(), process_time()
            told.write(f"{json.dumps([now[0] - last[0], now[1] - last[1]])}\n")
            told.flush()
            last = now
            if event.step + 1 == run.training.steps:
                # What comes behind the last step is none of a step's time.
                os._exit(0)

        from engine.trainer import train

        train(run, run_file.parent, emit, StopWish())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
