"""Real ranks under the real launcher: training on two of them, a stop, and a rank that is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.emit import last_event
from engine.launch import launch
from tests.engine.train import runs

DEADLINE = 90.0


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(holds, what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)


@pytest.fixture
def launched(tmp_path):
    """Two ranks that train without an end in sight, and have done a step."""
    runs.write(tmp_path, runs.config(parallel={"tensor": 2, "sequence": True}, training={"steps": 10**6}))
    command = [sys.executable, "-m", "engine", "launch", "--ranks", "2", "--heartbeat-timeout", "120"]
    process = subprocess.Popen(
        [*command, str(tmp_path / "run.json")], stdin=subprocess.PIPE, start_new_session=True, stderr=subprocess.DEVNULL
    )
    events = tmp_path / "events.jsonl"
    until(lambda: events.exists() and b'"type":"step"' in events.read_bytes(), "the first step")
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdin.close()


def test_a_stop_finishes_the_step_and_saves_it(launched, tmp_path):
    ranks = children(launched.pid)
    launched.send_signal(signal.SIGTERM)
    assert launched.wait(timeout=DEADLINE) == 0
    events = runs.load_events(tmp_path)
    step, saved, stopped = events[-3:]
    assert [event["type"] for event in (step, saved, stopped)] == ["step", "checkpoint", "stopped"]
    assert step["step"] == saved["step"] == stopped["step"]
    assert (tmp_path / saved["path"] / "manifest.json").is_file()
    assert len(ranks) == 2
    assert not any(map(running, ranks))


def test_a_killed_rank_is_named_and_takes_the_other_along(launched, tmp_path):
    first, second = children(launched.pid)
    os.kill(second, signal.SIGKILL)
    assert launched.wait(timeout=DEADLINE) == 1
    assert not running(first)
    event = last_event(tmp_path / "events.jsonl")
    assert (event.code, event.rank, event.message) == ("rank_lost", 1, "rank 1 of 2 was killed by SIGKILL")


STUCK = {
    "endless-loop": ("while True: pass", "the others wait for rank 1 of 2, which stands in stuck (<string>:"),
    "sleep": ("time.sleep(3600)", "the others wait for rank 1 of 2, which stands in stuck (<string>:"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "rank 1 of 2 is frozen and does not answer (it was stopped"),
}
STUCK_RANK = """
import os, signal, sys, time
from pathlib import Path
from engine import rank, trainer

def stuck(self, step_index):
    if step_index == 2 and self.data_rank == 1:
        {does}
    return make_batches(self, step_index)

make_batches, trainer.Loader.step = trainer.Loader.step, stuck
code = rank.main(Path(sys.argv[1]))
os._exit(code)
"""


@pytest.mark.parametrize(
    "how", ["endless-loop", *(pytest.param(how, marks=pytest.mark.slow) for how in ("sleep", "stopped"))]
)
def test_a_stalled_rank_is_named_with_where_it_stands(tmp_path, how):
    does, said = STUCK[how]
    run_file = runs.write(tmp_path, runs.config(parallel={"data": 2}, stall_seconds=3))
    command = [sys.executable, "-c", STUCK_RANK.format(does=does)]
    assert launch(run_file, ranks=2, command=command) == 1
    event = last_event(tmp_path / "events.jsonl")
    assert (event.code, event.rank) == ("stalled", 1)
    assert f", in step 3: {said}" in event.message
    # Rank 0 waits for what all ranks agree on before a step.
    assert "in agree\n" in (tmp_path / "logs" / "rank-0.log").read_text()


@pytest.mark.slow
def test_torchrun_starts_the_same_run(tmp_path):
    runs.write(tmp_path, runs.config(parallel={"data": 2}, training={"steps": 2}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    subprocess.run([*command, "engine", "train", str(tmp_path / "run.json")], check=True, timeout=DEADLINE)
    assert last_event(tmp_path / "events.jsonl").type == "finished"


@pytest.mark.slow
def test_a_pipeline_under_the_launcher_goes_on_alone_and_back_again(tmp_path):
    straight = {}
    for name, ranks, steps, resume in (
        ("straight", 1, 6, None),
        ("staged", 2, 2, None),
        ("alone", 1, 4, "staged/checkpoints/step-00000002"),
        ("back", 2, 6, "alone/checkpoints/step-00000004"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        training = {"steps": steps, "schedule": "constant", "warmup": 0.0}
        resume = None if resume is None else str(tmp_path / resume)
        run_file = runs.write(folder, runs.config(parallel={"pipeline": ranks}, training=training, resume=resume))
        command = [sys.executable, "-m", "engine", "launch", "--ranks", str(ranks), str(run_file)]
        subprocess.run(command, check=True, timeout=DEADLINE, stdin=subprocess.DEVNULL)
        losses = {event["step"]: event["loss"] for event in runs.load_events(folder) if event["type"] == "step"}
        straight = straight or losses
        assert losses == pytest.approx({step: straight[step] for step in losses}, rel=5e-6)
    assert list(losses) == [5, 6]


@pytest.mark.slow
def test_the_launcher_runs_replicas_that_share_weights(tmp_path):
    parallel = {"data": 2, "shard_weights": True}
    runs.write(tmp_path, runs.config(parallel=parallel, training={"steps": 2, "precision": "bf16"}))
    command = [sys.executable, "-m", "engine", "launch", "--ranks", "2", str(tmp_path / "run.json")]
    subprocess.run(command, check=True, timeout=DEADLINE)
    assert last_event(tmp_path / "events.jsonl").type == "finished"
    assert (tmp_path / "export" / "model" / "model.safetensors").is_file()
