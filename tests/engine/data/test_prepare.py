"""From files to rows: nothing cut, dropped or held out in silence, and at least one row of whatever there is."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from engine.config import RunConfig, TokenizerSource
from engine.data.format import InvalidData
from engine.data.prepare import Counts, Prepared, load_tokenizer, open_prepared, prepare, shuffled, tokenizer_for
from engine.data.rows import Rows
from engine.failure import explain
from engine.tokenizer import InvalidTokenizer, Tokenizer
from tests.engine.data import make

END = 256
"""<|endoftext|> where ids are bytes."""


def documents(rows: Rows) -> list[bytes]:
    """Each document's bytes, control tokens left out, in the order of the rows."""
    found = []
    for index in range(len(rows)):
        row = rows.row(index)
        for number in range(int(row.documents[row.filled - 1]) + 1):
            ids = row.tokens[row.documents == number]
            found.append(bytes(int(identity) for identity in ids if identity < 256))
    return found


def test_text_is_cut_into_full_rows_with_an_end_after_each_document(tmp_path: Path) -> None:
    rows = make.prepared(tmp_path, make.jsonl([{"text": "abcdefg"}, {"text": "xyz"}]), seq_len=4).train

    # Rows of 4 inputs and one more label. Documents are 8 and 4 ids with their ends; e is a label, then an input.
    # After efg and the end one place is left, of which the next document has no use.
    assert [rows.row(index).tokens.tolist() for index in range(len(rows))] == [
        [*b"abcde"],
        [*b"efg", END, rows.pad_id],
        [*b"xyz", END, rows.pad_id],
    ]
    predicted = [rows.row(index).tokens[rows.row(index).trained].tolist() for index in range(len(rows))]
    assert predicted == [[*b"bcde"], [*b"fg", END], [*b"yz", END]]
    assert (rows.tokens, rows.labels()) == (4 + 4 + 4, 4 + 3 + 3)


def test_a_row_keeps_documents_apart_with_positions_from_zero(tmp_path: Path) -> None:
    row = make.prepared(tmp_path, make.jsonl([{"text": "ab"}, {"text": "c"}]), seq_len=7).train.row(0)

    assert row.tokens.tolist() == [*b"ab", END, *b"c", END, 257, 257, 257]
    assert row.documents.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert row.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    # Nothing predicts the first id of a document, and padding predicts nothing.
    assert row.trained.tolist() == [False, True, True, False, True, False, False, False]


@pytest.mark.parametrize("content", [b"The cat sat.", b"a"], ids=["short", "one letter"])
def test_text_shorter_than_a_row_is_trained_in_one_padded_row(content: bytes, tmp_path: Path) -> None:
    done = make.prepared(tmp_path, content, seq_len=256)

    assert (len(done.train), done.train.labels()) == (1, len(content))
    assert done.counts == Counts(examples=1, kept=1, rows=1, tokens=len(content) + 1)


def test_a_document_in_many_pieces_has_the_ids_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"the word {number}\nhello\n\n" for number in range(150))
    llama = make.llama(tmp_path / "base")
    monkeypatch.setattr("engine.data.format.PIECE_CHARACTERS", 256)
    row = make.prepared(tmp_path, text.encode(), tokenizer=llama, seq_len=4096).train.row(0)

    assert row.tokens[: row.filled].tolist() == [1, *llama.encode(text), 2]


LINES = [make.chat_line("q", "a"), make.chat_line("q", "long " * 20), make.chat_line("long " * 40, "a")]
"""The shell of such a conversation is 29 bytes and ids: 6 + 2 for the user, 11 + 2 for the assistant, and the words."""


def test_examples_that_are_too_long_are_an_error_that_names_them(tmp_path: Path) -> None:
    with pytest.raises(InvalidData) as refused:
        make.prepared(tmp_path, make.jsonl(LINES), format="chat", seq_len=64)

    said = str(refused.value)
    # <|im_start|>user\nq<|im_end|>\n is 9 ids, <|im_start|>assistant\n…<|im_end|>\n 13 and the words: 9 + 13 + 100
    # and 8 + 200 + 13 + 1; one less than the longest is the seq_len to ask for.
    assert "line 2 (122 tokens), line 3 (222 tokens)" in said
    assert "data.seq_len to 221" in said
    make.prepared(tmp_path, make.jsonl(LINES), format="chat", seq_len=221)


def test_dropped_examples_are_counted_and_named(tmp_path: Path) -> None:
    done = make.prepared(tmp_path, make.jsonl(LINES), format="chat", seq_len=64, overlong="drop")

    assert done.counts == Counts(examples=3, kept=1, dropped=2, rows=1, tokens=23)
    assert len(done.notes) == 1
    assert "2 of 3" in done.notes[0]
    assert "line 2" in done.notes[0]


def test_cut_examples_are_counted_and_those_left_with_nothing_to_learn_are_named(tmp_path: Path) -> None:
    done = make.prepared(tmp_path, make.jsonl(LINES), format="chat", seq_len=64, overlong="truncate")

    # The second loses the end of its answer; the third loses all of it.
    assert done.counts == Counts(examples=3, kept=2, truncated=1, untrainable=1, rows=2, tokens=64 + 23)
    assert [("line 2" in note, "line 3" in note) for note in done.notes] == [(True, False), (False, True)]
    assert "nothing" in done.notes[1]


@pytest.mark.parametrize(
    ("most", "way"),
    [
        (256, 'set data.seq_len to {row} or data.overlong to "drop" or "truncate"'),
        (100, 'set data.overlong to "drop" or "truncate", as the model takes 100 tokens at most'),
    ],
)
def test_examples_longer_than_a_row_are_refused_with_what_the_model_allows(tmp_path: Path, most: int, way: str) -> None:
    lines = make.jsonl([make.chat_line("q" * 100, "yes")])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-0.jsonl").write_bytes(lines)
    run = make.run(format="chat", seq_len=64)
    with pytest.raises(InvalidData) as refused:
        prepare(run, tmp_path, Tokenizer.bytes(), make.silent, max_seq_len=most)
    (length,) = re.findall(r"\((\d+) tokens\)", str(refused.value))
    assert way.format(row=int(length) - 1) in str(refused.value)
    # The file need not be another one, as the code's own hint would have it.
    assert "message says" in str(explain(refused.value, rank=0).hint)


def test_a_file_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=r"longer than data\.seq_len=8"):
        make.prepared(tmp_path, make.jsonl(LINES), format="chat", seq_len=8, overlong="drop")


def test_a_file_of_which_nothing_is_left_to_learn_is_refused_by_its_lines(tmp_path: Path) -> None:
    long = make.jsonl([make.chat_line("q" * 100, "yes"), make.chat_line("q" * 90, "no")])
    with pytest.raises(
        InvalidData, match=r"2 of 2 .*line 1, line 2; raise data\.seq_len=64 or shorten what comes before"
    ):
        make.prepared(tmp_path, long, format="chat", seq_len=64, overlong="truncate")


def test_validation_with_what_is_trained_on_is_told(tmp_path: Path) -> None:
    content = make.jsonl(LINES[:1])
    (tmp_path / "data").mkdir()
    for held, told in ((content, 1), (make.jsonl(LINES[1:2]), 0)):
        (tmp_path / "data" / "validation.jsonl").write_bytes(held)
        done = make.prepared(tmp_path, content, format="chat", seq_len=256, validation=Path("data/validation.jsonl"))
        assert len([note for note in done.notes if "byte for byte" in note]) == told


def test_examples_are_packed_whole_and_without_packing_stand_alone(tmp_path: Path) -> None:
    lines = make.jsonl(make.chat_line("q", f"{number:02}") for number in range(20))
    packed = make.prepared(tmp_path, lines, format="chat", seq_len=119).train
    alone = make.prepared(tmp_path / "alone", lines, format="chat", seq_len=119, packing=False).train

    # 24 ids each, so 5 of them fill 120: 20 examples are 4 rows. Learned are two digits and an end.
    assert (len(packed), len(alone)) == (4, 20)
    assert sorted(documents(packed)) == sorted(documents(alone))
    assert packed.labels() == alone.labels() == 20 * 3
    assert sorted(line for row in range(4) for _, line in packed.origins(row)) == list(range(1, 21))


def test_pretraining_on_conversations_learns_every_id(tmp_path: Path) -> None:
    line = make.jsonl([make.chat_line("q", "a")])

    assert make.prepared(tmp_path, line, format="chat", seq_len=64).train.labels() == 2
    assert make.prepared(tmp_path, line, format="chat", seq_len=64, objective="pretrain").train.labels() == 22


def pairs(rows: Rows) -> list[bytes]:
    """Each pair, its answers joined as they lie."""
    found = documents(rows)
    return [better + worse for better, worse in zip(found[::2], found[1::2], strict=True)]


def test_the_answers_of_a_pair_are_neighbours_in_one_row(tmp_path: Path) -> None:
    # By hand: <|im_start|>user, \n, q0, <|im_end|>, \n, <|im_start|>assistant, \n, the answer, <|im_end|>, \n.
    content = make.jsonl(make.pair_line(f"q{number}", "yes", "no" * (number + 1)) for number in range(8))
    done = make.prepared(tmp_path, content, format="preference", seq_len=120)
    whole = [
        f"user\nq{number}\nassistant\nyes\nuser\nq{number}\nassistant\n{'no' * (number + 1)}\n" for number in range(8)
    ]

    assert sorted(pairs(done.train)) == sorted(text.encode() for text in whole)
    assert done.counts == Counts(examples=8, kept=8, rows=len(done.train), tokens=done.train.tokens)
    assert len(done.train) < 8
    # Of each answer its bytes and the end of the turn are learned.
    assert done.train.labels() == sum(3 + 1 + 2 * (number + 1) + 1 for number in range(8))
    assert sorted(line for row in range(len(done.train)) for _, line in done.train.origins(row)) == sorted(
        2 * list(range(1, 9))
    )


def test_held_out_pairs_stay_whole(tmp_path: Path) -> None:
    content = make.jsonl(make.pair_line("q", "a" * number, "b" * number) for number in range(1, 11))
    done = make.prepared(tmp_path, content, format="preference", seq_len=200, validation=0.3)

    assert done.validation is not None
    assert len(pairs(done.validation)) == 3
    assert len(pairs(done.train)) == 7
    for pair in pairs(done.validation) + pairs(done.train):
        # "assistant" has two a's, and both sides say it.
        assert pair.count(b"a") - 4 == pair.count(b"b")


def test_a_long_pair_is_cut_on_the_longer_side_and_left_out_where_no_answer_is_left(tmp_path: Path) -> None:
    # A prompt takes 18 ids, and an answer 2 more than its bytes.
    content = make.jsonl(
        [
            make.pair_line("q", "a", "b" * 100),
            make.pair_line("q" * 90, "a", "b"),
            make.pair_line("q", "x" * 80, "x" * 90),
        ]
    )
    done = make.prepared(tmp_path, content, format="preference", seq_len=63, overlong="truncate")

    assert (done.counts.kept, done.counts.truncated, done.counts.untrainable) == (1, 1, 2)
    assert int(done.train.filled[0]) == 64
    assert any("line 2" in note and "line 3" in note and "left out" in note for note in done.notes)


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("form", ["chat", "text"])
def test_a_held_out_share_leaves_something_on_both_sides(fraction: float, form: str, tmp_path: Path) -> None:
    if form == "chat":
        content = make.jsonl(make.chat_line(f"q{number:02}", "a") for number in range(20))
    else:
        content = make.jsonl({"text": f"{number:015}"} for number in range(20))
    asked = {"format": form, "seq_len": 24 if form == "chat" else 15, "validation": fraction}
    done = make.prepared(tmp_path, content, **asked)
    again = make.prepared(tmp_path / "again", content, **asked)
    other = make.prepared(tmp_path / "other", content, seed=2, **asked)

    assert done.validation is not None
    assert again.validation is not None
    assert other.validation is not None
    # Each example fills a row of its own.
    assert len(done.validation) == min(19, max(1, round(20 * fraction)))
    assert len(done.train) == 20 - len(done.validation)
    assert not set(documents(done.train)) & set(documents(done.validation))
    assert documents(done.validation) == documents(again.validation)
    if fraction == 0.5:
        assert documents(done.validation) != documents(other.validation)


@pytest.mark.parametrize(("form", "content"), [("text", b"short"), ("chat", make.jsonl([make.chat_line("q", "a")]))])
def test_nothing_can_be_held_out_of_one(form: str, content: bytes, tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="only one"):
        make.prepared(tmp_path, content, format=form, seq_len=64, validation=0.1)


def test_a_validation_file_is_rows_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "validation.jsonl").write_bytes(make.jsonl([{"text": "held"}]))
    done = make.prepared(tmp_path, b"learned", validation=Path("data/validation.jsonl"))

    assert done.validation is not None
    assert (documents(done.train), documents(done.validation)) == ([b"learned"], [b"held"])
    assert make.prepared(tmp_path, b"learned").validation is None


def test_bad_lines_of_a_file_are_all_named_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "more.jsonl").write_bytes(b'{"text":1}\n{"text":"a"}\n{"text":2}\n')
    files = (Path("data/train-0.jsonl"), Path("data/more.jsonl"))

    with pytest.raises(InvalidData, match=r"more\.jsonl") as refused:
        make.prepared(tmp_path, make.jsonl([{"text": "a"}]), train=files)
    assert [finding.line for finding in refused.value.findings] == [1, 3]


def test_what_a_template_refuses_is_named_for_all_lines(tmp_path: Path) -> None:
    template = "{% if messages|length > 2 %}{{ raise_exception('one turn only') }}{% endif %}" + (
        "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
    )
    long = {"messages": make.chat_line("q", "a")["messages"] * 2}
    with pytest.raises(InvalidData, match="one turn only") as refused:
        make.prepared(
            tmp_path, make.jsonl([long, make.chat_line("q", "a"), long]),
            tokenizer=make.llama(tmp_path / "base", template=template), format="chat",
        )  # fmt: skip
    assert [finding.line for finding in refused.value.findings] == [1, 3]


def test_several_files_are_one_set_and_rows_know_their_lines(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "more.jsonl").write_bytes(make.jsonl([{"text": "c"}]))
    files = (Path("data/train-0.jsonl"), Path("data/more.jsonl"))
    done = make.prepared(tmp_path, b'\n{"text":"a"}\n\n{"text":"b"}', train=files)

    assert documents(done.train) == [b"a", b"b", b"c"]
    assert done.train.origins(0) == [(0, 2), (0, 4), (1, 1)]


def test_other_ranks_open_what_one_wrote(tmp_path: Path) -> None:
    done = make.prepared(tmp_path, make.jsonl(LINES), format="chat", seq_len=64, overlong="drop", validation=None)
    opened = open_prepared(tmp_path)

    assert isinstance(opened, Prepared)
    assert (opened.counts, opened.notes) == (done.counts, done.notes)
    assert np.array_equal(opened.train.row(0).tokens, done.train.row(0).tokens)


def test_large_vocabularies_keep_their_ids(tmp_path: Path) -> None:
    base = make.llama(tmp_path / "base")
    for size in (2**16, 2**16 + 1):
        base.vocab_size = size
        row = make.prepared(tmp_path, b"the", tokenizer=base).train.row(0)

        assert row.tokens[: row.filled].tolist() == [1, *base.encode("the"), 2]


def test_progress_ends_at_the_size_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-0.jsonl").write_bytes(b"some text\n" * 10)
    run = make.run(tokenizer=TokenizerSource(type="train", vocab_size=300))
    heard: list[tuple[str, int, int, str]] = []

    tokenizer = tokenizer_for(run, tmp_path, lambda *told: heard.append(told))
    prepare(run, tmp_path, tokenizer, lambda *told: heard.append(told))

    assert [told for told in heard if told[1] == told[2]] == [
        ("tokenizer", 100, 100, "bytes"),
        ("data", 100, 100, "bytes"),
    ]


def test_a_run_finds_its_tokenizer_wherever_it_comes_from(tmp_path: Path) -> None:
    make.prepared(tmp_path, b"some text, and some more")
    lone = make.llama_folder(tmp_path / "lone") / "tokenizer.json"
    sources = {
        "train": TokenizerSource(type="train", vocab_size=262),
        "bytes": TokenizerSource(type="bytes"),
        "file": TokenizerSource(type="file", path=lone),
    }

    for name, source in sources.items():
        made = tokenizer_for(make.run(tokenizer=source), tmp_path, make.silent)
        assert load_tokenizer(tmp_path).encode("some text") == made.encode("some text")
        assert made.vocab_size == {"train": 262, "bytes": 260, "file": 307}[name] or name == "file"


def test_a_resumed_run_keeps_the_tokenizer_of_its_checkpoint(tmp_path: Path) -> None:
    make.prepared(tmp_path, b"some text, and some more")
    kept = Tokenizer.train(["other words altogether"] * 3, 270)
    kept.save(tmp_path / "checkpoint" / "tokenizer")
    run = make.run(tokenizer=TokenizerSource(type="train", vocab_size=270))

    resumed = tokenizer_for(run.model_copy(update={"resume": Path("checkpoint")}), tmp_path, make.silent)

    assert resumed.encode("other words") == kept.encode("other words")
    assert tokenizer_for(run, tmp_path, make.silent).encode("other words") != kept.encode("other words")


def test_a_run_that_goes_on_another_day_makes_the_same_rows(tmp_path: Path) -> None:
    template = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    now = datetime(2020, 1, 2, tzinfo=UTC)
    asked = make.run(format="chat", now=now).model_dump()
    run = RunConfig.model_validate(asked | {"model": None, "base": "base", "tokenizer": {"type": "base"}})
    make.llama_folder(tmp_path / "base", template=template)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-0.jsonl").write_bytes(make.jsonl([make.chat_line("a", "b")]))
    tokenizer_for(run, tmp_path, make.silent).save(tmp_path / "kept" / "tokenizer")

    for again in (run, run.model_copy(update={"resume": Path("kept")})):
        tokenizer = tokenizer_for(again, tmp_path, make.silent)
        rows = prepare(again, tmp_path, tokenizer, make.silent).train
        assert tokenizer.decode(rows.row(0).tokens.tolist()).startswith("2020a")


def test_a_base_that_names_no_end_is_refused(tmp_path: Path) -> None:
    folder = make.llama_folder(tmp_path / "base")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    run = make.run().model_copy(update={"base": Path("base"), "tokenizer": TokenizerSource(type="base")})

    with pytest.raises(InvalidTokenizer, match="eos_token"):
        tokenizer_for(run, tmp_path, make.silent)


def test_an_order_is_the_same_on_every_machine() -> None:
    # Philox4x64-10 with this key; its raw bits are what NumPy promises to keep, and these are their ranks.
    bits = np.random.Philox(key=np.array([1, 0], dtype=np.uint64)).random_raw(5)

    assert shuffled(5, 1, 0).tolist() == sorted(range(5), key=lambda place: int(bits[place]))
    assert shuffled(5, 1, 0).tolist() != shuffled(5, 1, 1).tolist()
    assert sorted(shuffled(1000, 2**62, 7)) == list(range(1000))


def test_questions_that_are_all_too_long_end_the_run_in_words(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    row = {"question": "q" * 20, "choices": ["a", "b"], "answer": 0}
    (tmp_path / "data" / "questions.jsonl").write_bytes(make.jsonl([row, row]))

    with pytest.raises(InvalidData, match=r"questions.jsonl: of 2 .* none can be asked: .*data.seq_len=16"):
        make.prepared(tmp_path, b"some text", seq_len=16, evaluation=Path("data/questions.jsonl"))


def test_a_bad_question_ends_the_run_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    row = {"question": "q", "choices": ["a", "b"], "answer": 0}
    (tmp_path / "data" / "questions.jsonl").write_bytes(make.jsonl([row, row | {"answer": 2}]))

    with pytest.raises(InvalidData, match=r"questions.jsonl: line 2, .*answer"):
        make.prepared(tmp_path, b"some text", seq_len=16, evaluation=Path("data/questions.jsonl"))
