"""`/v1/fine_tuning` under the openai client, as it is and one major version back: the same jobs as `/v1/jobs` has."""

from __future__ import annotations

import json
import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest
import redis
from sqlalchemy import text

from core import checkpoints
from core.throttle import bucket
from engine.events import Evaluated, Finished
from tests import fetched
from tests.api import driving, openai_walk
from tests.api.conftest import wait_for
from tests.api.test_files import CHAT
from tests.api.test_models import MODEL, base
from tests.api.test_requests import envelope

__all__ = ["base"]

ROOT = Path(__file__).resolve().parents[2]
OLDER = "2.8.0"
STEPS = 4
RATE = "hyperparameters.learning_rate_multiplier"
Walk = Callable[..., dict[str, Any]]


@pytest.fixture
def file(http) -> str:
    return driving.upload(http, CHAT * 12, "chat.jsonl")["id"]


@pytest.fixture
def sdk(live, key):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=key) as client:
        yield client


@pytest.fixture(scope="session")
def older() -> Path:
    """A folder with that version."""
    return fetched.packages(f"openai=={OLDER}", "distro==1.9.0")


def current(stage: str, *arguments: str) -> dict[str, Any]:
    return openai_walk.walk(stage, *arguments)


def in_another_process(folder: Path, stage: str, *arguments: str) -> dict[str, Any]:
    seen = subprocess.run(
        [sys.executable, "-W", "error", openai_walk.__file__, stage, *arguments],
        env={**os.environ, "PYTHONPATH": str(folder)}, check=False, capture_output=True, timeout=60, text=True,
    )  # fmt: skip
    assert seen.returncode == 0, seen.stderr
    return json.loads(seen.stdout)


@pytest.fixture(params=["current", "older"])
def walk(request, live, key) -> Walk:
    """One stage of the walk, under each version."""
    version = current if request.param == "current" else partial(in_another_process, request.getfixturevalue("older"))
    return lambda stage, *arguments: version(stage, f"{live.url}/v1", key, *arguments)


def finish(live, job_id: str, folder: Path) -> None:
    """What a worker does, with a validation and two checkpoints on the way."""
    fence = driving.claim(live.services, job_id)
    driving.record(live.services, job_id, fence, driving.started(STEPS))
    for number in range(1, STEPS + 1):
        step = driving.step(number).model_copy(update={"token_accuracy": number / 8})
        driving.record(live.services, job_id, fence, step)
        if number % 2 == 0:
            checkpoint(live, job_id, fence, number, folder)
    driving.record(
        live.services, job_id, fence, Evaluated(step=STEPS, loss=1.5, token_accuracy=0.75, tokens=9, is_best=True)
    )
    driving.record(live.services, job_id, fence, Finished(step=STEPS, tokens=128))
    driving.publish(live.services, job_id, folder / "export", MODEL)
    driving.succeed(live.services, job_id, fence)


def checkpoint(live, job_id: str, fence: int, step: int, folder: Path) -> str:
    saved = folder / f"step-{step}"
    saved.mkdir(parents=True)
    (saved / "weights").write_bytes(b"w")
    metrics = {"loss": 5.0 / step, "token_accuracy": step / 8, "tokens": 32 * step}
    return checkpoints.publish(live.services, job_id, fence=fence, step=step, folder=saved, metrics=metrics).id


def test_a_fine_tune_is_made_followed_and_read_by_the_client_of_either_version(live, walk, file, base, tmp_path):
    seen = walk("submit", base, file)
    sync = seen["sync"]
    assert sync["job"].startswith("ftjob-")
    assert sync["same"] == sync["job"]
    assert (sync["method"], sync["seed"], sync["epochs"]) == ("supervised", 7, 2)
    assert sync["states"] == ["paused", "queued"]
    assert sync["statuses"] == ["queued", "queued", "cancelled"]
    assert (sync["found"], sync["without"]) == ([sync["job"]], [sync["other"]])
    assert sync["listed"] == [sync["other"], sync["job"]]
    assert sync["bad"] == {"kind": "NotFoundError", "param": "training_file", "code": "not_found", "retries": "0"}
    assert seen["async"]["found"] == [seen["async"]["job"]] == [seen["async"]["same"]]
    assert seen["async"]["statuses"] == ["cancelled"]

    finish(live, sync["job"], tmp_path)
    seen = walk("read", sync["job"])
    job = seen["sync"]["job"]
    assert seen["version"].split(".")[0] in {"2", openai.__version__.split(".")[0]}
    assert (job["status"], job["model"], job["training_file"]) == ("succeeded", base, file)
    assert seen["sync"]["model"] == job["fine_tuned_model"] == f"sync-{sync['job'].removeprefix('ftjob-')[:8]}"
    assert job["finished_at"] >= job["created_at"]
    assert (job["trained_tokens"], job["estimated_finish"], job["error"]) == (128, None, None)
    assert job["metadata"] == {"team": "a b", "walk": "sync"}
    assert job["hyperparameters"] == {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 0.5}
    events = seen["sync"]["events"]
    assert len({event["id"] for event in events}) == len(events) > STEPS
    assert [event["message"] for event in events][:1] == ["succeeded"]
    assert [event["id"] for event in events] == seen["async"]["events"]
    assert {event["level"] for event in events} == {"info"}
    numbers = [event["data"] for event in events if event["type"] == "metrics"]
    assert {number["step"] for number in numbers} == set(range(1, STEPS + 1))
    assert {name: numbers[-1][name] for name in ("step", "total_steps", "train_loss", "train_mean_token_accuracy")} == {
        "step": 1, "total_steps": STEPS, "train_loss": 5.0, "train_mean_token_accuracy": 1 / 8,
    }  # fmt: skip
    assert (numbers[0]["full_valid_loss"], numbers[0]["valid_mean_token_accuracy"]) == (1.5, 0.75)
    assert [one["step_number"] for one in seen["sync"]["checkpoints"]] == [4, 2]
    assert seen["async"]["checkpoints"] == [one["fine_tuned_model_checkpoint"] for one in seen["sync"]["checkpoints"]]
    assert seen["sync"]["checkpoints"][1]["metrics"]["train_loss"] == 2.5
    assert seen["sync"]["conflict"]["retries"] == "0"
    assert seen["sync"]["results"].splitlines() == [
        "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy",
        "1,5.0,0.125,,", "2,2.5,0.25,,", f"3,{5 / 3},0.375,,", "4,1.25,0.5,1.5,0.75",
    ]  # fmt: skip
    assert seen["async"]["results"] == seen["sync"]["results"]


def create(http, model: str, file: str, **changes: Any):
    return http.post("/v1/fine_tuning/jobs", json={"model": model, "training_file": file, **changes})


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"hyperparameters": {"n_epochs": "fast"}}, "hyperparameters.n_epochs", "without quotes"),
        ({"hyperparameters": {"learning_rate_multiplier": "2e-5"}}, RATE, "without quotes"),
        ({"hyperparameters": {"learning_rate_multiplier": 0}}, RATE, "greater than 0"),
        ({"hyperparameters": {"learning_rate_multiplier": True}}, RATE, "number"),
        ({"hyperparameters": {"batch_size": 1.5}}, "hyperparameters.batch_size", "integer"),
        ({"hyperparameters": {"epochs": 1}}, "hyperparameters.epochs", "unknown field"),
        ({"hyperparameters": {"sequence_length": 4096}}, "hyperparameters.sequence_length", "64 tokens"),
        ({"hyperparameters": {"learning_rate_multiplier": 1e6}}, RATE, "use at most 50000"),
        # 1e-320 times 2e-4 is less than the smallest double, 4.9e-324, and so 0.
        ({"hyperparameters": {"learning_rate_multiplier": 1e-320}}, RATE, "use at least 1e-300"),
        (
            {"hyperparameters": {"batch_size": 3}, "training": {"micro_batch": 2}},
            "hyperparameters.batch_size",
            "use 2 or 4",
        ),
        (
            {"method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 0}}}},
            "method.supervised.hyperparameters.n_epochs",
            "greater than 0",
        ),
        (
            {"method": {"type": "supervised", "supervised": {"lora": {"targets": ["gate"], "rank": 0}}}},
            "method.supervised.lora.rank",
            "greater than or equal to 1",
        ),
        ({"method": {"type": "dpo"}}, "method.type", "preference pairs"),
        ({"method": {"type": "reinforcement", "reinforcement": {"grader": {}}}}, "method.type", "reinforcement"),
        ({"method": {"type": "pretrain"}}, "training_file", "text"),
        ({"hyperparameters": {"n_epochs": 1}, "training": {"steps": 3}}, "hyperparameters.n_epochs", "training.steps"),
        ({"seed": 1, "training": {"seed": 2}}, "seed", "say it once"),
        ({"training": {"steps": 1, "lr": 1, "lr_multiplier": 1}}, "training", "at most one"),
        ({"suffix": "a" * 65}, "suffix", "64 characters"),
        ({"suffix": "two words"}, "suffix", "pattern"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "16 items"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a", "512 characters"),
        ({"metadata": {"a" * 65: "b"}}, "metadata", "64 characters"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
        ({"integrations": [{"type": "mlflow"}]}, "integrations.0.type", "wandb"),
        ({"integrations": [{"type": "wandb", "wandb": {}}]}, "integrations.0.wandb.project", "required"),
        ({"validation_file": "file-0"}, "validation_file", "no file"),
        ({"model": "none"}, "model", "no model"),
        ({"parallel": {"tensor": 3}}, "parallel.tensor", "try 1"),
        ({"colour": 1}, "colour", "unknown field"),
        ({"kind": "pretrain"}, "kind", "unknown field"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_about_the_field_by_openais_name(http, base, file, change, param, said):
    answer = create(http, **{"model": base, "file": file, **change})
    assert answer.status_code in {400, 404}, answer.text
    error = envelope(answer, answer.status_code)
    assert (error["param"] or "").startswith(param), error
    assert said in error["message"], error
    assert http.get("/v1/fine_tuning/jobs").json()["data"] == []


@pytest.mark.parametrize(
    ("change", "native"),
    [
        ({}, {}),
        ({"method": {"type": "full"}}, {"method": {"type": "full"}}),
        ({"method": {"type": "supervised", "supervised": {"lora": None}}}, {"method": {"type": "full"}}),
        (
            {"method": {"type": "supervised", "supervised": {"lora": {"rank": 4}}}},
            {"method": {"type": "lora", "rank": 4}},
        ),
        (
            {"hyperparameters": {"n_epochs": 2, "batch_size": 64}},
            {"training": {"epochs": 2, "global_batch": 64}},
        ),
        ({"hyperparameters": {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"}}, {}),
        ({"hyperparameters": {"learning_rate_multiplier": 0.5}}, {"training": {"lr": 1e-4}}),
        (
            {"method": {"type": "full"}, "hyperparameters": {"learning_rate_multiplier": 3}},
            {"method": {"type": "full"}, "training": {"lr": 3 * 2e-5}},
        ),
        ({"packing": False, "hyperparameters": {"sequence_length": 32}}, {"data": {"packing": False, "seq_len": 32}}),
        (
            {"seed": 3, "training": {"steps": 2}, "artifacts": {"merged": False}, "max_runtime": "1h"},
            {"training": {"steps": 2, "seed": 3}, "artifacts": {"merged": False}, "max_runtime": 3600},
        ),
        ({"data": {"validation": 0.5}, "suffix": None, "seed": None, "method": None}, {"data": {"validation": 0.5}}),
    ],
)  # fmt: skip
def test_a_job_runs_as_the_native_one_that_says_the_same(http, base, file, change, native):
    made = create(http, base, file, **change)
    assert made.status_code == 200, made.text
    theirs = http.get(f"/v1/jobs/{made.json()['id']}").json()
    spec = {"kind": "finetune", "model": {"base": base}, **native, "data": {"train": [file], **native.get("data", {})}}
    ours = http.post("/v1/jobs", json=spec).json()
    for job in (theirs, ours):
        job["run_config"]["data"].pop("now")
        job["run_config"]["training"]["lr"] = pytest.approx(job["run_config"]["training"]["lr"])
    assert theirs["run_config"] == ours["run_config"]
    assert (theirs["kind"], theirs["slots"], theirs["plan"]) == (ours["kind"], ours["slots"], ours["plan"])


def test_pairs_are_learned_by_dpo_whether_that_is_said_or_not(http, base):
    pairs = driving.upload(http, b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 4, "pairs.jsonl")["id"]
    numbers = {"beta": 0.3, "n_epochs": 2, "batch_size": 2, "learning_rate_multiplier": 2}
    said = create(http, base, pairs, method={"type": "dpo", "dpo": {"hyperparameters": numbers}}).json()
    assert said["method"]["dpo"]["hyperparameters"] == numbers
    assert http.get(f"/v1/jobs/{said['id']}").json()["run_config"]["training"]["lr"] == pytest.approx(2e-5)
    unsaid = create(http, base, pairs).json()
    assert unsaid["method"]["type"] == "dpo"
    assert unsaid["hyperparameters"] == {"n_epochs": 1, "batch_size": 16, "learning_rate_multiplier": 1, "beta": 0.1}
    error = envelope(create(http, base, pairs, method={"type": "supervised"}), 400)
    assert error["param"] == "method.type"


def test_an_automatic_batch_is_said_as_the_rows_there_are_once_they_are_counted(live, http, base, file):
    auto, said = (create(http, base, file, hyperparameters={"batch_size": size}).json()["id"] for size in ("auto", 32))
    assert http.get(f"/v1/fine_tuning/jobs/{auto}").json()["hyperparameters"]["batch_size"] == 16
    for job in (auto, said):
        driving.record(live.services, job, driving.claim(live.services, job), driving.started())
        assert http.get(f"/v1/jobs/{job}").json()["progress"]["train_rows"] == 8
    sizes = [http.get(f"/v1/fine_tuning/jobs/{job}").json()["hyperparameters"]["batch_size"] for job in (auto, said)]
    assert sizes == [8, 32]


def test_a_job_of_either_dialect_is_read_in_the_other(http, base, file):
    spec = {
        "kind": "finetune", "name": "mine", "labels": {"team": "x"}, "model": {"base": base}, "data": {"train": [file]},
        "training": {"steps": 8, "lr": 1e-3},
        "integrations": [{"type": "wandb", "wandb": {"project": "p", "tags": ["t"]}}],
    }  # fmt: skip
    native = http.post("/v1/jobs", json=spec).json()["id"]
    from_scratch = driving.submit(http)["id"]
    made = create(http, base, file, suffix="theirs", metadata={"team": "y"}, integrations=spec["integrations"]).json()
    listed = http.get("/v1/fine_tuning/jobs").json()["data"]
    assert [job["id"] for job in listed] == [made["id"], native]
    job = http.get(f"/v1/fine_tuning/jobs/{native}").json()
    assert (job["suffix"], job["metadata"], job["integrations"]) == ("mine", {"team": "x"}, spec["integrations"])
    assert job["hyperparameters"]["learning_rate_multiplier"] == 5
    assert job["hyperparameters"]["n_epochs"] >= 1
    assert made["integrations"] == spec["integrations"]
    ours = http.get(f"/v1/jobs/{made['id']}").json()
    assert (ours["name"], ours["labels"], ours["kind"]) == ("theirs", {"team": "y"}, "finetune")
    assert ours["spec"]["integrations"] == spec["integrations"]
    assert http.get("/v1/jobs", params={"label[team]": "y"}).json()["data"][0]["id"] == made["id"]
    found = http.get("/v1/fine_tuning/jobs", params={"metadata[team]": "x"}).json()["data"]
    assert [job["id"] for job in found] == [native]
    error = envelope(http.get(f"/v1/fine_tuning/jobs/{from_scratch}"), 404)
    assert f"/v1/jobs/{from_scratch}" in error["message"]
    assert http.post(f"/v1/jobs/{made['id']}/cancel").json()["state"] == "cancelled"


def test_a_create_that_is_tried_again_makes_one_job(http, base, file):
    first = create(http, base, file).json()["id"]
    body = {"model": base, "training_file": file}
    again = http.post("/v1/fine_tuning/jobs", json=body, headers={"x-stainless-retry-count": "1"}).json()["id"]
    anew = create(http, base, file).json()["id"]
    named = [
        http.post("/v1/fine_tuning/jobs", json=body, headers={"idempotency-key": "k"}).json()["id"] for _ in range(2)
    ]
    assert again == first != anew
    assert len({*named, first, anew}) == 3


def test_a_client_that_gives_up_waiting_and_tries_again_makes_one_job(live, key, sdk, base, file):
    """It names no key of its own: what it sends is what tells its tries from new wishes."""
    held = threading.Event()
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, timeout=0.2, max_retries=0) as hasty:

        def first_try() -> None:
            with pytest.raises(openai.APITimeoutError):
                hasty.fine_tuning.jobs.create(model=base, training_file=file)
            held.set()

        # Nobody else can write as long as this session does, so the server has the request and no answer.
        with live.services.db.session() as session:
            session.execute(text("SELECT 1"))
            gives_up = threading.Thread(target=first_try)
            gives_up.start()
            assert held.wait(20)
        gives_up.join(20)
    wait_for(lambda: list(sdk.fine_tuning.jobs.list()))
    again = sdk.fine_tuning.jobs.create(model=base, training_file=file, extra_headers={"x-stainless-retry-count": "1"})
    assert [job.id for job in sdk.fine_tuning.jobs.list()] == [again.id]


def test_a_try_that_a_proxy_held_up_until_its_retry_was_answered_makes_no_second_job(live, key, sdk, base, file):
    host, port = live.url.removeprefix("http://").split(":")

    class Proxy(socketserver.BaseRequestHandler):
        """Takes the first request and answers nothing; passes the others on."""

        held: ClassVar[list[bytes]] = []

        def handle(self) -> None:
            request = whole(self.request)
            if not self.held:
                self.held.append(request)
            else:
                self.request.sendall(passed_on(request))

    def whole(stream: socket.socket) -> bytes:
        with stream.makefile("rb") as lines:
            head = b"".join(iter(lines.readline, b"\r\n"))
            return head + b"\r\n" + lines.read(int(re.search(rb"(?i)content-length: (\d+)", head)[1]))

    def passed_on(request: bytes) -> bytes:
        with socket.create_connection((host, int(port)), timeout=20) as server:
            server.sendall(request)
            return whole(server)

    with socketserver.TCPServer(("127.0.0.1", 0), Proxy) as proxy:
        serving = threading.Thread(target=proxy.serve_forever, args=(0.01,))
        serving.start()
        with openai.OpenAI(base_url=f"http://127.0.0.1:{proxy.server_address[1]}/v1", api_key=key) as client:
            made = client.fine_tuning.jobs.create(model=base, training_file=file)
        proxy.shutdown()
        serving.join(20)
    (held,) = Proxy.held
    assert b"x-stainless-retry-count: 0" in held.lower()
    assert json.loads(passed_on(held).partition(b"\r\n\r\n")[2])["id"] == made.id
    assert [job.id for job in sdk.fine_tuning.jobs.list()] == [made.id]
    # The same again, of the user's own will.
    assert sdk.fine_tuning.jobs.create(model=base, training_file=file).id != made.id


def test_a_first_try_that_was_put_off_has_been_here_so_that_the_next_is_another_wish(live, http, key, base, file):
    body = {"model": base, "training_file": file}
    retry = {"x-stainless-retry-count": "1"}
    name = bucket(f"key-{key.split('_')[1]}")
    with redis.Redis.from_url(live.services.settings.redis) as broker:
        broker.hset(name, mapping={"refused_at": str(broker.time()[0])})
    made = http.post("/v1/fine_tuning/jobs", json=body, headers=retry).json()["id"]
    assert create(http, base, file).json()["id"] != made


def test_an_unknown_place_to_go_on_from_is_an_error(http, base, file):
    job, other = (create(http, base, file).json()["id"] for _ in range(2))
    (event,) = http.get(f"/v1/fine_tuning/jobs/{other}/events").json()["data"]
    for path, after in (
        ("", "ftjob-0"),
        (f"/{job}/events", event["id"]),
        (f"/{job}/events", f"ftevent-{job.partition('-')[2]}-2"),
        (f"/{job}/events", f"ftevent-{job.partition('-')[2]}-²"),
        (f"/{job}/checkpoints", "ftckpt-0"),
    ):
        error = envelope(http.get(f"/v1/fine_tuning/jobs{path}", params={"after": after}), 404)
        assert error["param"] == "after"
    for path in ("jobs/ftjob-0", "jobs/ftjob-0/events", "nothing", "jobs/ftjob-0/nothing"):
        envelope(http.get(f"/v1/fine_tuning/{path}"), 404)


@pytest.mark.parametrize("route", ["run", "validate"])
def test_graders_are_refused_in_words(sdk, route):
    grader = {"type": "string_check", "name": "a", "input": "b", "reference": "c", "operation": "eq"}
    graders = sdk.fine_tuning.alpha.graders
    with pytest.raises(openai.BadRequestError, match="reinforcement"):
        _ = graders.validate(grader=grader) if route == "validate" else graders.run(grader=grader, model_sample="a")


def test_a_failure_names_the_field_by_openais_name(live, http, base, file):
    job = create(http, base, file).json()["id"]
    fence = driving.claim(live.services, job)
    driving.record(live.services, job, fence, driving.started())
    seen = http.get(f"/v1/fine_tuning/jobs/{job}").json()
    assert (seen["status"], seen["state"], seen["trained_tokens"]) == ("running", "running", None)
    driving.record(live.services, job, fence, driving.step(1))
    seen = http.get(f"/v1/fine_tuning/jobs/{job}").json()
    assert seen["estimated_finish"] >= seen["created_at"]
    driving.fail(live.services, job, fence)
    seen = http.get(f"/v1/fine_tuning/jobs/{job}").json()
    assert (seen["status"], seen["result_files"], seen["fine_tuned_model"]) == ("failed", [], None)
    assert seen["error"]["code"] == "out_of_memory"
    assert seen["estimated_finish"] is None
    levels = {event["level"] for event in http.get(f"/v1/fine_tuning/jobs/{job}/events").json()["data"]}
    assert levels == {"info", "error"}


@pytest.fixture
def permissions(live, organization):
    """The client's, of an admin of the organisation."""
    key = organization.headers["authorization"].removeprefix("Bearer ")
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=key) as client:
        yield client.fine_tuning.checkpoints.permissions


@pytest.fixture
def mark(live, http, base, file, tmp_path) -> str:
    """A checkpoint."""
    job = create(http, base, file).json()["id"]
    finish(live, job, tmp_path)
    return http.get(f"/v1/fine_tuning/jobs/{job}/checkpoints").json()["data"][0]["fine_tuned_model_checkpoint"]


def test_another_project_uses_a_checkpoint_for_as_long_as_it_may(live, http, permissions, organization, base, mark):
    path = f"/v1/fine_tuning/checkpoints/{mark}/permissions"
    with live.http(live.key()) as stranger:
        theirs = driving.upload(stranger, CHAT * 12, "chat.jsonl")["id"]
        project = create(stranger, base, theirs).json()["project_id"]
        assert envelope(create(stranger, mark, theirs), 404)["param"] == "model"
        (made,) = permissions.create(mark, project_ids=[project])
        assert [one.id for one in permissions.create(mark, project_ids=[project, project])] == [made.id]
        assert made.project_id == project
        assert [one.id for one in permissions.list(mark)] == [made.id]
        assert [one.id for one in permissions.list(mark, project_id="proj-other")] == []
        assert create(stranger, mark, theirs).status_code == 200
        assert stranger.get(f"/v1/models/{mark}").json()["id"] == mark
        for client in (stranger, http):
            envelope(client.get(path), 403)
            envelope(client.delete(f"{path}/{made.id}"), 403)
            envelope(client.post(path, json={"project_ids": [project]}), 403)
        assert permissions.delete(made.id, fine_tuned_model_checkpoint=mark).deleted
        envelope(create(stranger, mark, theirs), 404)
        envelope(organization.delete(f"{path}/{made.id}"), 404)
    assert envelope(organization.post(path, json={"project_ids": ["proj-0"]}), 404)["param"] == "project_ids"


def test_permissions_come_in_pages_that_the_client_follows(permissions, organization, mark):
    projects = [organization.post("/v1/projects", json={"name": "team"}).json()["id"] for _ in range(3)]
    for project in projects:
        permissions.create(mark, project_ids=[project])
    found = [one.project_id for one in permissions.list(mark, limit=2, order="ascending")]
    assert found == projects
    assert [one.project_id for one in permissions.list(mark, limit=1)] == projects[::-1]


def test_a_result_file_that_was_deleted_is_no_longer_named(live, http, base, file, tmp_path):
    job = create(http, base, file).json()["id"]
    finish(live, job, tmp_path)
    (table,) = http.get(f"/v1/fine_tuning/jobs/{job}").json()["result_files"]
    described = http.get(f"/v1/files/{table}").json()
    assert (described["purpose"], described["filename"]) == ("fine-tune-results", "step_metrics.csv")
    assert [one["id"] for one in http.get("/v1/files", params={"purpose": "fine-tune-results"}).json()["data"]] == [
        table
    ]
    assert http.delete(f"/v1/files/{table}").json()["deleted"]
    assert http.get(f"/v1/fine_tuning/jobs/{job}").json()["result_files"] == []
