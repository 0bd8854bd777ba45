"""CPU time of a layout search, and what it finds: by default a trillion weights on 512 A100s."""

from __future__ import annotations

import argparse
from statistics import median
from time import process_time

from core.presets import PRESETS
from engine.config import ModelShape
from engine.plan import search
from engine.plan.cluster import described
from engine.plan.search import Found
from engine.plan.time import Step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="gpt-1t", choices=PRESETS)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--global-batch", type=int, default=512)
    parser.add_argument("--device", default="A100")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    fields = PRESETS[options.preset]
    shape = ModelShape.model_validate({"head_dim": fields["hidden_size"] // fields["num_heads"], **fields})
    step = Step(shape, shape.max_seq_len, options.global_batch)
    took: list[float] = []
    for _ in range(options.rounds):
        began = process_time()
        found = search.search(step, described(options.device), ranks=options.ranks)
        took.append(process_time() - began)
    print(f"{found.considered} layouts, {median(took):.3f} s of CPU ({min(took):.3f} to {max(took):.3f})")  # noqa: T201
    show(found)


def show(found: Found) -> None:
    for candidate in found.best:
        terms = ", ".join(f"{name} {seconds:.3g}" for name, seconds in candidate.terms.itemised().items() if seconds)
        print(f"  {candidate.words}: {search.as_size(candidate.memory.total)}; seconds: {terms}")  # noqa: T201
    for loser in found.losers:
        print(f"  {loser.why} ({search.words(loser.layout)})")  # noqa: T201


if __name__ == "__main__":
    main()
