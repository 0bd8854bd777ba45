"""Step times that are planned for CPUs, beside those that come: `python -m benchmarks.planned`.

Before each run the host is measured as a worker does when it starts, so that what else the machine does strikes both.
Where it does much, the processor's seconds of the busiest rank say more than the clock's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.setting import Size, llama, write_text
from core import layouts
from core.resolve import ClusterFacts
from engine.config import RunConfig
from engine.launch import cores
from engine.plan import budget, memory

FIRST_STEPS = 2
"""That don't count: buffers are made, and threads."""
WAITS = ("bubble", "tensor", "context", "pipeline", "data")
"""Terms of a plan in which a rank waits for others, at least in part."""
PATIENCE = 900


@dataclass(frozen=True)
class Case:
    """A run: rows of `size` are those of a step."""

    name: str
    size: Size
    steps: int = 12
    parallel: dict[str, Any] = field(default_factory=dict)
    micro_batch: int | None = None
    """None: all rows that a replica has."""
    precision: str = "fp32"
    recompute: str = "none"
    slots: int | None = None
    """Of the host; None: as many as ranks. More give the ranks several cores each."""


DEMO = llama(256, 2, 8, 704, rows=4, tokens=256, vocab=2048)
S = llama(288, 6, 6, 768, rows=8, tokens=256)
CASES = [
    Case("1M", llama(128, 3, 4, 384, rows=8, tokens=128, vocab=2048), steps=20),
    Case("1M, tensor=2", llama(128, 3, 4, 384, rows=8, tokens=128, vocab=2048), steps=20, parallel={"tensor": 2}),
    Case("demo", DEMO, steps=20, recompute="selective"),
    Case("demo, tensor=2 sequence", DEMO, steps=20, recompute="selective", parallel={"tensor": 2, "sequence": True}),
    Case("demo, data=2", DEMO, steps=20, parallel={"data": 2}),
    Case("demo, one rank on two cores", DEMO, steps=20, slots=2),
    Case("15M", S, steps=6),
    Case("15M, data=2", S, steps=6, parallel={"data": 2}),
    Case("15M, pipeline=2, 4 micro-batches", S, steps=6, parallel={"pipeline": 2}, micro_batch=2),
    Case("15M in bf16", S, steps=8, precision="bf16"),
    Case("23M of 512, tensor=2", llama(512, 6, 8, 1376, rows=2, tokens=512, vocab=8192), steps=6,
         parallel={"tensor": 2, "sequence": True}),
    Case("125M in bf16", llama(768, 12, 12, 2048, rows=1, tokens=1024), steps=5, precision="bf16"),
    Case("125M, recomputed whole", llama(768, 12, 12, 2048, rows=1, tokens=512), steps=5, recompute="full"),
    Case("125M, tensor=2 sequence", llama(768, 12, 12, 2048, rows=1, tokens=512), steps=5,
         parallel={"tensor": 2, "sequence": True}),
]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Of one case, in seconds a step."""

    planned: float
    clock: float
    """Median of the steps of rank 0."""
    processor: float
    """Median of the busiest rank, a thread's share of it."""
    terms: dict[str, float]

    @property
    def computing(self) -> float:
        """What is planned besides waits for other ranks."""
        return self.planned - sum(self.terms[name] for name in WAITS)


def main() -> None:
    """Measure what the command line asks for, and print a row as each is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="parts of their names; default: all")
    parser.add_argument("--terms", action="store_true", help="say each plan's terms, too")
    options = parser.parse_args()
    say("| run | weights, M | planned | by the clock | ratio | planned to compute | of the processor | ratio |")
    say("|---|---|---|---|---|---|---|---|")
    for case in chosen(options.cases):
        outcome = measure(case)
        weights = memory.parameters(case.size.shape) / 1e6
        say(f"| {case.name} | {weights:.1f} | {outcome.planned:.3g} | {outcome.clock:.3g} "
            f"| {outcome.planned / outcome.clock:.2f} | {outcome.computing:.3g} | {outcome.processor:.3g} "
            f"| {outcome.computing / outcome.processor:.2f} |")  # fmt: skip
        if options.terms:
            say(" ".join(f"{name} {seconds:.2g}" for name, seconds in outcome.terms.items() if seconds))


def chosen(parts: list[str]) -> Iterator[Case]:
    """Those whose names hold one of `parts`, and for which there are cores."""
    for case in CASES:
        ranks = RunConfig.model_validate(run_of(case)).parallel.ranks
        if (not parts or any(part in case.name for part in parts)) and max(ranks, case.slots or 1) <= cores():
            yield case


def measure(case: Case) -> Outcome:
    """Plan the case by what the host does now, then run it."""
    run = RunConfig.model_validate(run_of(case))
    ranks = run.parallel.ranks
    slots = case.slots or ranks
    calibrate = [sys.executable, "-m", "engine", "calibrate", "--threads", "1"]
    rates = json.loads(subprocess.run(calibrate, check=True, capture_output=True, timeout=PATIENCE).stdout)
    facts = ClusterFacts(largest_node=slots, rates=rates)
    replayed = budget.replayed(run, case.size.shape)
    plan = layouts.timed(run, case.size.shape, facts, replayed=replayed, steps=1, batch=run.training.global_batch)
    threads = slots // ranks
    with tempfile.TemporaryDirectory(prefix="planned-") as name:
        folder = Path(name)
        write_text(folder, case.size, rows=case.size.rows * 4)
        (folder / "run.json").write_text(run.model_dump_json())
        ours = "command=(sys.executable, '-m', 'benchmarks.steps')"
        launched = (
            "import sys; from pathlib import Path; from engine.launch import launch; "
            f"launch(Path('run.json'), ranks={ranks}, threads={threads}, {ours})"
        )
        root = str(Path(__file__).resolve().parents[1])
        subprocess.run(
            [sys.executable, "-c", launched], cwd=folder, env=os.environ | {"PYTHONPATH": root}, check=True,
            capture_output=True, timeout=PATIENCE,
        )  # fmt: skip
        steps = [[json.loads(line) for line in (folder / f"steps-{rank}.jsonl").read_text().splitlines()][FIRST_STEPS:]
                 for rank in range(ranks)]  # fmt: skip
    processor = max(median(taken for _, taken in of_rank) for of_rank in steps) / threads
    return Outcome(plan["step_seconds"], median(taken for taken, _ in steps[0]), processor, plan["seconds_by_term"])


def run_of(case: Case) -> dict[str, Any]:
    """Its `run.json`."""
    rows = case.size.rows // case.parallel.get("data", 1)
    return {
        "model": case.size.shape.model_dump(),
        "tokenizer": {"type": "file", "path": "tokenizer.json"},
        "objective": "pretrain",
        "data": {"train": ["text.txt"], "format": "text", "seq_len": case.size.tokens},
        "training": {
            "steps": case.steps + 1, "global_batch": case.size.rows, "micro_batch": case.micro_batch or rows,
            "lr": 1e-4, "precision": case.precision, "checkpoint_every": case.steps + 2,
        },
        "parallel": case.parallel,
        "recompute": {"mode": case.recompute},
    }  # fmt: skip


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
