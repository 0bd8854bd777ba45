"""Draw `docs/planner.svg` from the planner itself: memory of a layer by technique, and what recompute choices cost."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.presets import PRESETS
from engine.config import ModelShape, Operation, Parallel
from engine.plan import budget
from engine.plan.recompute import Layer, Setting, cost

FIGURE = Path(__file__).resolve().parents[1] / "docs" / "planner.svg"
MODELS = ("gpt-22b", "gpt-175b", "gpt-530b", "gpt-1t")
"""Korthikanti et al. 2022, table 3."""
MICRO_BATCH = {"gpt-22b": 4}
SEQ_LEN, TENSOR, BF16 = 2048, 8, 2
CORE: frozenset[Operation] = frozenset({"attention_core"})
LAYER: frozenset[Operation] = frozenset({"layer"})
TECHNIQUES: tuple[tuple[str, bool, frozenset[Operation]], ...] = (
    ("tensor parallelism", False, frozenset()),
    ("with sequence parallelism", True, frozenset()),
    ("with the attention core replayed", False, CORE),
    ("with both", True, CORE),
    ("whole layers replayed", False, LAYER),
)
"""As in the paper's figure 7: whether sequence parallelism, and what is replayed."""
COLOURS = ("#4c5a67", "#3b7ea1", "#7fb069", "#e6a23c", "#c8553d")
WIDTH, HEIGHT = 960, 430
TOP, BOTTOM, LEFT, RIGHT = 70, 340, 60, 450
FRONTIER_LEFT, FRONTIER_RIGHT = 560, 930
FRONTIER_OF = "gpt-22b"
MOST_WORK = 0.36
"""Of the frontier's axis, as a share of a layer's forward and backward work."""


@dataclass(frozen=True)
class Choice:
    """A set of operations that is replayed."""

    operations: frozenset[Operation]
    kept: float
    """Bytes, as a share of what a layer keeps that replays nothing."""
    work: float
    """Of matrix products done again, as a share of a layer's forward and backward ones."""


def shape_of(preset: str) -> ModelShape:
    fields = PRESETS[preset]
    return ModelShape.model_validate(fields | {"head_dim": fields["hidden_size"] // fields["num_heads"]})


def setting(preset: str, *, sequence: bool) -> Setting:
    """One micro-batch of a paper's model."""
    parallel = Parallel(tensor=TENSOR, sequence=sequence)
    return Setting(shape_of(preset), SEQ_LEN, MICRO_BATCH.get(preset, 1), BF16, parallel)


def shares(preset: str) -> list[float]:
    """Bytes that a layer keeps under each technique, as a share of those under tensor parallelism alone."""
    kept = [cost(setting(preset, sequence=sequence), some).saved for _, sequence, some in TECHNIQUES]
    return [size / kept[0] for size in kept]


def choices(preset: str) -> list[Choice]:
    """Every set that can be replayed, with what it keeps and repeats, under sequence parallelism."""
    where = setting(preset, sequence=True)
    all_kept, products = cost(where, ()).saved, 3 * Layer(where).products
    each = ((some, cost(where, some)) for some in budget.choices(where))
    return [Choice(some, one.saved / all_kept, one.products / products) for some, one in each]


def frontier(every: Sequence[Choice]) -> list[Choice]:
    """Those that no other beats in both, from most kept to least."""
    best: list[Choice] = []
    for choice in sorted(every, key=lambda one: (one.work, one.kept)):
        if not best or choice.kept < best[-1].kept:
            best.append(choice)
    return best


def svg() -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            'font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            *_bars(),
            *_frontier(),
            "</svg>\n",
        ]
    )


def _bars() -> Iterator[str]:
    yield _text(LEFT, 24, "What a layer keeps for its backward pass", size=15)
    yield _text(LEFT, 44, "of what tensor parallelism over 8 ranks keeps")
    yield from _grid(LEFT, RIGHT, [(share, f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)])
    group = (RIGHT - LEFT) / len(MODELS)
    width = group / (len(TECHNIQUES) + 1)
    for number, preset in enumerate(MODELS):
        start = LEFT + number * group + width / 2
        for place, share in enumerate(shares(preset)):
            x, height = start + place * width, share * (BOTTOM - TOP)
            yield (
                f'<rect x="{x:.1f}" y="{BOTTOM - height:.1f}" width="{width - 2:.1f}" height="{height:.1f}" '
                f'fill="{COLOURS[place]}"/>'
            )
            yield _text(x + width / 2 - 1, BOTTOM - height - 4, f"{100 * share:.0f}", anchor="middle", size=10)
        yield _text(start + 2.5 * width, BOTTOM + 18, preset.removeprefix("gpt-").upper(), anchor="middle")
    for place, (name, _, _) in enumerate(TECHNIQUES):
        x, y = LEFT + (place % 2) * 225, BOTTOM + 40 + 18 * (place // 2)
        yield f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{COLOURS[place]}"/>'
        yield _text(x + 17, y, name)


def _frontier() -> Iterator[str]:
    every = choices(FRONTIER_OF)
    best = frontier(every)
    yield _text(FRONTIER_LEFT, 24, "What choices of replayed operations cost", size=15)
    yield _text(FRONTIER_LEFT, 44, "a layer of 22B under sequence parallelism; none beats the line")
    yield from _grid(FRONTIER_LEFT, FRONTIER_RIGHT, [(share, f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)])
    for share in (0, 0.1, 0.2, 0.3):
        yield _text(_across(share), BOTTOM + 18, f"{share:.0%}", anchor="middle")
    yield _text((FRONTIER_LEFT + FRONTIER_RIGHT) / 2, BOTTOM + 40, "matrix products done again", anchor="middle")
    yield _text(FRONTIER_LEFT, TOP - 10, "bytes kept", size=11)
    for choice in every:
        yield f'<circle cx="{_across(choice.work):.1f}" cy="{_up(choice.kept):.1f}" r="2.5" fill="#b6c2cb"/>'
    points = " ".join(f"{_across(choice.work):.1f},{_up(choice.kept):.1f}" for choice in best)
    yield f'<polyline points="{points}" fill="none" stroke="#c8553d" stroke-width="1.5"/>'
    for choice in best:
        yield f'<circle cx="{_across(choice.work):.1f}" cy="{_up(choice.kept):.1f}" r="4" fill="#c8553d"/>'
    for number, choice in enumerate(best):
        # In the room above the dots, one line for each so that none lies on another.
        y = _up(choice.kept) + 16 if number == 0 else _up(0.72) + 17 * (number - 1)
        x = _across(choice.work) + (8 if number < len(best) - 1 else -8)
        yield _text(
            x, y, _named(choice, best[: min(number, 2)]), anchor="start" if number < len(best) - 1 else "end", size=11
        )
        if number:
            yield (
                f'<line x1="{_across(choice.work):.1f}" x2="{_across(choice.work):.1f}" y1="{y - 8:.1f}" '
                f'y2="{_up(choice.kept) - 5:.1f}" stroke="#c8553d" stroke-dasharray="2 3"/>'
            )


def _named(choice: Choice, before: Sequence[Choice]) -> str:
    """What it replays, or what besides the most that one of those `before` does."""
    inside = max((one.operations for one in before if one.operations < choice.operations), key=len, default=frozenset())
    more = ", ".join(sorted(choice.operations - inside)).replace("_", " ")
    return f"+ {more}" if inside else more


def _across(work: float) -> float:
    return FRONTIER_LEFT + work / MOST_WORK * (FRONTIER_RIGHT - FRONTIER_LEFT)


def _up(share: float) -> float:
    return BOTTOM - share * (BOTTOM - TOP)


def _grid(left: int, right: int, lines: Sequence[tuple[float, str]]) -> Iterator[str]:
    for share, label in lines:
        y = _up(share)
        yield f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e7ea"/>'
        yield _text(left - 6, y + 4, label, anchor="end", size=11)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#22303a">{text}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=FIGURE)
    parser.parse_args().into.write_text(svg())


if __name__ == "__main__":
    main()
