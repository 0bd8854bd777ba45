"""Every error of every line, with its place; and the inputs that other trainers got wrong."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.data import format
from engine.data.format import (
    MAX_LINE_BYTES,
    PIECE_CHARACTERS,
    Chat,
    Choice,
    Completion,
    InvalidData,
    Preference,
    Report,
    Text,
    conversation,
    examples,
    read,
    validate,
)
from tests.engine.data import make

GOOD = '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}'


def judge(content: bytes | str, name: str = "train.jsonl", **options: object) -> Report:
    data = content.encode() if isinstance(content, str) else content
    return validate([data], name_hint=name, **options)  # type: ignore[arg-type]


def chat(*messages: str) -> str:
    return '{"messages":[' + ",".join(messages) + "]}"


USER = '{"role":"user","content":"a"}'
ASSISTANT = '{"role":"assistant","content":"b"}'


def answer(rest: str) -> str:
    """A conversation whose assistant message has `rest` after its role."""
    return chat(USER, '{"role":"assistant",' + rest + "}")


CALL = '"content":"","tool_calls":'

# A ¶ stands where the column must point to; without one, the whole line is meant.
BAD_LINES = [
    pytest.param('{"messages":[{"role":"user",¶content:"hi"}]}', None, "valid JSON", id="key without quotes"),
    pytest.param(GOOD[:-1] + ",¶}", None, "valid JSON", id="trailing comma"),
    pytest.param(GOOD + "¶" + GOOD, None, "one whole JSON object", id="two objects on a line"),
    pytest.param('¶["a"]', None, "a list", id="a list"),
    pytest.param('¶"a"', None, "a string", id="a string"),
    pytest.param("¶{}", None, '"messages"', id="no field"),
    pytest.param('¶{"id":1}', None, '"id"', id="no field that says what it is"),
    pytest.param('{"messages":¶[]}', "messages", "at least one", id="no messages"),
    pytest.param('{"messages":[¶5]}', "messages[0]", "an object", id="a message that is a number"),
    pytest.param('{"messages":¶[' + USER + "]}", "messages", "no assistant", id="no assistant"),
    pytest.param(chat(USER, ASSISTANT, "¶" + USER), "messages[2]", "assistant", id="no assistant last"),
    pytest.param(answer('"content":"b","weight":¶0.5'), "messages[1].weight", "weight", id="half a weight"),
    pytest.param(answer('"content":"b","weight":¶true'), "messages[1].weight", "weight", id="true as weight"),
    pytest.param(answer('"content":"b","weight":¶2'), "messages[1].weight", "weight", id="weight 2"),
    pytest.param(answer('"content":"b","wieght":¶0'), "messages[1].wieght", "no field", id="misspelt weight"),
    pytest.param(
        '{"messages":¶[{"role":"assistant","content":"b","weight":0}]}', "messages", "weight 0", id="nothing trained"
    ),
    pytest.param(
        chat('{"role":"user","content":"a","weight":¶1}', ASSISTANT), "messages[0].weight", "weight", id="user's weight"
    ),
    pytest.param(chat('{"role":¶"bot","content":"a"}', ASSISTANT), "messages[0].role", "bot", id="unknown role"),
    pytest.param(chat('{"role":¶{},"content":"a"}', ASSISTANT), "messages[0].role", "{}", id="role is an object"),
    pytest.param(chat('¶{"content":"a"}', ASSISTANT), "messages[0].role", "missing", id="no role"),
    pytest.param(answer('"content":¶null'), "messages[1].content", "null", id="null without tool_calls"),
    pytest.param(chat(USER, '¶{"role":"assistant"}'), "messages[1].content", "missing", id="no content"),
    pytest.param(answer('"content":¶" "'), "messages[1].content", "empty", id="empty answer"),
    pytest.param(
        chat('{"role":"user","content":¶7}', ASSISTANT), "messages[0].content", "a number", id="content is a number"
    ),
    pytest.param(
        chat('{"role":"user","content":[¶{"type":"image_url"}]}', ASSISTANT),
        "messages[0].content[0]", "image_url", id="an image",
    ),
    pytest.param(
        answer(CALL + '[{"function":{"name":"f","arguments":¶"{"}}]'),
        "messages[1].tool_calls[0].function.arguments", "JSON object", id="arguments cut short",
    ),
    pytest.param(
        answer(CALL + r'[{"function":{"name":"f","arguments":¶"{\"n\": {\"a\": 1, \"a\": 2}}"}}]'),
        "messages[1].tool_calls[0].function.arguments", "in n of the arguments, duplicate", id="duplicate in arguments",
    ),
    pytest.param(
        answer(CALL + r'[{"function":{"name":"f","arguments":¶"{\"n\": NaN}"}}]'),
        "messages[1].tool_calls[0].function.arguments", "NaN is not JSON", id="NaN in arguments",
    ),
    pytest.param(
        answer(CALL + r'[{"function":{"name":"f","arguments":¶"{\"n\": \"\\ud83d\"}"}}]'),
        "messages[1].tool_calls[0].function.arguments", "surrogate", id="half a surrogate pair in arguments",
    ),
    pytest.param(
        answer(CALL + '[¶{"name":"f"}]'), "messages[1].tool_calls[0]", "function", id="a tool call without function"
    ),
    pytest.param(
        chat('{"role":"user","content":"a","tool_calls":¶[{"function":{"name":"f"}}]}', ASSISTANT),
        "messages[0].tool_calls", "assistant", id="a user calls tools",
    ),
    pytest.param('¶{"prompt":"a"}', "completion", "missing", id="prompt without completion"),
    pytest.param('{"prompt":¶1,"completion":"b"}', "prompt", "a string", id="prompt is a number"),
    pytest.param('{"prompt":"a","completion":¶" "}', "completion", "nothing to learn", id="empty completion"),
    pytest.param(
        '{"prompt":¶[' + USER + '],"completion":"b"}', "prompt", 'one list, "messages"', id="prompt is a conversation"
    ),
    pytest.param('¶{"instruction":"a","output":"b"}', None, '"completion"', id="Alpaca"),
    pytest.param('{"text":¶["a"]}', "text", "a string", id="text is a list"),
    pytest.param('{"text":"a",¶"text":"b"}', "text", "duplicate", id="duplicate key"),
    pytest.param(answer('"content":"b",¶"content":"c"'), "messages[1].content", "duplicate", id="duplicate key inside"),
    pytest.param('{"text":¶"x\\ud83d"}', "text", "surrogate", id="half a surrogate pair"),
    pytest.param('{"text":"a","n":¶NaN}', "n", "NaN", id="NaN"),
    pytest.param('{"text":"a","n":[0,¶-Infinity]}', "n[1]", "-Infinity is not JSON", id="an infinity"),
    pytest.param('{"text":"a","n":¶1e999}', "n", "beyond", id="a number that no double holds"),
    pytest.param('{"text":"a","n":' + "9" * 5000 + "}", None, "as a string", id="a number of 5000 digits"),
    pytest.param('{"text":"a¶\tb"}', None, "write \\t", id="a tab in a string"),
    pytest.param('{"text":"a¶\0b"}', None, "U+0000", id="a NUL in a string"),
    pytest.param('{"text":"C:¶\\Users"}', None, "as two", id="a lone backslash"),
    pytest.param("{¶'text': 'a'}", None, "double quotes", id="single quotes"),
    pytest.param('{"text":¶"a', None, "ends before", id="cut within a string"),
    pytest.param('{"text":"a",¶', None, "ends before", id="cut within an object"),
    pytest.param("¶\u00a0", None, "U+00A0", id="a space that JSON does not know"),
    pytest.param("¶\x1a", None, "U+001A", id="the end that DOS wrote"),
    pytest.param('{"text":' + "[" * 100_000 + "}", None, "nested", id="nested without end"),
    pytest.param('¶{"conversations":[]}', None, '"messages"', id="ShareGPT"),
    pytest.param('¶{"chosen":"a","rejected":"b"}', "prompt", "missing", id="a pair without a prompt"),
    pytest.param('¶{"prompt":"q","chosen":"a"}', "rejected", "both answers", id="a pair without its half"),
    pytest.param('{"prompt":¶5,"chosen":"a","rejected":"b"}', "prompt", "a number", id="a pair's prompt is a number"),
    pytest.param('{"prompt":"q","chosen":"a","rejected":¶" "}', "rejected", "empty", id="an empty half"),
    pytest.param('{"prompt":"q","chosen":"a","rejected":¶"a"}', "rejected", "the same", id="nothing to prefer"),
    pytest.param('{"input":¶[],"preferred_output":"a","non_preferred_output":"b"}', "input", "prompt", id="bare input"),
    pytest.param(
        '{"input":{"messages":[' + USER + ']},"preferred_output":[' + ASSISTANT + '],"non_preferred_output":¶[]}',
        "non_preferred_output", "at least one", id="no answer",
    ),
    pytest.param(
        '{"input":{"messages":[' + USER + '],"tools":[¶5]},"preferred_output":"a","non_preferred_output":"b"}',
        "input.tools[0]", "function", id="a pair's tool",
    ),
    pytest.param(
        '{"prompt":"q","chosen":[' + ASSISTANT + '],"rejected":[{"role":¶"user","content":"c"},' + ASSISTANT + "]}",
        "rejected[0].role", "put it into the prompt", id="an answer that asks",
    ),
    pytest.param(
        '{"prompt":"q","chosen":[' + ASSISTANT + '],"rejected":[{"role":"assistant","content":¶""}]}',
        "rejected[0].content", "empty", id="a message of an answer is empty",
    ),
    pytest.param(
        '¶{"chosen":[' + ASSISTANT + '],"rejected":[' + USER + "," + ASSISTANT + "]}",
        "prompt", "begin differently", id="answers that share nothing",
    ),
    pytest.param(
        '{"chosen":[' + USER + "," + ASSISTANT + '],"rejected":¶[' + USER + "," + ASSISTANT + "]}",
        "rejected", "the same", id="the same conversation twice",
    ),
    pytest.param(
        '{"question":"q","choices":["a","b"],"answer":¶2}', "answer", "from 0, to 1", id="an answer beyond the choices"
    ),
    pytest.param('{"question":"q","choices":["a","b"],"answer":¶-1}', "answer", "from 0", id="an answer below 0"),
    pytest.param('{"question":"q","choices":["a","b"],"answer":¶true}', "answer", "the number", id="true as answer"),
    pytest.param('{"question":"q","choices":["a","b"],"answer":¶"a"}', "answer", "a string", id="the answer's text"),
    pytest.param('¶{"question":"q","choices":["a","b"]}', "answer", "missing", id="choices without an answer"),
    pytest.param('{"question":"q","choices":¶["a"],"answer":0}', "choices", "two texts", id="a single choice"),
    pytest.param('{"question":"q","choices":¶{"text":[]},"answer":0}', "choices", "an object", id="choices in columns"),
    pytest.param(
        '{"question":"q","choices":["a","b",¶" a"],"answer":0}', "choices[2]", "choices[0] again", id="a choice twice"
    ),
    pytest.param('{"question":"q","choices":["a",¶" "],"answer":0}', "choices[1]", "empty", id="an empty choice"),
    pytest.param('{"question":"q","choices":["a",¶5],"answer":0}', "choices[1]", "a number", id="a number as choice"),
    pytest.param('{"question":¶"","choices":["a","b"],"answer":0}', "question", "empty", id="an empty question"),
    pytest.param('{"question":¶5,"choices":["a","b"],"answer":0}', "question", "a number", id="a number as question"),
    pytest.param('¶{"choices":["a","b"],"answer":0}', "question", "either", id="choices without a question"),
    pytest.param(
        '{"question":¶"q","messages":[' + USER + '],"choices":["a","b"],"answer":0}',
        "question", "not both", id="a question twice",
    ),
    pytest.param(
        '{"messages":[' + USER + ",¶" + ASSISTANT + '],"choices":["a","b"],"answer":0}',
        "messages[1]", "said next", id="a question that is answered",
    ),
    pytest.param(
        '{"messages":[{"role":¶"bot","content":"a"}],"choices":["a","b"],"answer":0}',
        "messages[0].role", "bot", id="a question from nobody",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("line", "field", "says"), BAD_LINES)
def test_a_bad_line_is_named_with_its_place_and_what_to_do(line: str, field: str | None, says: str) -> None:
    column = line.index("¶") + 1 if "¶" in line else None
    report = judge(line.replace("¶", ""))

    assert [(each.line, each.column, each.field) for each in report.errors] == [(1, column, field)]
    assert says in report.errors[0].message
    assert report.examples == 0


def test_all_errors_are_found_not_just_the_first() -> None:
    report = judge("\n".join([GOOD, "{", GOOD, '{"text":"a"}', "", GOOD + ","]))

    assert [each.line for each in report.errors] == [2, 4, 6]
    assert (report.format, report.examples, report.empty_lines) == ("chat", 2, 1)


def test_errors_stop_at_the_cap() -> None:
    report = validate((b"{\n" for _ in range(10**9)), name_hint="a.jsonl", max_errors=7)

    assert [each.line for each in report.errors] == [1, 2, 3, 4, 5, 6, 7]


def test_no_line_however_broken_makes_validation_fall_over() -> None:
    draw = random.Random(1)
    whole = (GOOD + "\n" + answer(CALL + '[{"function":{"name":"f","arguments":"{}"}}]') + "\n").encode()
    for _ in range(1500):
        broken = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(broken))
            broken[at : at + draw.randint(0, 3)] = bytes(draw.choices(b'{}[]",:\\\xff\x00\n 1tn', k=draw.randint(0, 3)))
        report = judge(bytes(broken), draw.choice(["a.jsonl", "a.txt", "upload"]))

        assert json.dumps(report.to_dict())
        assert all(error.line >= 0 and (error.column or 1) >= 1 for error in report.errors)
        if report.ok and report.format is not None:
            assert len([each for each in examples([bytes(broken)], report.format)]) >= report.examples


def test_a_report_says_in_json_where_the_errors_are() -> None:
    told = json.loads(json.dumps(judge('{"text":5}').to_dict()))

    assert told["errors"] == [
        {"line": 1, "column": 9, "field": "text", "message": "text must be a string, and this is a number"}
    ]


ACCEPTED = [
    pytest.param(b"\xef\xbb\xbf" + GOOD.encode() + b"\n" + GOOD.encode(), "chat", 2, 4, id="byte order mark"),
    pytest.param(f"{GOOD}\r\n{GOOD}\r\n".encode(), "chat", 2, 4, id="CRLF"),
    pytest.param('{"text":"a\u2028b\u2029c\u0085d"}\n'.encode(), "text", 1, 7, id="line separators within a string"),
    pytest.param(b'{"text":"\\ud83d\\ude00"}', "text", 1, 1, id="a whole surrogate pair"),
    pytest.param(b'\n \n{"prompt":"","completion":"b"}\n\n', "completion", 1, 1, id="blank lines, empty prompt"),
    pytest.param(
        chat('{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}', ASSISTANT).encode(),
        "chat", 1, 3, id="content in parts",
    ),
    pytest.param(
        chat(
            USER,
            '{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function",'
            '"function":{"name":"f","arguments":"{}"}}]}',
            '{"role":"tool","tool_call_id":"c","content":"4"}',
            ASSISTANT,
        ).encode(),
        "chat", 1, 3, id="null content beside tool_calls",
    ),
    pytest.param(
        chat(
            '{"role":"user","content":"a","tool_calls":[]}',
            '{"role":"assistant","content":"b","refusal":"","annotations":[],"audio":null,"function_call":null}',
        ).encode(),
        "chat", 1, 2, id="what an answer of the API has and says nothing",
    ),
    pytest.param(
        f"{GOOD}\n\ufeff{GOOD}\n\ufeff\n".encode(), "chat", 2, 4, id="files with a byte order mark, joined"
    ),
]  # fmt: skip


@pytest.mark.parametrize(("content", "kind", "count", "characters"), ACCEPTED)
def test_what_other_trainers_trip_over_is_read_whole(content: bytes, kind: str, count: int, characters: int) -> None:
    report = judge(content)

    assert (report.errors, report.format, report.examples, report.characters) == ((), kind, count, characters)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64])
def test_how_the_bytes_arrive_changes_nothing(size: int) -> None:
    content = '\ufeff\r\n{"text":"é\u2028😀"}\r\n{"text":7}\n\n{"text":"b"}'.encode() + b"\n\xff\n{"
    pieces = [content[start : start + size] for start in range(0, len(content), size)]

    assert validate(pieces, name_hint="a.jsonl") == validate([content], name_hint="a.jsonl")
    assert [error.line for error in validate(pieces).errors] == [3, 6, 7]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_plain_text_is_one_document_however_it_arrives(size: int) -> None:
    content = "\ufeffé😀 one\r\ntwo\r\n\r\nthree".encode()
    pieces = [content[start : start + size] for start in range(0, len(content), size)]

    assert list(examples(pieces, "text")) == [Text(1, "é😀 one\ntwo\n\nthree")]


def test_bytes_that_are_not_utf8_are_placed_in_plain_text() -> None:
    report = judge(b"one\ntw\xff\xfeo\nthree\x00", "a.txt")

    assert [(each.line, each.column) for each in report.errors] == [(2, 3), (2, 3), (3, 6)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(GOOD.encode("utf-16"), "UTF-16", id="UTF-16"),
        pytest.param(GOOD.encode("utf-16-le"), "UTF-16", id="UTF-16 without a mark, little end first"),
        pytest.param(GOOD.encode("utf-16-be"), "UTF-16", id="UTF-16 without a mark, big end first"),
        pytest.param(GOOD.encode("utf-32"), "UTF-32", id="UTF-32"),
        pytest.param(GOOD.encode("utf-32-be"), "UTF-32", id="UTF-32 without a mark, big end first"),
        pytest.param(b"PAR1\x15\x04", "Parquet", id="Parquet"),
        pytest.param(gzip.compress(GOOD.encode()), "gzip", id="gzip"),
        pytest.param(lzma.compress(GOOD.encode()), "xz", id="xz"),
        pytest.param(bz2.compress(GOOD.encode()), "bzip2", id="bzip2"),
        pytest.param(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "PDF", id="PDF"),
        pytest.param(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git lfs pull", id="LFS pointer"
        ),
        pytest.param(b"", "empty", id="empty"),
        pytest.param(b"\n \n\t\n", "empty", id="blank"),
        pytest.param(b"\xef\xbb\xbf", "empty", id="only a byte order mark"),
        pytest.param(b'{"text":""}\n{"text":"  "}', "empty", id="empty documents only"),
    ],
)
def test_a_file_without_examples_is_refused_in_words(content: bytes, says: str) -> None:
    for name in ("a.jsonl", "a.txt", "upload"):
        report = judge(content, name)

        assert len(report.errors) == 1
        assert says in report.errors[0].message


def test_an_empty_document_among_others_is_skipped_with_a_warning() -> None:
    report = judge('{"text":"a"}\n{"text":""}')

    assert (report.ok, report.examples, [each.line for each in report.warnings]) == (True, 1, [2])


def test_fields_that_nothing_reads_are_told_once_with_their_count() -> None:
    report = judge(f"{GOOD}\n" + GOOD[:-1] + ',"id":1}\n' + GOOD[:-1] + ',"id":2}')

    assert report.ok
    assert [(each.field, each.line) for each in report.warnings] == [("id", 2)]
    assert "2 line" in report.warnings[0].message


@pytest.mark.parametrize("name", ["a.txt", "upload", "a.jsonl"])
def test_json_lines_are_told_by_content_whatever_the_name(name: str) -> None:
    assert judge(f"{GOOD}\n", name).format == "chat"


def test_a_name_that_promises_json_makes_text_an_error() -> None:
    assert judge("hello", "a.jsonl").errors[0].line == 1
    assert judge("hello", "a.txt").format == "text"
    assert judge("hello", "a.txt").plain_text
    assert not judge('{"text":"hello"}', "a.txt").plain_text
    assert judge("{hello}", "a.txt").format == "text"
    assert judge("hello", "upload").format == "text"


@pytest.mark.parametrize("name", ["a.csv", "A.TSV", "a.parquet"])
def test_a_table_is_not_taken_for_text(name: str) -> None:
    assert "JSON object" in judge("prompt,completion\na,b\n", name).errors[0].message
    assert judge(GOOD, name).format == "chat"


def test_text_that_begins_like_json_is_told_to_be_read_as_text() -> None:
    assert [each.line for each in judge('{"messages": [\n', "a.txt").warnings] == [1]
    assert judge("see {this}", "a.txt").warnings == ()


def test_what_was_accepted_is_read_the_same_under_another_name(tmp_path: Path) -> None:
    for content, name in [(b"{hello}\nthere", "a.txt"), (b'{"text":"hi"}', "a.txt"), (b"[1] see below", "notes.md")]:
        assert judge(content, name).format == "text"
        path = tmp_path / "train-0.jsonl"
        path.write_bytes(content)

        assert "".join(example.text for example in read(path, "text") if isinstance(example, Text))


def test_a_declared_format_is_held_against_each_line() -> None:
    report = judge(f'{GOOD}\n{{"text":"a"}}', format="completion")

    assert [each.line for each in report.errors] == [1, 2]
    assert "completion" in report.errors[0].message


def test_reading_gives_the_messages_that_templates_expect() -> None:
    line = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "w"}, {"type": "text", "text": "hy"}]},
            {"role": "assistant", "function_call": {"name": "f", "arguments": '{"n": 1}'}, "weight": 0},
            {"role": "function", "name": "f", "content": "4"},
            {"role": "assistant", "content": "ok", "weight": 1, "refusal": None},
        ],
        "functions": [{"name": "f", "parameters": {}}],
    }
    call = {"type": "function", "function": {"name": "f", "arguments": {"n": 1}}}

    assert list(examples([json.dumps(line).encode()], "chat")) == [
        Chat(
            1,
            (
                {"role": "user", "content": "why"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "4", "name": "f"},
                {"role": "assistant", "content": "ok"},
            ),
            (False, False, False, True),
            ({"type": "function", "function": {"name": "f", "parameters": {}}},),
        )
    ]


SYSTEM = {"role": "system", "content": "s"}
ASKS = {"role": "user", "content": "q"}
BETTER, WORSE = ({"role": "assistant", "content": text} for text in "ab")


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            {"input": {"messages": [SYSTEM, ASKS]}, "preferred_output": [BETTER], "non_preferred_output": [WORSE]},
            id="as OpenAI writes it",
        ),
        pytest.param({"prompt": [SYSTEM, ASKS], "chosen": [BETTER], "rejected": [WORSE]}, id="answers alone"),
        pytest.param({"prompt": [SYSTEM, ASKS], "chosen": "a", "rejected": "b"}, id="answers as texts"),
        pytest.param(
            {"prompt": [SYSTEM, ASKS], "chosen": [SYSTEM, ASKS, BETTER], "rejected": [SYSTEM, ASKS, WORSE]},
            id="the prompt three times",
        ),
        pytest.param({"chosen": [SYSTEM, ASKS, BETTER], "rejected": [SYSTEM, ASKS, WORSE]}, id="without a prompt"),
        pytest.param(
            {"prompt": "q", "chosen": [SYSTEM, ASKS, BETTER], "rejected": [SYSTEM, ASKS, WORSE]},
            id="conversations beside a text that they hold",
        ),
    ],
)
def test_a_pair_is_the_same_however_it_is_written(line: object) -> None:
    chosen, rejected = (Chat(1, (SYSTEM, ASKS, answer), (False, False, True)) for answer in (BETTER, WORSE))

    assert list(examples([json.dumps(line).encode()], "preference")) == [Preference(1, chosen, rejected)]


def test_a_pair_of_texts_is_read_as_completions_are() -> None:
    line = b'{"prompt":"q","chosen":"a","rejected":"b"}'

    assert list(examples([line], "preference")) == [Preference(1, Completion(1, "q", "a"), Completion(1, "q", "b"))]


def test_a_question_has_its_choices_and_may_be_a_conversation() -> None:
    lines = [
        {"question": "2 + 2?", "choices": ["3", "4"], "answer": 1, "subject": "sums"},
        {"messages": [SYSTEM, ASKS, BETTER, ASKS], "choices": ["a", "b", "c"], "answer": 0},
    ]
    content = make.jsonl(lines)
    report = judge(content)

    assert (report.format, report.examples, report.characters, report.errors) == ("choice", 2, 15, ())
    assert [finding.field for finding in report.warnings] == ["subject"]
    asked = Chat(2, (SYSTEM, ASKS, BETTER, ASKS), (False,) * 4)
    assert list(examples([content], "choice")) == [
        Choice(1, "2 + 2?", ("3", "4"), 1), Choice(2, asked, ("a", "b", "c"), 0),
    ]  # fmt: skip


def test_what_the_prompt_of_a_pair_answered_is_not_learned() -> None:
    line = {"prompt": [ASKS, BETTER, ASKS], "chosen": "c", "rejected": [{**WORSE, "weight": 0}, BETTER]}
    (pair,) = examples([json.dumps(line).encode()], "preference")

    assert isinstance(pair, Preference)
    assert isinstance(pair.chosen, Chat)
    assert isinstance(pair.rejected, Chat)
    assert pair.chosen.trained == (False, False, False, True)
    assert pair.rejected.trained == (False, False, False, False, True)


def test_reading_stops_at_the_first_bad_line() -> None:
    reading = examples([b'{"prompt":"a","completion":"b"}\n{"prompt":"a"}\n'], "completion")

    assert next(reading) == Completion(1, "a", "b")
    with pytest.raises(InvalidData, match="line 2"):
        next(reading)


def test_a_prompt_may_end_with_a_user() -> None:
    asked = conversation({"messages": [{"role": "user", "content": "hi"}]}, training=False)

    assert asked.messages == ({"role": "user", "content": "hi"},)
    with pytest.raises(InvalidData, match="role is missing"):
        conversation({"messages": [{"content": "hi"}]}, training=False)


def test_a_long_document_comes_in_pieces_that_join_to_it() -> None:
    document = "word and word\n" * (PIECE_CHARACTERS // 4)
    as_text = list(examples([document.encode()], "text"))
    as_json = list(examples([json.dumps({"text": document}).encode()], "text"))

    for pieces in (as_text, as_json):
        assert "".join(piece.text for piece in pieces if isinstance(piece, Text)) == document
        assert [piece.ends for piece in pieces if isinstance(piece, Text)] == [False] * (len(pieces) - 1) + [True]
    assert len(as_text) > 2
    assert judge(document, "a.txt").examples == 1


def test_a_giant_line_is_an_error_of_that_line_alone() -> None:
    giant = b'{"text":"' + b"x" * MAX_LINE_BYTES + b'"}'
    report = validate(iter([b'{"text":"a"}\n', giant, b'\n{"text":"b"}']), name_hint="a.jsonl")

    assert [(each.line, each.column) for each in report.errors] == [(2, None)]
    assert report.examples == 2


@pytest.mark.parametrize(
    ("piece", "name"),
    [
        pytest.param(GOOD.replace('"b"', f'"{"b" * 2000}"').encode() + b"\n", "a.jsonl", id="JSON Lines"),
        pytest.param(b"some words without any line end ", "a.txt", id="one line of text"),
        pytest.param(b'{"text":"x', "a.jsonl", id="one line of JSON"),
    ],
)
def test_memory_stays_flat_however_long_the_file(piece: bytes, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A sixteenth of the real limit, and a file many times that.
    monkeypatch.setattr(format, "MAX_LINE_BYTES", 2**20)
    chunk = piece * (2**17 // len(piece))

    def endless() -> Iterator[bytes]:
        for _ in range(40):
            yield bytes(chunk)

    tracemalloc.start()
    try:
        validate(endless(), name_hint=name)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 4 * 2**20


def test_a_field_that_is_null_does_not_make_a_line_another_kind() -> None:
    # As tables are written whose rows do not all have each column.
    lines = [make.chat_line("q", "a") | {"rejected": None, "chosen": None}, make.chat_line("q", "a")]
    report = validate([make.jsonl(lines)])

    assert (report.format, report.examples, report.errors) == ("chat", 2, ())
