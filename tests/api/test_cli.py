"""The `trainshed` command against a real server: what it prints, and the exit code that a script would see."""

from __future__ import annotations

import json
import tomllib
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from api.cli import Exit, app
from api.cli.answers import cell
from api.cli.outcomes import Fault
from api.cli.results import even
from api.client import ApiError, Damaged, Unreachable
from core.models import Job
from tests import make
from tests.api import driving
from tests.api.conftest import Live, served

SPEC = driving.spec("corpus.txt", name="tiny")
PROJECT = Path(__file__).parents[2] / "pyproject.toml"


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
    other = driving.finished(live.services, http, tmp_path / "other", {"gguf/model.gguf": b"other"})
    assert "--into" in trainshed("download", other, "--into", "result", code=Exit.USAGE)
    assert not (tmp_path / "result" / "gguf").exists()


def test_files_keys_models_and_nodes(live, trainshed, spec, http):
    file = trainshed("files", "upload", "corpus.txt").strip()
    assert file in trainshed("files", "list")
    assert json.loads(trainshed("files", "report", file, "--json"))["format"] == "text"
    assert "format" in trainshed("files", "report", file)
    assert driving.sha256(driving.TEXT) in trainshed("files", "show", file)
    assert trainshed("files", "delete", file) == f"{file} deleted\n"
    secret = trainshed("keys", "create", "ci", "--scope", "read").strip()
    assert secret.startswith("ts_")
    key = json.loads(trainshed("keys", "list", "--json"))[0]["id"]
    assert trainshed("keys", "revoke", key) == f"{key} revoked\n"
    assert trainshed("models", "list", "--json").startswith("[")
    assert "no folder" in trainshed("models", "register", "x", "dir:nothing", code=Exit.REFUSED)
    for command in ("show", "delete"):
        assert "no model" in trainshed("models", command, "nothing", code=Exit.REFUSED)
    job = driving.submit(http)["id"]
    driving.run(live.services, job)
    assert f"node-{job}" in trainshed("nodes")


def test_the_version_is_said_without_a_server_or_a_key(trainshed, monkeypatch):
    monkeypatch.delenv("TRAINSHED_API_KEY")
    version = tomllib.loads(PROJECT.read_text())["project"]["version"]
    assert trainshed("--version") == f"trainshed {version}\n"


def test_keys_are_listed_with_their_projects_and_to_the_second(trainshed):
    trainshed("keys", "create", "ci", "--scope", "read")
    row = json.loads(trainshed("keys", "list", "--json"))[0]
    line = next(line for line in trainshed("keys", "list").splitlines() if row["id"] in line)
    assert row["project"] in line
    assert f"{datetime.fromtimestamp(row['created_at']):%Y-%m-%d %H:%M:%S}" in line


def test_empty_lists_say_what_would_fill_them_and_scripts_read_nothing(trainshed, tmp_path_factory, monkeypatch):
    # The other tests' service may have bases for everyone.
    with served(tmp_path_factory.mktemp("empty")) as live:
        monkeypatch.setenv("TRAINSHED_URL", live.url)
        monkeypatch.setenv("TRAINSHED_API_KEY", live.key())
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
    assert columns[0] == ["id", "name", "project", "scopes", "made", "expires", "revoked"]
    _, name, _, *scopes, date, time, expires, revoked = columns[1]
    assert (name, scopes, expires, revoked) == ("ci", ["read,", "submit"], "-", "-")
    assert datetime.now() - datetime.fromisoformat(f"{date} {time}") < timedelta(hours=1)


def test_a_key_ends_when_it_is_told_to(trainshed):
    def made(*said: str) -> dict[str, object]:
        return json.loads(trainshed("keys", "create", "ci", "--json", *said))

    key = made("--scopes", "read,submit", "--expires", "30d")
    assert key["scopes"] == ["read", "submit"]
    assert key["expires_at"] - key["created_at"] == 30 * 24 * 3600
    assert made("--expires", "2100-01-31T00:00:00+00:00")["expires_at"] == 4105036800
    assert "30d" in trainshed("keys", "create", "ci", "--expires", "soon", code=Exit.USAGE)


def test_projects_are_made_limited_and_closed_by_who_manages_the_organisation(trainshed, live, monkeypatch):
    assert "organisation" in trainshed("projects", "create", "ours", code=Exit.REFUSED)
    (own,) = json.loads(trainshed("projects", "list", "--json"))
    monkeypatch.setenv("TRAINSHED_API_KEY", live.key(project="proj-default"))
    project = trainshed(
        "projects", "create", "ours", "--gpu-hours", "1.5", "--concurrent-jobs", "2", "--storage", "3GiB"
    ).strip()
    shown = json.loads(trainshed("projects", "show", project, "--json"))
    assert shown["quotas"] == {"gpu_hours": 1.5, "concurrent_jobs": 2, "storage_bytes": 3 * 1024**3}
    assert "0 of 2" in trainshed("projects", "show", project)
    edited = trainshed("projects", "edit", project, "--gpu-hours", "none", "--name", "theirs")
    assert "0.00, no limit" in edited
    assert "theirs" in edited
    assert {own["id"], project} <= {one["id"] for one in json.loads(trainshed("projects", "list", "--json"))}
    secret = trainshed("keys", "create", "lead", "--scope", "admin", "--project", project).strip()
    assert [one["name"] for one in json.loads(trainshed("keys", "list", "--project", project, "--json"))] == ["lead"]
    assert [one["id"] for one in json.loads(trainshed("--key", secret, "projects", "list", "--json"))] == [project]
    assert trainshed("projects", "archive", project) == f"{project} archived\n"
    assert "not known" in trainshed("--key", secret, "list", code=Exit.REFUSED)
    assert project not in trainshed("projects", "list")
    assert project in trainshed("projects", "list", "--archived")


@pytest.mark.parametrize("said", ["many", "1.5", "2GiB", "-1"])
def test_a_quota_that_is_no_number_is_refused_before_anything_is_asked(trainshed, said):
    refused = trainshed("projects", "create", "ours", f"--concurrent-jobs={said}", code=Exit.USAGE)
    assert "none" in refused


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
    driving.fail(live.services, job, driving.claim(live.services, job))
    (folder / "rank-1.log").write_text("out of memory\n")
    assert trainshed("logs", job) == "out of memory\n"
    assert json.loads(trainshed("logs", job, "--json")) == {"job": job, "rank": 1, "lines": ["out of memory"]}
    assert trainshed("logs", job, "--rank", "0") == "one\ntwo\n"


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


def test_what_is_done_to_a_service_here_is_told_in_json_too(trainshed, monkeypatch, tmp_path):
    monkeypatch.setenv("TRAINSHED_DATA_DIR", str(tmp_path / "one"))
    assert json.loads(trainshed("migrate", "--json"))["admin_key"].startswith("ts_")
    assert json.loads(trainshed("migrate", "--json")) == {"admin_key": None}
    assert json.loads(trainshed("backup", "copy", "--json")) == {"objects": 0, "bytes": 0}
    monkeypatch.setenv("TRAINSHED_DATA_DIR", str(tmp_path / "two"))
    assert json.loads(trainshed("restore", "copy", "--json")) == {"objects": 0, "bytes": 0}


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
        pytest.param("{", "job.json:1:2: this is no JSON", id="broken JSON"),
        pytest.param("[]", "one mapping", id="a list"),
        pytest.param(
            '{"kind": "pretrain",\n"colour": 1}', "job.json:2:1: colour: unknown field", id="an unknown field"
        ),
        pytest.param(
            '{"data": {\n"train": ["gone.txt"]}}',
            "job.json:2:11: data.train.0: 'gone.txt' is neither a file id nor",
            id="data that is not there",
        ),
    ],
)
def test_a_spec_that_cannot_be_submitted_says_why(trainshed, tmp_path, content, said):
    (tmp_path / "job.json").write_text(content)
    assert said in trainshed("submit", "job.json", code=Exit.USAGE)


OUTCOMES = {
    Exit.REFUSED: ApiError(404, {"message": "there is none", "code": "not_found"}, "req-1"),
    Exit.UNREACHABLE: Unreachable("no server answers"),
    Exit.DAMAGED: Damaged("a is not what the manifest says"),
    Exit.INTERRUPTED: KeyboardInterrupt(),
    Exit.USAGE: Fault("that is no URL", Exit.USAGE),
}


@pytest.mark.parametrize("code", OUTCOMES, ids=lambda code: code.name)
@pytest.mark.parametrize("command", ["show job-1", "download job-1", "nodes", "files list", "chat m -m hi"])
def test_whatever_goes_wrong_wherever_has_its_code(trainshed, monkeypatch, command, code):
    def wrong(self, *_: object, **__: object) -> None:
        raise OUTCOMES[code]

    for name in ("job", "download", "nodes", "files", "chat_stream"):
        monkeypatch.setattr(f"api.client.Client.{name}", wrong)
    said = trainshed(*command.split(), code=code)
    assert str(OUTCOMES[code]) in said
    assert "Traceback" not in said


def test_with_json_an_error_is_json_too_apart_from_the_answer(trainshed):
    done = CliRunner().invoke(app, ["show", "job-0", "--json"])
    assert (done.exit_code, done.stdout) == (Exit.REFUSED, "")
    said = json.loads(done.stderr)
    assert said["exit_code"] == 3
    assert (said["error"]["status"], said["error"]["code"]) == (404, "not_found")
    assert said["error"]["request_id"].startswith("req-")


def test_nothing_is_sent_before_the_spec_is_judged(trainshed, spec, tmp_path):
    wrong = [SPEC | {"training": {"lr": 11}}, SPEC | {"kind": "finetune", "model": {"base": "nothing"}}]
    for number, asked in enumerate(wrong):
        (tmp_path / f"{number}.json").write_text(json.dumps(asked, indent=1))
    assert "training.lr" in trainshed("submit", "0.json", code=Exit.USAGE)
    assert "model.base: There is no model" in trainshed("submit", "1.json", code=Exit.REFUSED)
    assert json.loads(trainshed("files", "list", "--json")) == []
    told = CliRunner().invoke(app, ["submit", "0.json", "--json"]).stderr
    finding = json.loads(told)["error"]["errors"][0]
    assert finding["param"] == "training.lr"
    assert finding["place"].startswith("0.json:")


def test_data_that_is_there_already_is_not_sent_again(trainshed, spec):
    first, second = (json.loads(trainshed("submit", spec, "--json")) for _ in range(2))
    assert first["id"] != second["id"]
    assert first["spec"]["data"] == second["spec"]["data"]
    assert len(json.loads(trainshed("files", "list", "--json"))) == 1
    assert trainshed("files", "upload", "corpus.txt").strip() == first["spec"]["data"]["train"][0]
    assert trainshed("files", "upload", "corpus.txt", "--again").strip() != first["spec"]["data"]["train"][0]


def test_a_spec_comes_through_a_pipe_as_well(trainshed, spec):
    assert trainshed("submit", "-", input=json.dumps(SPEC)).startswith("job-")
    assert "<standard input>:1:" in trainshed("submit", "-", input='{"kind": "no"}', code=Exit.USAGE)


def test_a_plan_says_what_a_job_would_need_and_makes_none(trainshed, spec):
    planned = json.loads(trainshed("plan", spec, "--json"))
    told = trainshed("plan", spec)
    batch = planned["layout"]["global_batch"]
    assert f"4 of {batch} rows of 32 tokens: {4 * batch * 32:,} tokens, about " in told
    assert f"of {planned['parameters']:,} parameters" in told
    assert f"train corpus.txt (1 examples, {len(driving.TEXT) / 1024:.1f} KiB)" in told
    assert "memory" in told
    assert trainshed("list", "--json") == "[]\n"


def test_a_job_that_failed_is_retried_and_one_that_waits_is_renamed(live, trainshed, spec):
    job = trainshed("submit", spec).split()[-1]
    driving.fail(live.services, job, driving.run(live.services, job))
    assert trainshed("retry", job) == f"{job} queued\n"
    trainshed("edit", job, "--name", "better", "--label", "team=a", "--label", "user=b", "--priority", "7")
    changed = json.loads(trainshed("edit", job, "--label", "user=", "--json"))
    assert (changed["name"], changed["labels"], changed["priority"]) == ("better", {"team": "a"}, 7)
    assert "team=a" in trainshed("show", job)
    assert json.loads(trainshed("edit", job, "--name", "", "--json"))["name"] is None
    for wrong in ([], ["--label", "team"]):
        trainshed("edit", job, *wrong, code=Exit.USAGE)


def test_a_job_that_has_ended_is_deleted(live, trainshed, spec):
    job = trainshed("submit", spec).split()[-1]
    assert "cancel it first" in trainshed("delete", job, code=Exit.REFUSED)
    trainshed("cancel", job)
    assert json.loads(trainshed("delete", job, "--json")) == {"id": job, "object": "job", "deleted": True}
    assert "no job" in trainshed("show", job, code=Exit.REFUSED)


def test_what_happened_is_listed_measured_and_drawn(live, trainshed, spec):
    job = trainshed("submit", spec).split()[-1]
    assert "Nothing of it has been measured" in CliRunner().invoke(app, ["curve", job]).stderr
    driving.succeed(live.services, job, driving.run(live.services, job))
    events = json.loads(trainshed("events", job, "--json", "--limit", "3"))
    assert [event["seq"] for event in events] == [event["seq"] for event in sorted(events, key=lambda one: one["seq"])]
    assert events[-1]["type"] == "state"
    assert trainshed("events", job, "--type", "step").count("loss") == 4
    assert json.loads(trainshed("metrics", job, "--name", "loss", "--json"))["series"]["loss"][0] == [1, 5.0]
    rows = [line.split() for line in trainshed("metrics", job, "--name", "loss", "--name", "lr").splitlines()]
    assert rows[:2] == [["step", "loss", "lr"], ["1", "5.0000", "0.001"]]
    assert "loss 1.25" in trainshed("curve", job)
    assert "lr 0.001" in trainshed("curve", job, "--name", "lr")
    assert json.loads(trainshed("checkpoints", job, "--json")) == []


@pytest.mark.parametrize(
    ("number", "expected"),
    [(4.06708, "4.0671"), (0.0, "0.0000"), (2e-5, "2e-05"), (1.0023e-4, "0.0001002"), (-0.03125, "-0.03125")],
)
def test_a_small_number_of_a_table_keeps_four_digits_as_a_learning_rate_has_no_use_for_zeros(number, expected):
    assert cell({"lr": number}, "lr") == expected


def test_checkpoints_are_listed_with_a_mark_on_those_that_the_run_went_back_from(live, trainshed, spec, tmp_path):
    job = trainshed("submit", spec).split()[-1]
    with live.services.db.session() as session:
        row = session.get_one(Job, job)
        for step, abandoned in ((2, False), (4, True)):
            make.checkpoint(session, row, step, abandoned=abandoned, created_at=float(step))
    lines = trainshed("checkpoints", job).splitlines()
    assert [(line.split()[1], line.split()[-1]) for line in lines] == [("step", "abandoned"), ("4", "yes"), ("2", "no")]


def test_what_comes_through_a_pipe_is_one_message_to_a_model(trainshed, monkeypatch):
    said = []

    def stream(self, model, messages, **options):
        said.append([message["content"] for message in messages])
        yield from ("I ", "see.")

    monkeypatch.setattr("api.client.Client.chat_stream", stream)
    assert trainshed("chat", "m", input="What\nnow?\n") == "I see.\n"
    assert said.pop() == ["What\nnow?"]
    assert "nothing to say" in trainshed("chat", "m", input="", code=Exit.USAGE)


@pytest.mark.parametrize(
    ("series", "most", "expected"),
    [
        pytest.param([range(1, 102)], 3, [1, 51, 101], id="even distances"),
        pytest.param([range(1, 102), [25, 75]], 3, [1, 25, 51, 75, 101], id="and what was measured seldom"),
        pytest.param([range(1, 3)], 20, [1, 2], id="few"),
        pytest.param([], 20, [], id="none"),
    ],
)
def test_a_table_of_numbers_has_steps_at_even_distances(series, most, expected):
    assert even([dict.fromkeys(steps, 0.0) for steps in series], most) == expected


def test_every_command_can_answer_in_json_but_those_that_run_until_they_are_stopped_or_print_a_document():
    without = {path for path, command in commands() if "--json" not in options(command)}
    assert without == {"serve", "worker", "api", "openapi", "completion"}


def commands():
    """Each command that does something, with the words that lead to it."""
    root = typer.main.get_command(app)
    for name, command in root.commands.items():
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
        else:
            yield from ((f"{name} {deeper}", each) for deeper, each in inner.items())


def options(command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_each_mistake_of_a_file_is_a_line(trainshed, tmp_path):
    wrong = tmp_path / "wrong.jsonl"
    rows = [
        {"messages": [{"role": role, "content": "x"}, {"role": "assistant", "content": "y"}]} for role in ("us", "me")
    ]
    wrong.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = trainshed("files", "upload", str(wrong), code=Exit.REFUSED).splitlines()
    assert [line.split(",")[0] for line in told if line.startswith("line ")] == ["line 1", "line 2"]
    assert all("messages[0].role" in line for line in told if line.startswith("line "))
    assert "[file" not in told[0]
