"""Which reason an exception stands for, whatever words it quotes."""

import errno
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError
from torch.distributed import DistNetworkError

from engine import failure, rank
from engine.config import RunConfig
from engine.data.format import InvalidData, examples
from engine.events import NO_ROOM
from engine.failure import LostContact, RunFailure


def raised(act) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (any kind is a case here)
        act()
    return caught.value


def chat_of(role: str) -> Exception:
    line = f'{{"messages": [{{"role": "{role}", "content": "x"}}]}}'.encode()
    return raised(lambda: list(examples(iter([line]), "chat")))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        pytest.param(chat_of("igloo"), "invalid_data", id="data that spells gloo"),
        pytest.param(chat_of("out of memory"), "invalid_data", id="data that speaks of memory"),
        pytest.param(RunFailure("invalid_model", "no model in /data/gloom"), "invalid_model", id="a path with gloo"),
        pytest.param(FileNotFoundError(2, "No such file", "/data/gloo"), "internal", id="a file's name with gloo"),
        pytest.param(RuntimeError("[…/gloo/tcp/pair.cc:534] Connection closed by peer"), "rank_lost", id="gloo"),
        pytest.param(DistNetworkError("the client socket has timed out"), "rank_lost", id="torch's network"),
        pytest.param(LostContact("1 of 2 ranks failed"), "rank_lost", id="another rank's failure"),
        pytest.param(raised(lambda: RunConfig.model_validate({})), "invalid_model", id="run.json"),
        pytest.param(raised(lambda: TypeAdapter(int).validate_python("a")), "internal", id="another validation"),
    ],
)  # fmt: skip
def test_an_error_has_the_code_of_its_kind(error: Exception, code: str) -> None:
    assert failure.explain(error, rank=1).code == code


def test_a_run_file_that_is_no_json_is_named_without_a_field() -> None:
    error = raised(lambda: RunConfig.model_validate_json("{nope"))
    assert isinstance(error, ValidationError)
    assert failure.explain(error, rank=0).message.startswith("run.json: Invalid JSON")


def test_a_messages_words_reach_the_user() -> None:
    error = chat_of("igloo")
    assert isinstance(error, InvalidData)
    assert failure.explain(error, rank=0).message == str(error)


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_has_no_room_to_say_how_it_ended_says_so_by_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(failure, "hand_over", full)
    monkeypatch.setattr(rank, "Emitter", full)
    monkeypatch.setattr(sys.stderr, "write", full)
    monkeypatch.setattr(rank.StopWish, "listen", lambda wish: None)
    monkeypatch.setenv("RANK", str(number))
    (tmp_path / "run.json").write_text("{}")
    assert rank.main(tmp_path / "run.json") == NO_ROOM == errno.ENOSPC


def test_any_other_error_of_a_file_is_raised() -> None:
    with pytest.raises(FileNotFoundError):
        failure.exit_code(lambda: len(Path("/nowhere/at/all").read_bytes()))
