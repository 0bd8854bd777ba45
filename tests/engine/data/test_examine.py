"""A survey counts what preparing a run does, and stops when its time is up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path

import pytest

from engine.data.examine import MAX_SHOWN, Reading, _spans, preview, survey
from engine.tokenizer import Tokenizer
from tests.engine.data import make


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("form", ["chat", "preference"])
def test_a_survey_counts_what_a_run_would(form: str, packing: bool, overlong: str, tmp_path: Path) -> None:
    line = (
        make.chat_line if form == "chat" else lambda question, answer: make.pair_line(question, answer, "no" + answer)
    )
    content = make.jsonl(line("q" * (number % 7), "a" * (number * 3 % 60 + 1)) for number in range(50))
    done = make.prepared(tmp_path, content, format=form, seq_len=70, packing=packing, overlong=overlong)

    told = survey(Tokenizer.bytes(), [content], Reading(form, 70, overlong, packing), seconds=60)  # type: ignore[arg-type]

    assert told["examined"] == done.counts.examples
    assert told["kept"] == done.counts.kept
    assert told["truncated"]["count"] == done.counts.truncated
    assert told["dropped"]["count"] == done.counts.dropped
    assert (told["rows"], told["tokens"]) == (done.counts.rows, done.counts.tokens)
    assert told["trainable_tokens"] == done.train.labels()
    assert json.dumps(told)


@pytest.mark.parametrize("packing", [True, False])
def test_a_survey_of_text_counts_what_a_run_would(packing: bool, tmp_path: Path) -> None:
    content = make.jsonl({"text": "word " * number} for number in range(1, 30))
    done = make.prepared(tmp_path, content, format="text", seq_len=32, packing=packing)

    told = survey(Tokenizer.bytes(), [content], Reading("text", 32, packing=packing), seconds=60)

    assert (told["rows"], told["tokens"], told["kept"]) == (len(done.train), done.train.tokens, done.counts.kept)
    assert told["trainable_tokens"] == done.train.labels()


ASKED = [
    {"question": "q" * (number + 1), "choices": ["a" * (number * 3 % 40 + 1), "b", "cc"], "answer": number % 3}
    for number in range(40)
]


@pytest.mark.parametrize("packing", [True, False])
def test_a_survey_of_questions_counts_what_a_run_would_ask(packing: bool, tmp_path: Path) -> None:
    content = make.jsonl(ASKED)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "questions.jsonl").write_bytes(content)
    asked = {"evaluation": Path("data/questions.jsonl"), "seq_len": 48, "packing": packing}
    done = make.prepared(tmp_path, b"some text", format="text", **asked).questions
    # By hand: a byte is an id, a space stands before each choice, and a row and its last label are 49.
    lengths = [len(row["question"]) + 1 + max(map(len, row["choices"])) for row in ASKED]
    short = [number for number, length in enumerate(lengths) if length <= 49]

    told = survey(Tokenizer.bytes(), [content], Reading("choice", 48, packing=packing), seconds=60)

    assert done is not None
    assert (told["examined"], told["kept"], told["problem"]) == (40, len(short), None)
    assert [each["line"] for each in told["dropped"]["lines"]] == [n + 1 for n in range(40) if n not in short]
    assert (told["rows"], told["tokens"]) == (len(done.rows), done.rows.tokens)
    assert told["trainable_tokens"] == done.rows.labels()
    assert (len(done), done.left_out) == (len(short), 40 - len(short))
    assert done.lines_Q.tolist() == [number + 1 for number in short]
    assert done.answers_Q.tolist() == [ASKED[number]["answer"] for number in short]


def test_of_questions_that_are_all_too_long_a_survey_says_what_would_do() -> None:
    told = survey(Tokenizer.bytes(), [make.jsonl(ASKED[-1:])], Reading("choice", 16), seconds=60)

    assert (told["kept"], told["dropped"]["count"]) == (0, 1)
    assert "seq_len=16" in told["problem"]
    assert "overlong" not in told["problem"]


def test_each_choice_is_shown_with_what_of_it_counts() -> None:
    (shown,) = preview(Tokenizer.bytes(), [make.jsonl(ASKED[:1])], Reading("choice", 64))

    assert [[span["text"] for span in each["spans"]] for each in shown["choices"]] == [
        ["q", " a"], ["q", " b"], ["q", " cc"],
    ]  # fmt: skip
    assert (shown["answer"], shown["text"], shown["mask"]) == (0, "q a", [0, 1, 1])


@pytest.mark.parametrize(("form", "line"), [("chat", make.chat_line("q", "a")), ("text", {"text": "some words"})])
def test_a_survey_without_end_says_how_far_it_came(form: str, line: object) -> None:
    told = survey(Tokenizer.bytes(), repeat(make.jsonl([line] * 100)), Reading(form, 64), seconds=0.5)  # type: ignore[arg-type]

    assert told["complete"] is False
    assert told["examined"] == told["kept"] > 0


def test_of_a_document_that_does_not_end_the_beginning_is_shown() -> None:
    (shown,) = preview(Tokenizer.bytes(), repeat(b"some words of a book " * 1000), Reading("text", 64))

    assert shown["more"]
    assert len(shown["ids"]) == MAX_SHOWN
    assert shown["text"].startswith("some words of a book some")


def test_a_character_that_a_mask_cuts_in_two_is_shown_whole_and_once() -> None:
    """By UTF-8: é is c3 a9, of which the second byte alone is learned here; 家 is e5 ae b6."""
    tokenizer = Tokenizer.bytes()
    ids = tokenizer.encode("aé家b")
    mask = [0, 0, 1, 1, 0, 0, 0]

    spans = list(_spans(tokenizer, ids, mask))

    assert [(span["trained"], span["text"]) for span in spans] == [(False, "a"), (True, "é"), (False, "家b")]


def test_a_mask_that_changes_at_every_id_is_shown_in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    decode = Tokenizer.decode

    def counted(self: Tokenizer, ids: Sequence[int], *, skip_special: bool = True) -> str:
        decoded.append(len(ids))
        return decode(self, ids, skip_special=skip_special)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    tokenizer = Tokenizer.bytes()
    ids = tokenizer.encode("ab" * 1000)

    spans = list(_spans(tokenizer, ids, [0, 1] * 1000))

    assert [span["text"] for span in spans] == ["a", "b"] * 1000
    # A few for each id, where decoding from the beginning takes two million.
    assert sum(decoded) < 10 * len(ids)
