"""The event file, as a follower sees it."""

import json

from engine.emit import Emitter, last_event
from engine.events import Failed, Finished, Log


def test_each_event_is_one_line_with_its_number_and_time(tmp_path):
    with Emitter(tmp_path / "events.jsonl", clock=iter([5.0, 6.5]).__next__) as emitter:
        emitter.emit(Log(message="one\ntwo\u2028three"))
        emitter.emit(Finished(step=2, tokens=3, exported_step=2))
    lines = (tmp_path / "events.jsonl").read_bytes().split(b"\n")
    assert [json.loads(line) for line in lines[:-1]] == [
        {"seq": 1, "time": 5.0, "type": "log", "level": "info", "message": "one\ntwo\u2028three", "rank": 0},
        {
            "seq": 2, "time": 6.5, "type": "finished", "step": 2, "tokens": 3, "stopped_early": False,
            "exported_step": 2, "export": "export",
        },
    ]  # fmt: skip
    assert lines[-1] == b""


def test_a_second_writer_goes_on_after_the_last_whole_line(tmp_path):
    path = tmp_path / "events.jsonl"
    with Emitter(path) as emitter:
        emitter.emit(Log(message="whole"))
    with path.open("ab") as file:
        file.write(b'{"seq": 2, "type": "lo')
    assert last_event(path) is None
    with Emitter(path) as emitter:
        emitter.emit(Failed(code="rank_lost", message="rank 1 died", rank=1))
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["seq"], second["seq"], second["code"]) == (1, 2, "rank_lost")
    assert last_event(path).rank == 1


def test_a_file_that_nothing_ended_has_no_last_event(tmp_path):
    assert last_event(tmp_path / "events.jsonl") is None
    with Emitter(tmp_path / "events.jsonl") as emitter:
        emitter.emit(Log(message="on my way"))
    assert last_event(tmp_path / "events.jsonl") is None
