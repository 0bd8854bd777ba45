"""Specs as people write them: read, judged and blamed by line, with nothing sent."""

from __future__ import annotations

import json

import pytest

from api.cli.outcomes import Exit, Fault
from api.cli.sending import local_files, missing, standing_in
from api.cli.specs import Problem, judge, read_spec

YAML = """\
# A comment, as people write them.
kind: finetune
model:
  base: tiny
data:
  train:
    - a.jsonl
    - file-0123456789abcdef01234567
  validation: b.jsonl
training: {lr: 3e-4, steps: 5}
"""
JSON = json.dumps(
    {"kind": "finetune", "model": {"base": "tiny"}, "data": {"train": ["a.jsonl"]}, "training": {"lr": 3e-4}},
    indent="\t",
)


@pytest.fixture
def written(tmp_path):
    def write(text: str, name: str = "job.yaml"):
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        return file

    return write


def test_yaml_and_json_say_the_same(written):
    assert read_spec(written(YAML)).asked["training"] == {"lr": 3e-4, "steps": 5}
    assert read_spec(written(JSON, "job.json")).asked["training"] == {"lr": 3e-4}


@pytest.mark.parametrize(
    ("param", "place"),
    [
        ("kind", "2:1"), ("model.base", "4:3"), ("data.train", "6:3"), ("data.train.1", "8:7"),
        ("training.steps", "10:22"), ("training.colour", "10:1"), ("resources.gpus", "2:1"), (None, "2:1"),
    ],
)  # fmt: skip
def test_a_field_is_found_by_line_and_column_and_a_missing_one_where_it_would_be(written, param, place):
    file = written(YAML)
    assert read_spec(file).place(param) == f"{file}:{place}"


def test_a_field_of_json_is_found_too_tabs_or_not(written):
    file = written(JSON, "job.json")
    line = JSON[: JSON.index('"lr"')].count("\n") + 1
    assert read_spec(file).place("training.lr") == f"{file}:{line}:3"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        pytest.param("job.json", '{"kind": "pretrain",\n}', ":2:1: this is no JSON", id="a comma too many"),
        pytest.param("job.yaml", "kind: pretrain\n  model: a", ":2:8: this is no YAML", id="an indent too many"),
        pytest.param("job.yaml", "kind: a\nmodel: [a\n", ":3:1: this is no YAML", id="a bracket that is open"),
        pytest.param("job.yaml", "kind: a\ndata: {}\nkind: b\n", ":1:1: kind: this stands here twice", id="twice"),
        pytest.param("job.json", '{"data": {"train": [], "train": []}}', "data.train: this stands", id="twice in JSON"),
        pytest.param("job.yaml", "- a\n", "must hold one mapping", id="a list"),
        pytest.param("job.yaml", "", "must hold one mapping", id="nothing"),
        pytest.param("job.json", "[" * 100_000, "can't be read", id="nested without end"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(written, name, text, said):
    with pytest.raises(Fault) as caught:
        read_spec(written(text, name))
    assert said in str(caught.value)
    assert caught.value.code == Exit.USAGE


def test_a_file_that_is_no_utf8_or_names_itself_is_told(tmp_path, written):
    (tmp_path / "job.yaml").write_bytes(b"kind: \xff")
    with pytest.raises(Fault, match="can't be read"):
        read_spec(tmp_path / "job.yaml")
    assert read_spec(written("kind: a\ndata: &a [*a]\n")).place("data.0.0.0").endswith(":2:7")


def test_files_of_this_machine_are_found_wherever_a_spec_may_name_them(written, tmp_path):
    (tmp_path / "a.jsonl").write_text("x")
    spec = read_spec(written(YAML + "tokenizer: {file: tokenizer.json}\n"))
    local = list(local_files(spec))
    assert [(file.param, file.path.name, file.purpose) for file in local] == [
        ("data.train.0", "a.jsonl", "fine-tune"),
        ("data.validation", "b.jsonl", "fine-tune"),
        ("tokenizer.file", "tokenizer.json", "tokenizer"),
    ]
    assert [problem.param for problem in missing(local)] == ["data.validation", "tokenizer.file"]
    stood = standing_in(spec.asked, local)
    assert stood["data"]["train"] == ["file-0", "file-0123456789abcdef01234567"]
    assert spec.asked["data"]["train"][0] == "a.jsonl"


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        pytest.param({}, [], id="a whole job"),
        pytest.param({"colour": 1}, [("colour", "unknown field")], id="an unknown field"),
        pytest.param({"kind": None}, [("kind", "Input should be 'pretrain' or 'finetune'")], id="no kind"),
        pytest.param(
            {"training": {"lr": 11, "stepz": 1}}, [("training.lr", "less than"), ("training.stepz", "unknown")],
            id="two at once",
        ),
        pytest.param({"parallel": {"tensr": 2}}, [("parallel.tensr", "unknown field")], id="deep in one of two things"),
        pytest.param({"data": {"train": "file-0"}}, [("data.train", "must be a list")], id="no list"),
        pytest.param(
            {"kind": "pretrain", "model": {"preset": "gpt-5"}}, [("model.preset", "there are llama-15m")],
            id="no preset of ours",
        ),
    ],
)  # fmt: skip
def test_each_mistake_is_told_where_it_is_in_the_servers_words(change, problems):
    asked = {"kind": "finetune", "model": {"base": "tiny"}, "data": {"train": ["file-0"]}} | change
    found = judge(asked)
    assert [problem.param for problem in found] == [param for param, _ in problems]
    for problem, (_, words) in zip(found, problems, strict=True):
        assert words in problem.message


def test_all_problems_are_told_at_once_and_as_data(written):
    file = written(YAML)
    with pytest.raises(Fault) as caught:
        read_spec(file).refuse([Problem("model.base", "no"), Problem("training.lr", "too large")])
    assert str(caught.value) == f"{file}:4:3: model.base: no\n{file}:10:12: training.lr: too large"
    assert caught.value.detail["param"] == "model.base"
    assert caught.value.detail["errors"][1]["place"] == f"{file}:10:12"
