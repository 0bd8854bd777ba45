"""docs/planner.md and its figure say what the planner computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import planner_figure as figure
from engine.plan import time
from engine.plan.cluster import described
from tests.core.test_layouts import ROWS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "planner.md").read_text()


def test_the_figure_is_what_the_planner_draws_today() -> None:
    assert figure.FIGURE.read_text() == figure.svg(), "run python -m benchmarks.planner_figure"


@pytest.mark.parametrize(
    ("preset", "percentages"),
    # From Korthikanti et al. 2022, table 2: (34 + 5as/h) / t and so on over 10 + (24 + 5as/h) / t.
    [
        ("gpt-22b", [100, 66.77, 49.37, 16.14, 7.59]),
        ("gpt-175b", [100, 61.96, 56.52, 18.48, 8.70]),
        ("gpt-530b", [100, 58.33, 61.90, 20.24, 9.52]),
        ("gpt-1t", [100, 58.33, 61.90, 20.24, 9.52]),
    ],
)
def test_the_figures_bars_are_those_of_the_papers_formulas(preset: str, percentages: list[float]) -> None:
    # Statistics of norms, which the paper leaves out, are some thousandths.
    assert [100 * share for share in figure.shares(preset)] == pytest.approx(percentages, abs=0.1)


def test_the_frontier_is_monotone_and_begins_with_the_attention_core() -> None:
    best = figure.frontier(figure.choices(figure.FRONTIER_OF))
    kept, work = [one.kept for one in best], [one.work for one in best]
    assert kept == sorted(kept, reverse=True)
    assert work == sorted(work)
    assert "attention_core" in best[1].operations - best[0].operations
    assert best[-1].operations == {"layer"}
    # A whole layer replayed is one pass more of three.
    assert best[-1].work == pytest.approx(1 / 3)


def test_the_pages_table_is_what_is_predicted() -> None:
    base = ROWS[1]
    cluster = time.fitted(base.step, base.layout, described("A100"), seconds=base.seconds)
    rows = re.findall(r"^\| (\d+[BT]) \| \d+ \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert [(float(paper), float(ours)) for _, paper, ours in rows] == [
        (row.seconds, round(row.seconds_on(cluster), 2)) for row in ROWS
    ]
    assert f"it is {cluster.device.efficiency:.3f}," in PAGE


def test_every_term_of_a_plan_is_derived() -> None:
    for term in time.Terms.__dataclass_fields__:
        assert f"| `{term}` |" in PAGE
