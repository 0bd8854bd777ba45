"""An answer's text as it grows: whole characters, nothing that a stop text takes back, each token where it begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.answer import Answer, held
from engine.sampling import Chance
from engine.tokenizer import Tokenizer
from tests.engine.data.make import llama as llama_tokenizer

BYTES = Tokenizer.bytes()


def pieces(ids: Sequence[int], *, stops: Sequence[str] = (), tokenizer: Tokenizer = BYTES) -> tuple[list[str], Answer]:
    """What is given out after each token, as far as the answer goes; the last token ends it."""
    answer, given = Answer(tokenizer, stops=stops, stop_ids=tokenizer.stop_ids), []
    for place, token in enumerate(ids):
        answer.push(token, Chance(-1.0), last=place == len(ids) - 1)
        given.append(answer.take().text)
        if answer.finish_reason is not None:
            break
    return given, answer


def test_a_character_of_several_tokens_comes_whole() -> None:
    given, _ = pieces(list("a€b".encode()))
    assert given == ["a", "", "", "€", "b"]


@pytest.mark.parametrize("text", ["naïve €5 😀😀 日本", "\u2028 \ufffd ok"])
@pytest.mark.parametrize("kind", ["bytes", "bytes for what is rare"])
def test_pieces_are_the_text_and_none_has_half_a_character(text: str, kind: str, tmp_path: Path) -> None:
    tokenizer = BYTES if kind == "bytes" else llama_tokenizer(tmp_path)
    given, _ = pieces(tokenizer.encode(text), tokenizer=tokenizer)
    assert "".join(given) == text
    assert sum(piece.count("\ufffd") for piece in given) == text.count("\ufffd")


def test_bytes_that_never_become_a_character_do_not_hold_up_the_text() -> None:
    given, answer = pieces([0x80] * 200 + [0x41])
    assert not any(given[place : place + 4] == [""] * 4 for place in range(len(given)))
    assert "".join(given) == bytes([0x80] * 200 + [0x41]).decode(errors="replace")
    assert answer.finish_reason == "length"


def test_a_stop_text_over_several_tokens_is_never_given_out() -> None:
    given, answer = pieces(list(b"one END two"), stops=["END"])
    assert "".join(given) == "one "
    assert given == ["o", "n", "e", " ", "", "", ""]
    assert (answer.finish_reason, answer.count) == ("stop", 7)


def test_what_only_looked_like_a_stop_text_is_given_out_after_all() -> None:
    given, answer = pieces(list(b"an ENX"), stops=["END"])
    assert given == ["a", "n", " ", "", "", "ENX"]
    assert answer.finish_reason == "length"


def test_an_ending_token_lets_go_of_what_was_held() -> None:
    assert BYTES.eos_id is not None
    given, answer = pieces([*b"an EN", BYTES.eos_id, *b"never"], stops=["END"])
    assert ("".join(given), answer.finish_reason, answer.count) == ("an EN", "stop", 6)


def test_as_much_is_held_as_may_begin_a_stop_text() -> None:
    assert held("abab", ["abac", "b"]) == 2
    assert held("abc", ["xyz"]) == 0


def test_tokens_go_with_the_text_that_they_begin_and_cut_ones_are_left_out() -> None:
    answer = Answer(BYTES, stops=["!!"], offset=10)
    told = []
    for token in b"a\xc3\xa9b!!":
        answer.push(token, Chance(-float(token)))
        told.append([(said.token, said.offset) for said in answer.take().said])
    # The second letter is two tokens that both begin where it does.
    assert told == [[(0x61, 10)], [], [(0xC3, 11), (0xA9, 11)], [(0x62, 12)], [], []]


@pytest.mark.parametrize(
    ("make", "text", "expected"),
    [
        pytest.param(lambda folder: BYTES, "é", [("\ufffd", b"\xc3"), ("\ufffd", b"\xa9")], id="bytes"),
        pytest.param(
            llama_tokenizer, "the é", [(" the", b" the"), (" ", b" "), ("\ufffd", b"\xc3"), ("\ufffd", b"\xa9")],
            id="SentencePiece's",
        ),
    ],
)  # fmt: skip
def test_a_token_stands_for_its_text_and_bytes(make: object, text: str, expected: object, tmp_path: Path) -> None:
    tokenizer = make(tmp_path)  # type: ignore[operator]
    assert [tokenizer.piece(token) for token in tokenizer.encode(text)] == expected


def test_a_control_token_stands_for_its_name() -> None:
    assert BYTES.piece(BYTES.specials["<|im_end|>"]) == ("<|im_end|>", b"<|im_end|>")
    assert BYTES.piece(10**6) == ("", b"")
