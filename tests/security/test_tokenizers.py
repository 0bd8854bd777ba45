"""A tokenizer.json is a program too: expressions, tables and merges, run by a library that panics where they fail."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.tokenizer import InvalidTokenizer, Tokenizer
from tests.engine.data import make

GOES_BACK = {"Regex": "(c+)+$"}
"""Of n times `c` before something else it tries each of 2^(n - 1) ways to cut them."""
HARMLESS = "abab"
AWKWARD = "c" * 40 + "!"


def base(folder: Path, **changed: Any) -> Path:
    """A base whose tokenizer.json differs from a good one in these parts."""
    path = make.llama_folder(folder) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return folder


SPLIT = {"type": "Split", "pattern": GOES_BACK, "behavior": "Isolated", "invert": False}
REPLACE = {"type": "Replace", "pattern": GOES_BACK, "content": "b"}
GOING_BACK = {"where text is split": {"pre_tokenizer": SPLIT}, "where text is normalized": {"normalizer": REPLACE}}


@pytest.mark.parametrize("changed", GOING_BACK.values(), ids=GOING_BACK)
def test_an_expression_that_goes_back_too_often_fails_the_text_and_not_the_process(
    tmp_path: Path, changed: Mapping[str, Any]
) -> None:
    tokenizer = Tokenizer.load(base(tmp_path, **changed))
    for attack in (
        lambda: tokenizer.prompt(AWKWARD),
        lambda: tokenizer.chat([{"role": "user", "content": AWKWARD}]),
        lambda: list(tokenizer.encode_all([(AWKWARD, True)])),
    ):
        with pytest.raises(InvalidTokenizer, match=r"can't cut this text: .*retry-limit-in-match"):
            attack()
    # It serves others as before.
    assert tokenizer.decode(tokenizer.encode(HARMLESS)) == HARMLESS


def test_the_text_that_is_to_blame_is_the_one_that_fails(tmp_path: Path) -> None:
    encoded = Tokenizer.load(base(tmp_path, pre_tokenizer=SPLIT)).encode_all([(HARMLESS, False), (AWKWARD, False)])
    assert next(encoded)
    with pytest.raises(InvalidTokenizer, match="can't cut this text"):
        next(encoded)


DAMAGED = {
    "a table that is none": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "an unknown token that is nowhere": {
        "model": {"type": "WordPiece", "vocab": {"b": 0}, "unk_token": "x", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100},
        "post_processor": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("changed", DAMAGED.values(), ids=DAMAGED)
def test_a_tokenizer_that_the_library_fails_on_is_refused_in_words(tmp_path: Path, changed: Mapping[str, Any]) -> None:
    folder = base(tmp_path, **changed)
    for load in (lambda: Tokenizer.load(folder), lambda: Tokenizer.from_file(folder / "tokenizer.json")):
        with pytest.raises(InvalidTokenizer, match=r"can't be read|can't cut"):
            load()
