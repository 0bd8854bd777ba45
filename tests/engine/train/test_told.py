"""`python -m engine plan`: a run's plan in words, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.presets import PRESETS
from engine.__main__ import main
from engine.config import Training
from engine.plan import memory
from tests import make


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    fields = PRESETS["gpt-22b"]
    shape = make.shape(**fields | {"head_dim": fields["hidden_size"] // fields["num_heads"]})
    training = Training(steps=100, global_batch=4, micro_batch=4, lr=1e-4, precision="bf16")
    parallel = {"tensor": 8, "sequence": True}
    data = make.run_config().data.model_copy(update={"seq_len": 2048})
    run = make.run_config(model=shape, training=training, parallel=parallel, device="cuda", data=data)
    path = tmp_path / "run.json"
    path.write_text(run.model_dump_json())
    return path


def test_a_run_is_told_in_bytes_seconds_and_better_layouts(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, str(run_file), "--device", "A100")
    assert "tensor=8 micro_batch=4 recompute=attention_core" in text
    # Korthikanti et al. 2022, table 5: 1.10 s.
    assert "time       1.0" in text
    assert text.count("best       ") == 5
    plan = json.loads(told(capsys, str(run_file), "--device", "A100", "--json"))
    assert plan["seconds"]["total"] == pytest.approx(1.10, rel=0.1)
    assert plan["eta_seconds"] == pytest.approx(100 * plan["seconds"]["total"])
    run = json.loads(run_file.read_text())
    assert plan["parameters"] == memory.parameters(make.shape(**run["model"]))


def test_without_rates_a_run_is_told_in_bytes_alone(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, str(run_file))
    assert "not calibrated" in text
    assert "GiB a rank" in text


def test_what_is_no_calibration_is_refused(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strange = tmp_path / "rates.json"
    strange.write_text('{"name": "cpu"}')
    assert main(["plan", str(run_file), "--rates", str(strange)]) == 1
    assert "is not what `python -m engine calibrate` writes" in capsys.readouterr().err
    assert main(["plan", str(run_file), "--device", "Abacus"]) == 1
    assert "there are no figures of the device 'Abacus'" in capsys.readouterr().err
