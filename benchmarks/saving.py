"""How long a save of so many weights stops training, and for how long it slows a busy host.

    python -m benchmarks.saving --parameters 125e6 --folder /tmp

Compares a save that is waited for, as one is at the end of a run, with one that is written while work goes on. The work
is copies of a buffer larger than the caches: it has no use of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import Parameter

from engine.checkpoint import Facts
from engine.config import Training
from engine.mesh import alone
from engine.optimizer import Optimizer
from engine.placement import Placement, place
from engine.saving import Saved, Saver

WIDTH = 4096


def main() -> None:
    """Print a line for each way to save."""
    options = parse()
    optimizer = optimizer_of(int(options.parameters))
    work = torch.ones(2**24)
    alone_seconds = median(seconds_of(work) for _ in range(20))
    told: list[Saved] = []
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        Saver(Path(folder), optimizer, keep=1, saved=told.append) as saver,
    ):
        for step in range(options.rounds):
            saver.begin(Facts(2 * step, 0, 0, 0))
            saver.wait()
            saver.begin(Facts(2 * step + 1, 0, 0, 0))
            beside = []
            while saver.under_way:
                beside.append(seconds_of(work))
                saver.advance([saver.stage])
            waited, went_on = told[-2:]
            say(f"waited for: training stands still for {waited.blocked_seconds:.2f} s of {waited.seconds:.2f} s")
            say(f"in a thread: for {went_on.blocked_seconds:.3f} s of {went_on.seconds:.2f} s; what runs beside it "
                f"takes {median(beside) / alone_seconds:.2f} times as long")  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=125e6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to write; a disk, not memory")
    return parser.parse_args()


def optimizer_of(parameters: int) -> Optimizer:
    """One in bf16 with that many weights, in matrices of a usual size."""
    shape = (WIDTH // 4, WIDTH)
    matrices = {f"matrix.{number}": Parameter(torch.randn(shape).bfloat16()) for number in range(parameters // 2**22)}
    for matrix in matrices.values():
        place(matrix, Placement(shape))
    training = Training(steps=1, global_batch=1, micro_batch=1, lr=0.1)
    return Optimizer(matrices.items(), alone(torch.device("cpu")), training=training, shard=True)


def seconds_of(work: Tensor) -> float:
    begun = time.perf_counter()
    work.clone()
    return time.perf_counter() - begun


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
