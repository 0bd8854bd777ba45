"""The `trainshed` command against a real server: what it prints, and the exit code that a script would see."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import pytest
from typer.testing import CliRunner

from api.cli import Exit, app
from core import keys, schema
from core.services import Services
from core.settings import Settings
from tests.api import driving
from tests.api.conftest import Live, running

SPEC = driving.spec("corpus.txt", name="tiny")


@pytest.fixture
def trainshed(live: Live, key: str, tmp_path, monkeypatch):
    """Run a command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINSHED_URL", live.url)
    monkeypatch.setenv("TRAINSHED_API_KEY", key)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, code: Exit = Exit.OK, input: str | None = None) -> str:
        done = CliRunner().invoke(app, arguments, input=input)
        assert done.exit_code == code, done.output
        return done.output if code else done.stdout

    return run


@pytest.fixture
def spec(tmp_path):
    """A spec beside its data."""
    (tmp_path / "corpus.txt").write_bytes(driving.TEXT)
    (tmp_path / "job.json").write_text(json.dumps(SPEC))
    return "job.json"


def test_a_spec_names_its_data_by_path_and_the_job_can_be_shown_listed_and_cancelled(trainshed, spec):
    job = trainshed("submit", spec).split()[-1]
    assert "waits" in trainshed("show", job)
    assert json.loads(trainshed("show", job, "--json"))["spec"]["data"]["train"][0].startswith("file-")
    assert job in trainshed("list")
    assert [one["id"] for one in json.loads(trainshed("list", "--json"))] == [job]
    assert json.loads(trainshed("list", "--state", "failed", "--json")) == []
    assert trainshed("pause", job) == f"{job} paused\n"
    assert trainshed("resume", job) == f"{job} queued\n"
    assert trainshed("cancel", job) == f"{job} cancelled\n"
    assert "cancelled" in trainshed("watch", job, code=Exit.JOB_CANCELLED)


def test_a_spec_in_yaml_is_as_good(trainshed, spec, tmp_path):
    (tmp_path / "job.yaml").write_text(
        "kind: pretrain\nlabels: {team: a}\nmodel: {preset: llama-15m}\ntokenizer: {type: bytes}\n"
        "data: {train: [corpus.txt], validation: corpus.txt, evaluation: asked.jsonl, seq_len: 32}\n"
        "training: {steps: 2, lr: 3e-4}\n"
    )
    (tmp_path / "asked.jsonl").write_text('{"question": "2 + 2?", "choices": ["3", "4"], "answer": 1}\n')
    job = json.loads(trainshed("submit", "job.yaml", "--json"))
    assert job["run_config"]["training"]["lr"] == 3e-4
    assert job["spec"]["data"]["validation"].startswith("file-")
    assert job["spec"]["data"]["evaluation"].startswith("file-")
    assert [one["id"] for one in json.loads(trainshed("list", "--label", "team=a", "--json"))] == [job["id"]]


def test_watching_ends_with_the_jobs_outcome(live, trainshed, spec):
    good, bad = (trainshed("submit", spec).split()[-1] for _ in range(2))
    driving.succeed(live.services, good, driving.run(live.services, good))
    shown = trainshed("watch", good)
    assert "step 4/4  loss 1.2500  320 tokens/s  ETA 0:00:00" in shown
    driving.fail(live.services, bad, driving.run(live.services, bad))
    shown = trainshed("watch", bad, code=Exit.JOB_FAILED)
    assert "rank 1 needs more memory" in shown
    assert "smaller" in shown
    lines = [json.loads(line) for line in trainshed("watch", bad, "--json", code=Exit.JOB_FAILED).splitlines()]
    assert [line["seq"] for line in lines[:-1]] == list(range(1, len(lines)))
    assert lines[-1]["event"] == "done"


def test_a_result_is_downloaded_and_verified(live, http, trainshed, tmp_path):
    job = driving.finished(live.services, http, tmp_path / "export")
    assert "3 files in result, each verified" in trainshed("download", job, "--into", "result")
    assert (tmp_path / "result" / "adapter" / "adapter_config.json").read_bytes() == b'{"r": 16}'
    assert len(json.loads(trainshed("download", job, "--into", "result", "--json"))) == 3


def test_files_keys_models_and_nodes(live, trainshed, spec, http):
    file = trainshed("files", "upload", "corpus.txt").strip()
    assert file in trainshed("files", "list")
    assert json.loads(trainshed("files", "report", file))["format"] == "text"
    assert trainshed("files", "delete", file) == f"{file} deleted\n"
    secret = trainshed("keys", "create", "ci", "--scope", "read").strip()
    assert secret.startswith("ts_")
    key = json.loads(trainshed("keys", "list", "--json"))[0]["id"]
    assert trainshed("keys", "revoke", key) == f"{key} revoked\n"
    assert trainshed("models", "list", "--json").startswith("[")
    assert "no folder" in trainshed("models", "register", "x", "dir:nothing", code=Exit.REFUSED)
    job = driving.submit(http)["id"]
    driving.run(live.services, job)
    assert f"node-{job}" in trainshed("nodes")


def test_empty_lists_say_what_would_fill_them_and_scripts_read_nothing(trainshed, tmp_path, monkeypatch):
    # With a database and a models directory of its own: the other tests' service may have bases for everyone.
    settings = Settings(data_dir=tmp_path / "shed")
    settings.data_dir.mkdir()
    schema.upgrade(settings.database)
    with Services(settings) as services, running(services) as url:
        with services.db.session() as session:
            monkeypatch.setenv("TRAINSHED_API_KEY", keys.ensure_admin(session, None) or "")
        monkeypatch.setenv("TRAINSHED_URL", url)
        assert_lists_are_empty(trainshed)


def assert_lists_are_empty(trainshed):
    for command, said in {"list": "trainshed submit", "files list": "files upload", "models list": "pretrain"}.items():
        assert trainshed(*command.split()) == ""
        assert said in CliRunner().invoke(app, command.split()).stderr
    assert "No such jobs." in CliRunner().invoke(app, ["list", "--state", "failed"]).stderr


def test_a_row_of_a_list_is_one_line_however_narrow_the_terminal(trainshed, spec, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    job = trainshed("submit", spec).split()[-1]
    header, row = trainshed("list").splitlines()
    assert row.split()[:4] == [job, "tiny", "pretrain", "queued"]
    assert header.index("state") == row.index("queued")


def test_a_list_says_yes_and_no_names_and_dates(trainshed):
    trainshed("keys", "create", "ci", "--scope", "read", "--scope", "submit")
    columns = [column.split() for column in trainshed("keys", "list").splitlines()]
    assert columns[0] == ["id", "name", "scopes", "made", "expires", "revoked"]
    _, name, *scopes, date, time, expires, revoked = columns[1]
    assert (name, scopes, expires, revoked) == ("ci", ["read,", "submit"], "-", "-")
    assert datetime.now() - datetime.fromisoformat(f"{date} {time}") < timedelta(hours=1)


def test_ctrl_c_on_watching_leaves_the_job_alone_and_is_no_failure(trainshed, spec, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    job = trainshed("submit", spec).split()[-1]
    monkeypatch.setattr("api.cli.screen.watch", interrupted)
    assert f"trainshed cancel {job}" in trainshed("watch", job, code=Exit.INTERRUPTED)
    assert json.loads(trainshed("show", job, "--json"))["state"] == "queued"


def test_logs_are_printed_as_they_are(live, trainshed, spec):
    job = trainshed("submit", spec).split()[-1]
    folder = live.services.settings.runs / job / "1" / "logs"
    folder.mkdir(parents=True)
    (folder / "rank-0.log").write_text("one\ntwo\n")
    assert trainshed("logs", job, "--tail", "1") == "two\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param(["show", "job-0"], Exit.REFUSED, "no job", id="a job that is not there"),
        pytest.param(["--key", "wrong", "list"], Exit.REFUSED, "not known", id="a wrong key"),
        pytest.param(["--url", "http://127.0.0.1:9", "list"], Exit.UNREACHABLE, "no server answers", id="no server"),
        pytest.param(
            ["--url", "http://127.0.0.1:9", "nodes"], Exit.UNREACHABLE, "trainshed serve", id="and what to do"
        ),
        pytest.param(["--url", "localhost:8642", "list"], Exit.USAGE, "http://", id="a URL without its scheme"),
        pytest.param(["models", "register", "x", "nothing"], Exit.REFUSED, "no folder", id="a folder by its bare name"),
        pytest.param(["submit", "nothing.json"], Exit.USAGE, "does not exist", id="a spec that is not there"),
        pytest.param(["chat", "nothing", "-m", "hi"], Exit.REFUSED, "no model", id="a model that is not there"),
        pytest.param(["serve", "--port", "99999"], Exit.USAGE, "TRAINSHED_PORT", id="a port that is none"),
    ],
)
def test_what_goes_wrong_is_said_in_words_with_a_code_for_scripts(trainshed, monkeypatch, arguments, code, said):
    monkeypatch.setenv("TRAINSHED_PATIENCE", "0.1")
    output = trainshed(*arguments, code=code)
    assert said in output
    assert "Traceback" not in output


@pytest.mark.parametrize("command", ["serve", "worker", "api", "migrate"])
def test_no_part_of_the_service_starts_with_a_setting_that_cannot_be_used(trainshed, monkeypatch, command):
    monkeypatch.setenv("DATABASE_URL", "mysql://a:secret@b/c")
    output = trainshed(command, code=Exit.USAGE)
    assert "DATABASE_URL: a URL that begins with postgresql://" in output
    assert "secret" not in output


def test_without_a_key_one_is_told_where_to_get_it(trainshed, monkeypatch):
    monkeypatch.delenv("TRAINSHED_API_KEY")
    assert "TRAINSHED_API_KEY" in trainshed("list", code=Exit.USAGE)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param("{", "can't be read", id="broken JSON"),
        pytest.param("[]", "one mapping", id="a list"),
        pytest.param('{"kind": "pretrain", "colour": 1}', "colour: unknown field", id="an unknown field"),
        pytest.param('{"data": {"train": ["gone.txt"]}}', "neither a file id nor a file", id="data that is not there"),
    ],
)
def test_a_spec_that_cannot_be_submitted_says_why(trainshed, tmp_path, content, said):
    (tmp_path / "job.json").write_text(content)
    code = Exit.REFUSED if "unknown" in said else Exit.USAGE
    assert said in trainshed("submit", "job.json", code=code)


def test_with_json_an_error_is_json_too_apart_from_the_answer(trainshed):
    done = CliRunner().invoke(app, ["show", "job-0", "--json"])
    assert (done.exit_code, done.stdout) == (Exit.REFUSED, "")
    said = json.loads(done.stderr)
    assert said["exit_code"] == 3
    assert (said["error"]["status"], said["error"]["code"]) == (404, "not_found")
    assert said["error"]["request_id"].startswith("req-")
