"""`python -m engine measure` as a person calls it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import launch, measure
from engine.plan import saved
from engine.plan.recompute import Setting, cost
from tests.engine.train import runs
from tests.worlds import World

OPERATIONS = ["norm", "activation", "qkv"]
DEADLINE = 120.0


def written(run_dir: Path) -> Path:
    return runs.write(
        run_dir,
        runs.config(
            parallel={"tensor": 2, "sequence": True},
            training={"precision": "bf16", "micro_batch": 2},
            recompute={"mode": "selective", "operations": OPERATIONS},
        ),
    )


def test_measuring_starts_the_ranks_and_tells_of_each_layer_what_it_keeps_and_should_keep(tmp_path: Path) -> None:
    run_file = written(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    command = [sys.executable, "-m", "engine", "measure", str(run_file), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True)
    reports = json.loads(ended.stdout)
    run = runs.config(**json.loads(run_file.read_text()))
    assert run.model is not None
    planned = cost(Setting.of(run, run.model), run.recompute.replayed).saved
    line = {"measured": planned, "predicted": planned, "difference": 0}
    assert [report["rank"] for report in reports] == [0, 1]
    for report in reports:
        assert report["operations"] == OPERATIONS
        assert report["layers"] == [{"layer": 0, **line}, {"layer": 1, **line}]
        assert report["elsewhere"] > 0
        # Two outputs of 16 tokens a rank and 32 features, for two rows, in two bytes; no product.
        assert report["worth"]["norm"] == {"freed": 2 * 16 * 32 * 2 * 2, "flops": 0}
    assert sorted(tmp_path.rglob("*")) == before


def test_each_stage_of_a_pipeline_is_measured(world2: World, tmp_path: Path) -> None:
    run = runs.config(
        model=runs.SHAPE | {"num_layers": 4},
        parallel={"pipeline": 2, "virtual": 2, "stages": [1, 1, 1, 1]},
        recompute={"mode": "selective", "operations": OPERATIONS},
    )
    for first, second in world2.run(measure.measure, run, tmp_path):
        assert [row.layer for row in first.layers] == [0, 2]
        assert [row.layer for row in second.layers] == [1, 3]
        assert not any(row.difference for row in first.layers + second.layers)


def test_what_can_not_be_measured_is_refused_before_ranks_start(tmp_path: Path, monkeypatch: Any) -> None:
    run_file = runs.write(tmp_path, runs.config(parallel={"data": 2}, recompute={"mode": "budget", "budget_gib": 1e-9}))
    monkeypatch.setattr(measure, "start", lambda *_, **__: pytest.fail("ranks are started"))
    with pytest.raises(ValueError, match="is too little"):
        measure.main(run_file, as_json=False)


def test_ranks_that_hang_are_ended_in_words(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    before = psutil.Process().children()
    monkeypatch.setattr(measure, "MOST_SECONDS", 0.0)
    assert measure.main(written(tmp_path), as_json=False) == 1
    assert capsys.readouterr().err == "the ranks were not done within 0 seconds\n"
    assert psutil.Process().children() == before


def test_measuring_ends_where_it_is_told_to_stop(tmp_path: Path, monkeypatch: Any) -> None:
    before = psutil.Process().children()
    monkeypatch.setattr(launch.Watch, "wait", lambda *_: os.kill(os.getpid(), signal.SIGTERM) is None)
    assert measure.main(written(tmp_path), as_json=False) == 1
    assert psutil.Process().children() == before


@pytest.mark.slow
def test_measuring_under_torchrun_prints_one_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    ended = subprocess.run(
        [*command, "engine", "measure", str(written(tmp_path))],
        capture_output=True, text=True, timeout=DEADLINE, check=True,
    )  # fmt: skip
    header, *lines = ended.stdout.splitlines()
    assert header.split() == ["rank", "layer", "measured", "predicted", "difference"]
    lines = lines[: lines.index(next(line for line in lines if line.startswith("a layer would")))]
    assert [line.split()[:2] for line in lines] == [
        ["0", "0"], ["0", "1"], ["0", "else"], ["rank", "0"], ["1", "0"], ["1", "1"], ["1", "else"], ["rank", "1"],
    ]  # fmt: skip
    assert all(line.split()[-1] == "0" for line in lines if line.split()[1] in "01" and line[0] == " ")


@pytest.mark.parametrize("shape", [{}, {"architecture": "bloom", "num_kv_heads": 4, "ffn_hidden_size": 128}], ids=str)
def test_packed_rows_keep_the_masks_that_are_planned_for(tmp_path: Path, shape: dict[str, Any]) -> None:
    kept, planned = [], []
    for changes in ({}, runs.COMPLETION):
        run = runs.config(model=runs.SHAPE | shape, training={"micro_batch": 2}, recompute={"mode": "none"}, **changes)
        assert run.model is not None
        (report,) = measure.measure(run, tmp_path)
        kept.append(report.elsewhere)
        planned.append(saved.masks(Setting.of(run, run.model)))
    assert kept[1] - kept[0] == planned[1] - planned[0] > 0
