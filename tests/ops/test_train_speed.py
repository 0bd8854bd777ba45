"""The benchmark of training compares like with like."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.setting import SIZES
from benchmarks.train_speed import measure, result, table
from benchmarks.turns import Contestant, GivenUp, Turn


def test_the_engine_and_transformers_have_the_same_losses_on_the_same_batches() -> None:
    engine, peer = measure(SIZES["tiny"], rounds=2, threads=1)
    assert (engine.name, peer.name) == ("engine", "transformers")
    assert engine.losses == pytest.approx(peer.losses, rel=1e-3)
    assert engine.losses[-1] < engine.losses[0]
    assert min(engine.peak_bytes, peer.peak_bytes) > 100e6
    assert len(table("tiny", [engine, peer]).splitlines()) == 4


class Finished(Contestant):
    """One whose turns are known."""

    def __init__(self, name: str, seconds: list[float], peak: int) -> None:
        self.name, self.start_seconds = name, 2.0
        self.turns = [Turn(each, each, 0.0, peak, 1.0) for each in seconds]


def test_a_round_is_compared_with_itself_and_the_first_is_only_a_start() -> None:
    size = SIZES["tiny"]
    # The machine was three times slower in the last round, for both.
    ours, peer = Finished("ours", [9, 1, 1, 1, 3], 50), Finished("peer", [9, 2, 2, 2, 6], 100)
    summed = result(ours, peer, size)
    assert summed.speedup == 2
    assert summed.speedup_spread == (2, 2)
    assert summed.memory == 0.5
    assert summed.tokens_per_second == size.step_tokens
    assert summed.first_step_seconds == 2 + 9


def test_another_checkouts_engine_is_the_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text("import sys; sys.exit('this is another engine')")
    command = [sys.executable, "-m", "engine"]
    other = Contestant(str(tmp_path), command, root=tmp_path, environment={}, log=tmp_path / "log", patience=30)
    with other, pytest.raises(GivenUp, match="this is another engine"):
        other.wait_until_ready()


def test_a_contestant_that_falls_is_named_with_what_it_wrote(tmp_path: Path) -> None:
    program = "import sys; sys.exit('no such model')"
    fallen = Contestant(
        "peer", [sys.executable, "-c", program], root=tmp_path, environment={}, log=tmp_path / "log", patience=30
    )
    with fallen, pytest.raises(GivenUp, match=r"peer ended; it wrote:\nno such model"):
        fallen.wait_until_ready()
