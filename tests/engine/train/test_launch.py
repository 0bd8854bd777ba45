"""The rank launcher with real processes; the ranks are stand-ins that need no torch."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.emit import last_event
from engine.events import CheckpointSaved, Failed, Finished, Log, Stopped
from engine.launch import safe_step
from tests.engine.train.runs import config

LAUNCH = """
import sys
from pathlib import Path
from engine import launch as module, stacks
stacks.ANSWER_SECONDS = {answer}
from engine.launch import launch
module.LEAVE_SECONDS = module.SPEAK_SECONDS = {leave}
timeout = float(sys.argv[3]) if sys.argv[3:] else None
run, ranks = Path(sys.argv[1]), int(sys.argv[2])
sys.exit(launch(run, ranks=ranks, heartbeat_timeout=timeout, threads=3, nice=4, command={command!r}))
"""
STAND_IN = (sys.executable, str(Path(__file__).with_name("stand_in.py")))
DEADLINE = 20.0


class Run:
    """A launcher at work, and the fifo that its ranks hold open."""

    def __init__(
        self,
        run_dir: Path,
        *,
        heartbeat_timeout: float | None = None,
        leave: float = DEADLINE,
        answer: float = DEADLINE,
        stall_seconds: float | None = None,
        **script: str,
    ) -> None:
        self.run_dir = run_dir
        numbered = {name.removeprefix("rank"): does for name, does in script.items()}
        (run_dir / "run.json").write_text(config(stall_seconds=stall_seconds).model_dump_json())
        (run_dir / "script.json").write_text(json.dumps(numbered))
        os.mkfifo(run_dir / "up")
        self.fifo = os.open(run_dir / "up", os.O_RDONLY | os.O_NONBLOCK)
        self.held_open = os.open(run_dir / "up", os.O_WRONLY)
        arguments = [str(run_dir / "run.json"), str(len(script))]
        arguments += [] if heartbeat_timeout is None else [str(heartbeat_timeout)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH.format(command=STAND_IN, leave=leave, answer=answer), *arguments],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        reports = [json.loads(self.line(beating=heartbeat_timeout is not None)) for _ in script]
        self.ranks = {int(report.pop("RANK")): report for report in reports}
        os.close(self.held_open)

    def go(self, *ranks: int) -> None:
        """Let `ranks`, or all, do what their script says."""
        for rank in ranks or self.ranks:
            os.kill(self.ranks[rank]["pid"], signal.SIGUSR1)

    def beat(self) -> None:
        os.write(self.process.stdin.fileno(), b".")

    def gone(self) -> int:
        """Wait for the end of the launcher and of each rank; the launcher's exit code."""
        code = self.process.wait(timeout=DEADLINE)
        while self._read():
            pass
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process.stdin.close()
        os.close(self.fifo)

    def last(self):
        return last_event(self.run_dir / "events.jsonl")

    def line(self, *, beating: bool = False) -> bytes:
        """The next line that a rank says; the lease is renewed meanwhile if `beating`."""
        line = b""
        while not line.endswith(b"\n"):
            line += self._read(1, beating=beating)
        return line

    def _read(self, size: int = 4096, *, beating: bool = False) -> bytes:
        deadline = time.monotonic() + DEADLINE
        while not select.select([self.fifo], [], [], 0.1)[0]:
            assert time.monotonic() < deadline, "nothing within the deadline"
            if beating:
                self.beat()
        return os.read(self.fifo, size)


@pytest.fixture
def start(tmp_path):
    runs = []

    def begin(**arguments) -> Run:
        runs.append(Run(tmp_path, **arguments))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def test_ranks_are_told_who_they_are_and_a_finished_run_ends_with_0(start, tmp_path):
    run = start(rank0="finish", rank1="finish")
    run.go()
    assert run.gone() == 0
    assert run.last().type == "finished"
    assert set(run.ranks) == {0, 1}
    assert run.ranks[1].pop("pid") != run.ranks[0]["pid"]
    told = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "OMP_NUM_THREADS": "3", "ENGINE_NICE": "4"}
    assert run.ranks[1] == told | {"cwd": str(tmp_path)}


def test_a_rank_that_dies_takes_the_others_along_and_is_named(start):
    run = start(rank0="train", rank1="die", rank2="train")
    run.go()
    assert run.gone() == 1
    assert run.last() == Failed(
        seq=1, time=run.last().time, code="rank_lost", message="rank 1 of 3 was killed by SIGSEGV", rank=1,
        hint="Its output is in logs/rank-1.log.",
    )  # fmt: skip


def test_a_rank_killed_from_outside_ends_the_run(start):
    run = start(rank0="train", rank1="train")
    os.kill(run.ranks[0]["pid"], signal.SIGKILL)
    assert run.gone() == 1
    assert (run.last().code, run.last().message) == ("rank_lost", "rank 0 of 2 was killed by SIGKILL")


@pytest.mark.parametrize(
    ("does", "code", "message"),
    [
        pytest.param("raise", "invalid_data", "line 3 is not JSON", id="reason-handed-over"),
        pytest.param("leave", "rank_lost", "rank 1 of 2 ended with exit code 3", id="no-reason"),
        pytest.param(
            "full", "disk_full", "the disk is full: rank 1 of 2 had no room to say how it ended", id="no-room"
        ),
    ],
)
def test_a_rank_that_leaves_has_its_reason_written_for_it(start, does, code, message):
    run = start(rank0="train", rank1=does)
    run.go()
    assert run.gone() == 1
    assert (run.last().code, run.last().message, run.last().rank) == (code, message, 1)


def test_what_rank_0_said_last_stands(start):
    run = start(rank0="finish", rank1="leave")
    run.go(0)
    assert run.line() == b"ended\n"
    run.go(1)
    assert run.gone() == 0
    assert run.last().type == "finished"


def test_a_rank_that_stays_when_the_run_is_over_is_killed(start):
    run = start(rank0="finish", rank1="train", leave=0.2)
    run.go()
    assert run.gone() == 0
    assert run.last().type == "finished"


@pytest.mark.parametrize("waits", [0, 1])
def test_a_rank_that_the_others_wait_for_is_named_with_where_it_stands(start, tmp_path, waits):
    run = start(stall_seconds=0.5, **{f"rank{waits}": "wait", f"rank{1 - waits}": "stand"})
    run.go()
    assert run.gone() == 1
    assert (run.last().code, run.last().rank) == ("stalled", 1 - waits)
    assert f"in step 3: the others wait for rank {1 - waits} of 2, which stands in stand (train/stand_in.py" in (
        run.last().message
    )
    assert all("in stand\n" in (tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1))


def test_a_rank_that_does_not_answer_is_frozen(start):
    run = start(stall_seconds=0.5, answer=1.0, rank0="wait", rank1="freeze", rank2="wait")
    run.go()
    assert run.gone() == 1
    assert (run.last().code, run.last().rank) == ("stalled", 1)
    assert run.last().message.endswith("rank 1 of 3 is frozen and does not answer (it was stopped by a signal)")


def test_ranks_that_never_said_where_they_are_are_left_alone(start):
    run = start(stall_seconds=0.1, rank0="train", rank1="train")
    run.go()
    begun = time.monotonic()
    while time.monotonic() < begun + 0.5:
        assert run.process.poll() is None
    run.process.send_signal(signal.SIGTERM)
    assert run.gone() == 0


def test_sigterm_reaches_the_ranks_and_a_stopped_run_ends_with_0(start):
    run = start(rank0="train", rank1="train")
    run.go()
    run.process.send_signal(signal.SIGTERM)
    assert run.gone() == 0
    assert run.last() == Stopped(seq=1, time=run.last().time, step=7)


def test_ranks_that_do_not_hear_of_a_stop_before_the_first_step_are_stopped_for_them(start):
    run = start(rank0="deaf", leave=0.2)
    run.go()
    assert run.line() == b"deaf\n"
    run.process.send_signal(signal.SIGTERM)
    assert run.gone() == 0
    assert (run.last().type, run.last().step) == ("stopped", 0)


def test_the_step_to_go_on_from_is_found_whatever_messages_hold(tmp_path):
    run_file = tmp_path / "run.json"
    run_file.write_text(config().model_dump_json())
    assert safe_step(run_file) == 0
    events = [CheckpointSaved(step=4, path="a", bytes=1, seconds=1), Log(message="one\u2028two\x85three")]
    (tmp_path / "events.jsonl").write_text("\n".join([*(event.model_dump_json() for event in events), '{"type": "che']))
    assert safe_step(run_file) == 4


def test_kill_9_of_the_launcher_leaves_no_rank(start):
    run = start(rank0="train", rank1="train")
    run.process.kill()
    assert run.gone() == -signal.SIGKILL


def test_the_end_of_the_heartbeat_kills_the_group(start):
    run = start(rank0="train", rank1="train", heartbeat_timeout=60)
    run.beat()
    run.process.stdin.close()
    assert run.gone() == -signal.SIGKILL
    assert run.last() is None


def test_silence_longer_than_the_lease_kills_the_group(start):
    run = start(rank0="train", heartbeat_timeout=0.5)
    assert run.gone() == -signal.SIGKILL
    last = run.last()
    assert (last.type, last.code) == ("failed", "lease_lost")
    assert "not renewed for 0.5 seconds" in last.message


def test_each_heartbeat_renews_the_lease(start):
    begun = time.monotonic()
    run = start(rank0="train", heartbeat_timeout=2)
    while time.monotonic() < begun + 3:
        run.beat()
        assert not select.select([run.fifo], [], [], 0.2)[0], "the ranks were killed"
    run.go()
    run.process.send_signal(signal.SIGTERM)
    assert run.line(beating=True) == b"ended\n"
    assert run.gone() == 0


def test_traces_of_an_earlier_run_are_not_taken_for_this_one(start, tmp_path):
    (tmp_path / "events.jsonl").write_text(
        Log(message="old").model_dump_json() + "\n" + Finished(step=1, tokens=1).model_dump_json() + "\n"
    )
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures" / "rank-0.json").write_text(Failed(code="internal", message="old").model_dump_json())
    (tmp_path / ".rendezvous-1-1").touch()
    run = start(rank0="die")
    run.go()
    assert run.gone() == 1
    assert (run.last().seq, run.last().code) == (1, "rank_lost")


def test_the_launcher_does_not_import_torch():
    loaded = "import sys, engine.launch; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout == "False\n"
    )
