"""Training steps of the engine and of a plain `transformers` loop, in turns: `python -m benchmarks.train_speed`.

Prints one table a size, and writes all it measured to a file with the machine and the versions beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.setting import RECOMPUTE, SIZES, Size, lay_out
from benchmarks.turns import Contestant
from engine.launch import cores, environment

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ROUNDS = {"tiny": 3, "S": 12, "M": 12}
PATIENCE = 300.0
"""Seconds that a contestant may take for one step, and to set up."""
SAME_LOSS = 2e-3
"""How far the first losses may lie apart, as a share of them: both round to bf16, but not in the same places."""


@dataclass(frozen=True)
class Result:
    """What one contestant did, and how it compares to the peer's turns of the same rounds."""

    name: str
    tokens_per_second: float
    """Median of the rounds after the first."""
    peak_bytes: int
    first_step_seconds: float
    """From the start of the process to the end of its first step, waiting left out."""
    step_seconds: list[float]
    cpu_seconds: float
    """Of all threads in one step, median: what is left of the comparison where the machine is shared."""
    system_seconds: float
    """Of which the kernel took, for page faults above all."""
    losses: list[float]
    speedup: float
    """Median over rounds of the peer's seconds by this one's."""
    speedup_spread: tuple[float, float]
    """First and third quartile of the same."""
    memory: float
    """Peak, as a share of the peer's."""


def measure(
    size: Size, *, rounds: int, threads: int, others: Sequence[Path] = (), recompute: str = "auto"
) -> list[Result]:
    """Let the peer, the engine of this checkout and those of `others` take `rounds` turns each after a first one.

    Raises ValueError where they do not start with the same loss: then they do not train the same.
    """
    with tempfile.TemporaryDirectory(prefix="train-speed-") as name, ExitStack() as stack:
        folder = Path(name)
        contestants: list[Contestant] = []

        def enter(label: str, module: str, run_dir: Path, env: dict[str, str], root: Path) -> None:
            contestant = Contestant(
                label, [sys.executable, "-m", module, str(run_dir)],
                root=root,
                environment=env | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(root)},
                log=folder / f"{len(contestants)}.log", patience=PATIENCE,
            )  # fmt: skip
            contestants.append(stack.enter_context(contestant))
            contestant.wait_until_ready()

        for number, root in enumerate((ROOT, *others)):
            run_dir = folder / f"run-{number}"
            lay_out(run_dir, size, steps=rounds + 1, recompute=recompute)
            enter("engine" if root == ROOT else str(root), "benchmarks.ours", run_dir, environment(os.environ), root)
        # Threads that wait actively lose a lot where anything else runs; the engine's do not, so neither do the peer's.
        waiting = dict(os.environ) | {"OMP_WAIT_POLICY": "PASSIVE"}
        enter("transformers", "benchmarks.peer", folder / "run-0", waiting, ROOT)
        for number in range(rounds + 1):
            # Each is first as often as it is last.
            for contestant in contestants[:: -1 if number % 2 else 1]:
                contestant.take_turn()
    peer = contestants[-1]
    for contestant in contestants:
        first, theirs = contestant.turns[0].loss, peer.turns[0].loss
        if abs(first - theirs) > SAME_LOSS * theirs:
            raise ValueError(f"{contestant.name} starts with a loss of {first}, {peer.name} with {theirs}")
    return [result(contestant, peer, size) for contestant in contestants]


def result(one: Contestant, peer: Contestant, size: Size) -> Result:
    """Sum up the turns of `one`, the first of which is only a start."""
    first, *turns = one.turns
    ratios = [theirs.seconds / ours.seconds for ours, theirs in zip(turns, peer.turns[1:], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    peak = one.turns[-1].peak_bytes
    return Result(
        name=one.name,
        tokens_per_second=size.step_tokens / median(turn.seconds for turn in turns),
        peak_bytes=peak,
        first_step_seconds=one.start_seconds + first.seconds,
        step_seconds=[round(turn.seconds, 4) for turn in turns],
        cpu_seconds=median(turn.user_seconds + turn.system_seconds for turn in turns),
        system_seconds=median(turn.system_seconds for turn in turns),
        losses=[round(turn.loss, 4) for turn in one.turns],
        speedup=median(ratios),
        speedup_spread=(low, high),
        memory=peak / peer.turns[-1].peak_bytes,
    )


def table(name: str, results: Sequence[Result]) -> str:
    """The results as Markdown."""
    lines = [
        f"| {name} | tokens/s | of the peer's (quartiles) | peak RSS, MB | of the peer's | first step, s "
        "| CPU, s a step | in the kernel |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        low, high = one.speedup_spread
        lines.append(
            f"| {one.name} | {one.tokens_per_second:.0f} | {one.speedup:.2f} ({low:.2f} to {high:.2f}) "
            f"| {one.peak_bytes / 1e6:.0f} | {one.memory:.2f} | {one.first_step_seconds:.1f} "
            f"| {one.cpu_seconds:.2f} | {one.system_seconds:.2f} |"
        )
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Where and with what it was measured."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        lines = []
    model = next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.processor())
    packages = {name: version(name) for name in ("torch", "transformers", "numpy")}
    return {"cpu": model, "cores": cores(), "python": platform.python_version(), "load": os.getloadavg(), **packages}


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "sizes", nargs="*", default=["S", "M"], metavar="SIZE", help=f"of {', '.join(SIZES)}; default: S M"
    )
    parser.add_argument("--rounds", type=int, help="turns that each has after its first; at least 2")
    parser.add_argument("--threads", type=int, default=cores(), help="of each contestant; default: one a core")
    parser.add_argument("--recompute", choices=list(RECOMPUTE), default="auto", help="what the engine computes again")
    parser.add_argument("--beside", type=Path, action="append", default=[], metavar="FOLDER",
                        help="another checkout, whose engine takes turns too")  # fmt: skip
    parser.add_argument("--out", type=Path, help="file to write; default: benchmarks/results/train_speed.json")
    asked = parser.parse_args()
    if unknown := set(asked.sizes) - SIZES.keys():
        parser.error(f"there is no size {min(unknown)}; there are {', '.join(SIZES)}")
    measured: dict[str, Any] = {"machine": machine(), "threads": asked.threads, "sizes": {}}
    for name in asked.sizes:
        rounds = asked.rounds or ROUNDS[name]
        results = measure(
            SIZES[name], rounds=rounds, threads=asked.threads, others=[path.resolve() for path in asked.beside],
            recompute=asked.recompute,
        )  # fmt: skip
        measured["sizes"][name] = [asdict(one) for one in results]
        print(table(name, results), flush=True)  # noqa: T201
        print(flush=True)  # noqa: T201
    out = asked.out or RESULTS / "train_speed.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
