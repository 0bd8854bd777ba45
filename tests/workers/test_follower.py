"""Reading a file that grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.events import Log, Stopped
from workers import follower
from workers.follower import Follower

LOG = '{"type": "log", "seq": 1, "time": 1.0, "message": "ä"}\n'
STOPPED = '{"type": "stopped", "seq": 2, "time": 2.0, "step": 4}\n'


def test_no_file_is_no_events(tmp_path: Path) -> None:
    assert Follower(tmp_path / "events.jsonl").read() == []


def test_a_line_is_read_when_it_is_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    following = Follower(path)
    written = LOG.encode() + STOPPED.encode()

    seen = []
    for position in range(len(written)):
        with path.open("ab") as file:
            file.write(written[position : position + 1])
        seen += following.read()

    assert seen == [Log(seq=1, time=1.0, message="ä"), Stopped(seq=2, time=2.0, step=4)]


def test_what_is_not_understood_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"type": "of a later version", "seq": 1}\n\0\0\0 after a power cut\n' + STOPPED)

    assert Follower(path).read() == [Stopped(seq=2, time=2.0, step=4)]


def test_a_long_backlog_comes_in_pieces_that_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "CHUNK_BYTES", 100)
    path = tmp_path / "events.jsonl"
    lines = [f'{{"type": "log", "seq": {seq}, "message": "{"x" * 150}"}}\n' for seq in range(1, 51)]
    path.write_text("".join(lines))
    following = Follower(path)

    first = following.read()
    pieces = [first, *iter(following.read, [])]

    assert len(first) < 50
    assert [event.seq for piece in pieces for event in piece] == list(range(1, 51))
