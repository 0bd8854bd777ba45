"""The `trainshed` command as a person has it: at a terminal, with Ctrl-C, TAB, and a server that comes and goes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from api.cli import Exit
from tests.api import driving
from tests.api.terminal import Bridge, Terminal

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def env(live, key, tmp_path) -> dict[str, str]:
    """An environment in which `trainshed` is this one, and knows its server."""
    command = tmp_path / "bin" / "trainshed"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m api.cli "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}:/usr/bin:/bin"
    return {"PATH": path, "PYTHONPATH": str(ROOT), "TRAINSHED_URL": live.url, "TRAINSHED_API_KEY": key}


def test_watching_fits_a_narrow_terminal_and_ctrl_c_leaves_the_job_alone(live, http, env, tmp_path):
    job = driving.submit(http, name="tiny")["id"]
    fence = driving.claim(live.services, job)
    driving.record(live.services, job, fence, driving.started(4), *(driving.step(number) for number in (1, 2, 3)))
    with Terminal(["trainshed", "watch", job], env=env, cwd=tmp_path, columns=36) as terminal:
        terminal.until("━ loss")
        assert "step 3/4  loss 1.6667" in terminal.text
        terminal.type("\x03")
        assert terminal.ended() == Exit.INTERRUPTED
    drawn, _, left = terminal.text.partition("The job goes on.")
    assert f"trainshed cancel {job}" in " ".join(left.split())
    assert re.search("[⠁-⣿]", drawn)
    # What Ctrl-C itself echoes stands in the line of the cursor.
    lines = [line.replace("^C", "") for line in re.split(r"[\r\n]+", drawn)]
    assert max(map(cell_len, lines)) <= 36
    assert http.get(f"/v1/jobs/{job}").json()["state"] == "running"


def test_a_server_that_goes_away_is_said_and_nothing_is_missed_when_it_is_back(live, http, env, tmp_path):
    job = driving.submit(http, name="tiny")["id"]
    fence = driving.claim(live.services, job)
    driving.record(live.services, job, fence, driving.started(4), driving.step(1))
    bridge = Bridge(int(live.url.rpartition(":")[2]))
    env |= {"TRAINSHED_URL": f"http://127.0.0.1:{bridge.port}", "TRAINSHED_PATIENCE": "60"}
    with Terminal(["trainshed", "watch", job], env=env, cwd=tmp_path, columns=100) as terminal:
        terminal.until("step 1/4")
        bridge.cut()
        terminal.until("The server is away")
        driving.record(live.services, job, fence, *(driving.step(number) for number in (2, 3, 4)))
        bridge.mend()
        terminal.until("step 4/4  loss 1.2500")
        driving.succeed(live.services, job, fence)
        assert terminal.ended() == Exit.OK
    bridge.cut()
    places = re.findall(rb"last-event-id: (\d+)", bridge.sent)
    assert int(places[-1]) >= int(places[0]) > 0


def test_chatting_begins_with_how_it_ends(env, tmp_path):
    with Terminal(["trainshed", "chat", "nothing"], env=env, cwd=tmp_path) as terminal:
        terminal.until("> ")
        assert "/exit" in terminal.text
        terminal.type("Hi\n")
        terminal.until("There is no model 'nothing'")
        terminal.type("/new\n")
        terminal.until("A new conversation")
        terminal.type("/exit\n")
        assert terminal.ended() == Exit.OK


SHELLS = {
    "bash": ["--norc", "--noprofile", "-i"],
    "zsh": ["-f", "-i"],
}
READY = {
    "bash": 'PS1="$ "; eval "$(trainshed completion bash)"; echo ready-$((1 + 1))\n',
    "zsh": 'PS1="$ "; autoload -Uz compinit; compinit -D; eval "$(trainshed completion zsh)"; echo ready-$((1 + 1))\n',
}


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_commands_and_ids(shell, http, env, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    job = driving.submit(http)["id"]
    with Terminal([shell, *SHELLS[shell]], env=env, cwd=tmp_path, columns=200) as terminal:
        terminal.type(READY[shell])
        terminal.until("ready-2")
        terminal.type("trainshed downl\t")
        terminal.until("trainshed download ")
        terminal.type("job-\t")
        terminal.until(job)
        terminal.type("--in\t")
        terminal.until("--into")


def test_fish_completes_with_descriptions(http, env, tmp_path):
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed here")
    job = driving.submit(http)["id"]
    asked = "trainshed completion fish | source; complete -C 'trainshed downl'; complete -C 'trainshed show '"
    done = subprocess.run(
        ["fish", "--no-config", "-c", asked], env=env | {"HOME": str(tmp_path)}, cwd=tmp_path, capture_output=True,
        text=True, timeout=120, check=True,
    )  # fmt: skip
    command, of_job = done.stdout.splitlines()
    assert command.split("\t")[0] == "download"
    assert of_job.split("\t") == [job, "queued pretrain"]


def test_completion_without_a_server_is_quiet(env, tmp_path):
    completing = {"COMP_WORDS": "trainshed show ", "COMP_CWORD": "2", "_TRAINSHED_COMPLETE": "complete_bash"}
    done = subprocess.run(
        ["trainshed"], env=env | completing | {"TRAINSHED_URL": "http://127.0.0.1:9"}, cwd=tmp_path,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
