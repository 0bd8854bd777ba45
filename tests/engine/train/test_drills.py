"""Ranks killed in the middle of saving: the last checkpoint that was told of, or a newer one, is there and is whole."""

import json
import signal
import subprocess
import sys

import pytest


def drills(folder, how, seeds=0):
    command = [sys.executable, "-m", "tests.engine.train.drills", str(folder), how, str(seeds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def check(drill, errors):
    told = [step for what, step in drill["told"] if what == "saved"]
    ((_, found),) = drill["found"] or [("", "0")]
    assert drill["looked"] == 0, f"{drill}: {errors}"
    assert int(found) >= int(told[-1]), drill


def test_killed_before_any_touch_of_the_disk_a_rank_leaves_whole_checkpoints(tmp_path):
    done, errors = drills(tmp_path, "every")
    assert len(done) > 60
    for drill in done:
        assert drill["codes"] == [-signal.SIGKILL], drill
        check(drill, errors)
    moments = {what for drill in done for said, what in drill["told"] if said == "killed"}
    assert {"write", "fsync", "open manifest.json", "os.rename .step-00000003.unfinished"} <= moments
    assert "os.rename step-00000001" in moments, "the oldest of three goes"
    assert {step for drill in done for _, step in drill["found"]} == {"1", "2", "3"}


@pytest.mark.parametrize("seeds", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_when_one_or_both_of_two_ranks_are_killed_none_hangs_and_checkpoints_are_whole(tmp_path, seeds):
    done, errors = drills(tmp_path, "random", seeds)
    assert len(done) == seeds
    for drill in done:
        # One that is killed ends so, unless the other was first; one that is left raises. None waits to be killed.
        assert any(what == "killed" for what, _ in drill["told"]), drill
        assert set(drill["codes"]) <= {-signal.SIGKILL, 1}, drill
        assert drill["codes"].count(-signal.SIGKILL) == sum(what == "killed" for what, _ in drill["told"]), drill
        check(drill, errors)
