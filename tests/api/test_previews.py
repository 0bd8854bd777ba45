"""How a base would read a file, asked over HTTP: counts with lines, ids and masks, and templates that do not end."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator

import pytest
from sqlalchemy import delete
from typer.testing import CliRunner

from api.cli import app
from core import catalog, examining
from core.models import Model
from tests.api import driving
from tests.api.test_requests import envelope
from tests.cases import bases

BASE = "previews-base"
TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]}


@pytest.fixture(scope="module", autouse=True)
def base(live) -> Iterator[None]:
    """The model that reads the files; afterwards the API has none again."""
    models = live.services.settings.models
    bases.write(models / BASE)
    yield
    shutil.rmtree(models)
    with live.services.db.session() as session:
        session.execute(delete(Model).where(Model.id.startswith("previews-")))


def lines(*values: object) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def test_a_preview_shows_ids_text_and_what_is_learned(http):
    file = driving.upload(http, lines(TALK, TALK), "chat.jsonl")["id"]

    answer = http.post(f"/v1/files/{file}/preview", json={"base": BASE, "limit": 1})

    assert answer.status_code == 200, answer.text
    (shown,) = answer.json()["data"]
    # The vocabulary has no template, so roles are words: by hand, from the pieces that the builder puts into it.
    assert shown["text"] == "<s> User: a\nAssistant: bc</s> \n"
    assert [span["text"] for span in shown["spans"] if span["trained"]] == [" bc</s>"]
    assert (shown["line"], shown["fate"], shown["tokens"]) == (1, "kept", len(shown["ids"]))
    assert shown["ids"][0] == 1
    learned = [identity for identity, trained in zip(shown["ids"], shown["mask"], strict=True) if trained]
    assert learned[-1] == 2
    assert shown["trainable_tokens"] == len(learned) == sum(shown["mask"])


def test_a_report_counts_what_is_kept_cut_and_left_out_with_the_lines(http):
    long = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b " * 200}]}
    late = {"messages": [{"role": "user", "content": "a " * 200}, {"role": "assistant", "content": "b"}]}
    file = driving.upload(http, lines(TALK, long, TALK, late), "chat.jsonl")["id"]

    def report(**under: object) -> dict[str, object]:
        answer = http.get(f"/v1/files/{file}/report", params={"base": BASE, "seq_len": 64, **under})
        assert answer.status_code == 200, answer.text
        return answer.json()

    cut, dropped, refused = (report(overlong=policy) for policy in ("truncate", "drop", "error"))
    assert (cut["examples"], cut["examined"], cut["kept"], cut["complete"]) == (4, 4, 3, True)
    assert [each["line"] for each in cut["truncated"]["lines"]] == [2]
    assert [each["line"] for each in cut["untrainable"]["lines"]] == [4]
    assert cut["problem"] is None
    assert (dropped["kept"], [each["line"] for each in dropped["dropped"]["lines"]]) == (2, [2, 4])
    assert dropped["problem"] is None
    assert "seq_len=64" in refused["problem"]
    assert f"data.seq_len to {refused['longest']['tokens'] - 1} or data.overlong" in refused["problem"]
    # Two short conversations share one row.
    assert dropped["rows"] == 1
    assert dropped["filled"] == pytest.approx(dropped["tokens"] / 64, abs=1e-4)


def test_text_and_pairs_can_be_seen_too(http):
    text = driving.upload(http, b"the hello the hello", "book.txt")["id"]
    (shown,) = http.post(f"/v1/files/{text}/preview", json={"base": BASE}).json()["data"]
    assert shown["text"] == "<s> the hello the hello</s>"
    assert shown["mask"] == [0] + [1] * (shown["tokens"] - 1)
    report = http.get(f"/v1/files/{text}/report", params={"base": BASE, "seq_len": 4}).json()
    assert (report["kept"], report["trainable_tokens"]) == (1, shown["tokens"] - 1)
    pair = {"prompt": [{"role": "user", "content": "a"}], "chosen": "yes", "rejected": "no"}
    pairs = driving.upload(http, lines(pair), "pairs.jsonl")["id"]
    (shown,) = http.post(f"/v1/files/{pairs}/preview", json={"base": BASE}).json()["data"]
    assert [side["spans"][1]["text"] for side in (shown, shown["rejected"])] == [" yes</s>", " no</s>"]


def test_questions_are_reported_and_each_choice_is_seen(http, live, key, monkeypatch):
    asked = [{"question": "the hello:", "choices": ["yes", "no " * 60], "answer": 0}, {"messages": TALK["messages"][:1],
             "choices": ["a", "bc"], "answer": 1}]  # fmt: skip
    file = driving.upload(http, lines(*asked), "questions.jsonl")["id"]
    report = http.get(f"/v1/files/{file}/report", params={"base": BASE, "seq_len": 32}).json()
    assert (report["format"], report["examples"], report["kept"], report["problem"]) == ("choice", 2, 1, None)
    assert [each["line"] for each in report["dropped"]["lines"]] == [1]
    first, second = http.post(f"/v1/files/{file}/preview", json={"base": BASE, "seq_len": 32}).json()["data"]
    assert (first["line"], first["fate"], second["fate"], second["answer"]) == (1, "overlong", "kept", 1)
    assert [each["spans"][-1] for each in second["choices"]] == [
        {"trained": True, "text": " a"}, {"trained": True, "text": " bc"},
    ]  # fmt: skip
    assert second["text"] == second["choices"][1]["text"] == "<s> User: a\nAssistant: bc"
    monkeypatch.setenv("TRAINSHED_URL", live.url)
    monkeypatch.setenv("TRAINSHED_API_KEY", key)
    shown = CliRunner().invoke(app, ["files", "preview", file, "--base", BASE, "--line", "2"])
    assert shown.stdout.count("line 2, kept") == 2
    assert shown.stdout.index("[ a]") < shown.stdout.index("the right choice") < shown.stdout.index("[ bc]")


def test_unasked_a_report_reads_rows_as_long_as_a_jobs(http, live):
    """By docs/data-formats.md: 1024 tokens, and twice as many where both answers of a pair share a row."""
    folder = live.services.settings.models / "previews-long"
    bases.write(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    pair = {"prompt": [{"role": "user", "content": "a"}], "chosen": "yes", "rejected": "no"}
    files = [driving.upload(http, lines(each), f"{n}.jsonl")["id"] for n, each in enumerate((TALK, pair))]

    reports = [http.get(f"/v1/files/{file}/report", params={"base": "previews-long"}).json() for file in files]

    assert [report["seq_len"] for report in reports] == [1024, 2048]


def test_what_a_template_refuses_is_shown_and_counted(http, live):
    strict = (
        "{{ raise_exception('no tools here' ~ ' and more' * 1000) if messages|length > 2 }}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    bases.write(live.services.settings.models / "previews-strict", template=strict)
    more = {"messages": [*TALK["messages"], *TALK["messages"]]}
    file = driving.upload(http, lines(TALK, more), "chat.jsonl")["id"]
    report = http.get(f"/v1/files/{file}/report", params={"base": "previews-strict"}).json()
    (refused,) = report["refused"]["lines"]
    assert refused["line"] == 2
    assert len(refused["message"]) == 500
    assert "no tools here" in report["problem"]
    shown = http.post(f"/v1/files/{file}/preview", json={"base": "previews-strict", "first_line": 2}).json()["data"]
    assert [(each["line"], each["fate"]) for each in shown] == [(2, "refused")]


@pytest.mark.parametrize(
    ("content", "ask", "status", "param"),
    [
        pytest.param(lines(TALK), {"base": "nobody"}, 404, "base", id="no such model"),
        pytest.param(lines(TALK), {"base": BASE, "seq_len": 4096}, 400, "seq_len", id="longer than the model"),
        pytest.param(lines(TALK), {"base": BASE, "limit": 0}, 400, "limit", id="nothing asked for"),
        pytest.param(lines(TALK), {}, 400, "base", id="no base"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_words(http, content, ask, status, param):
    file = driving.upload(http, content, "chat.jsonl")["id"]
    assert envelope(http.post(f"/v1/files/{file}/preview", json=ask), status)["param"] == param


def test_a_template_that_does_not_end_refuses_each_conversation(http, live):
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    bases.write(live.services.settings.models / "previews-endless", template=endless)
    file = driving.upload(http, lines(TALK), "chat.jsonl")["id"]
    answer = http.post(f"/v1/files/{file}/preview", json={"base": "previews-endless"})
    (example,) = answer.json()["data"]
    assert example["fate"] == "refused"
    assert "does not end" in example["message"]


def test_an_examination_that_does_not_end_is_ended(http, monkeypatch):
    file = driving.upload(http, lines(TALK), "chat.jsonl")["id"]
    monkeypatch.setattr(examining, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(examining, "EXAMINE", (sys.executable, "-c", "import time; time.sleep(600)"))
    error = envelope(http.post(f"/v1/files/{file}/preview", json={"base": BASE}), 503)
    assert "come to an end" in error["message"]


def test_an_examination_that_dies_is_not_blamed_on_the_clock(http, monkeypatch):
    file = driving.upload(http, lines(TALK), "chat.jsonl")["id"]
    monkeypatch.setattr(examining, "EXAMINE", (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
    error = envelope(http.post(f"/v1/files/{file}/preview", json={"base": BASE}), 503)
    assert "signal 9" in error["message"]
    assert "template" not in error["message"]


def test_the_command_line_asks_as_the_api_does(http, live, key, monkeypatch):
    monkeypatch.setenv("TRAINSHED_URL", live.url)
    monkeypatch.setenv("TRAINSHED_API_KEY", key)
    file = driving.upload(http, lines(TALK, TALK), "chat.jsonl")["id"]
    how = ["--base", BASE, "--seq-len", "64", "--overlong", "drop", "--template", "plain"]

    report = CliRunner().invoke(app, ["files", "report", file, *how, "--no-packing", "--json"])
    shown = CliRunner().invoke(app, ["files", "preview", file, *how, "--json"])

    told = json.loads(report.stdout)
    assert [told[name] for name in ("seq_len", "overlong", "packing", "template")] == [64, "drop", False, "plain"]
    # Unpacked, each of the two has a row of its own.
    assert told["rows"] == 2
    assert (json.loads(shown.stdout)["seq_len"], len(json.loads(shown.stdout)["data"])) == (64, 2)


def test_the_result_of_a_job_reads_a_file_with_the_tokenizer_that_it_left_in_storage(http, live):
    file = driving.upload(http, lines(TALK), "chat.jsonl")["id"]
    folder = live.services.settings.models / BASE
    live.services.storage.put_tree("results/previews", folder)
    with live.services.db.session() as session:
        shape = catalog.inspect(folder).model_dump(mode="json")
        session.add(Model(id="previews-result", project_id=None, source="storage:results/previews", shape=shape))

    shown = [http.post(f"/v1/files/{file}/preview", json={"base": base}).json() for base in (BASE, "previews-result")]

    assert shown[0]["data"] == shown[1]["data"]
    assert shown[0]["data"][0]["ids"]
