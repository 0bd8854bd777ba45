"""How a rank gives way: by its own niceness, and by its session's where that is its launcher's alone."""

import json
import os
import subprocess
import sys

import pytest

from engine import niceness
from engine.__main__ import parser
from engine.niceness import AUTOGROUP

RANK = """
import json, os, sys
from engine.niceness import AUTOGROUP, give_way
give_way(3)
print(json.dumps([os.nice(0), AUTOGROUP.read_text() if AUTOGROUP.exists() else None]))
"""
SHELL = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
LAUNCHER = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"


@pytest.mark.parametrize("alone", [True, False], ids=["a session of the launcher's own", "a session of somebody's"])
def test_a_rank_gives_way_and_its_session_only_where_that_is_the_launchers_own(alone):
    launcher = [sys.executable, "-c", LAUNCHER, RANK]
    command = launcher if alone else [sys.executable, "-c", SHELL, *launcher]
    said = subprocess.run(command, stdout=subprocess.PIPE, start_new_session=True, check=True, timeout=60).stdout
    niceness, session = json.loads(said)
    assert niceness == min(19, os.nice(0) + 3)
    if AUTOGROUP.exists():
        assert session.split()[-1] == ("3" if alone else "0")


@pytest.mark.parametrize("said", ["-5", "20", "99", "1.5", "much"])
def test_a_niceness_that_the_kernel_would_cut_or_refuse_is_refused_in_words(capsys, said):
    with pytest.raises(SystemExit):
        parser().parse_args(["launch", __file__, "--ranks", "1", "--nice", said])
    assert f"--nice: {said} is not a whole number from 0" in capsys.readouterr().err


class Busy:
    """An autogroup file whose kernel has just taken somebody else's wish."""

    def __init__(self, refusals):
        self.refusals, self.taken = refusals, []

    def write_text(self, text):
        if self.refusals:
            self.refusals -= 1
            raise BlockingIOError
        self.taken.append(text)


@pytest.mark.parametrize(("refusals", "taken"), [(2, ["3"]), (niceness.TRIES, [])])
def test_a_wish_that_comes_too_soon_after_anothers_is_made_again_but_not_for_ever(monkeypatch, refusals, taken):
    kernel = Busy(refusals)
    monkeypatch.setattr(niceness, "AUTOGROUP", kernel)
    monkeypatch.setattr(niceness, "BETWEEN_SECONDS", 0.0)
    niceness._give_way_together(3)
    assert (kernel.refusals, kernel.taken) == (0, taken)
