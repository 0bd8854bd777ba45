"""Jobs over HTTP: refused at once where they can't run, made once however often they are asked for, told of in full."""

import json
import socket
from http.client import HTTPResponse
from urllib.parse import quote

import pytest

from core import checkpoints, jobs, nodes, scheduler
from core.errors import Unavailable
from engine.events import RolledBack
from tests.api import driving
from tests.api.conftest import DEADLINE_SECONDS
from tests.api.test_requests import envelope


def test_a_job_can_be_read_as_soon_as_its_id_is_known(http):
    job = driving.submit(http, name="first", labels={"team": "a"}, priority=3)
    assert http.get(f"/v1/jobs/{job['id']}").json() == job
    assert [one["id"] for one in http.get("/v1/jobs").json()["data"]] == [job["id"]]
    assert job["object"] == "job"
    assert (job["state"], job["kind"], job["name"], job["labels"]) == ("queued", "pretrain", "first", {"team": "a"})
    assert job["spec"]["training"]["steps"] == 4
    assert job["run_config"]["training"]["steps"] == 4
    assert (job["attempt"], job["slots"], job["error"], job["model"], job["artifacts"]) == (0, 1, None, None, [])
    assert set(job) >= {"created_at", "started_at", "finished_at", "plan"}
    assert set(job["progress"]) >= {
        "step", "total_steps", "tokens", "percent", "eta_seconds", "tokens_per_second", "mfu", "hfu",
        "loss",
    }  # fmt: skip
    assert set(job["queue"]) == {"position", "reason", "estimated_start"}


def test_without_a_worker_a_job_says_that_it_waits_for_one(live, http):
    job = driving.submit(http)["id"]
    with live.services.db.session() as session:
        for node in nodes.alive(session):
            nodes.drain(session, node.name)
        scheduler.tick(session)
    queue = http.get(f"/v1/jobs/{job}").json()["queue"]
    assert "trainshed worker" in queue["reason"]
    assert queue["position"] >= 1


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        pytest.param({"colour": 1}, "colour", "unknown field", id="an unknown field"),
        pytest.param({"training": {"learning_rate": 1}}, "training.learning_rate", "unknown field", id="and within"),
        pytest.param({"parallel": {"tensor": 3}}, "parallel.tensor", "try 1", id="heads that tensor does not divide"),
        pytest.param({"data": {"train": ["?"], "seq_len": 128}}, "data.seq_len", "64 tokens", id="a sequence too long"),
        pytest.param({"data": {"train": ["file-00"]}}, "data.train", "no file", id="a file that is not there"),
        pytest.param({"kind": "finetune", "model": {"base": "none"}}, "model.base", "no model", id="no such base"),
    ],
)
def test_what_cannot_run_is_refused_at_submit_with_what_would(http, change, param, said):
    file = driving.upload(http)["id"]
    body = json.loads(json.dumps(driving.spec(file, **change)).replace('"?"', f'"{file}"'))
    answer = http.post("/v1/jobs", json=body)
    assert answer.status_code in {400, 404}
    error = envelope(answer, answer.status_code)
    assert (error["param"] or "").startswith(param)
    assert said in error["message"]
    assert http.get("/v1/jobs").json()["data"] == []


def test_the_same_idempotency_key_is_the_same_job(http):
    body, headers = driving.spec(driving.upload(http)["id"]), {"idempotency-key": "a"}
    first, again = (http.post("/v1/jobs", json=body, headers=headers) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json()["id"] == again.json()["id"]
    other = http.post("/v1/jobs", json=body | {"priority": 1}, headers=headers)
    assert envelope(other, 400)["param"] == "Idempotency-Key"


def test_a_retry_of_the_openai_client_makes_no_second_job_and_a_new_wish_does(http):
    body = driving.spec(driving.upload(http)["id"])

    def create(retries, **change):
        answer = http.post("/v1/jobs", json=body | change, headers={"x-stainless-retry-count": str(retries)})
        return answer.json()["id"]

    first = create(0)
    assert create(1) == first
    assert create(2) == first
    assert create(0) != first
    assert create(1, priority=1) != first


def test_a_try_that_arrives_whole_after_its_own_retry_makes_no_second_job(live, http, key):
    body = json.dumps(driving.spec(driving.upload(http)["id"])).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "expect": "100-continue",
               "authorization": f"Bearer {key}", "host": "x", "x-stainless-retry-count": "0"}  # fmt: skip
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_SECONDS) as first:
        first.sendall(f"POST /v1/jobs HTTP/1.1\r\n{head}\r\n".encode())
        # So it is there, and waited for.
        assert first.recv(100).startswith(b"HTTP/1.1 100")
        retry = {"content-type": "application/json", "x-stainless-retry-count": "1"}
        made = http.post("/v1/jobs", content=body, headers=retry).json()["id"]
        first.sendall(body)
        late = HTTPResponse(first, method="POST")
        late.begin()
        assert (late.status, json.loads(late.read())["id"]) == (201, made)
    assert http.post("/v1/jobs", content=body, headers=retry | {"x-stainless-retry-count": "0"}).json()["id"] != made
    assert len(http.get("/v1/jobs").json()["data"]) == 2


def test_a_first_try_that_failed_with_us_is_not_waited_for(http, monkeypatch):
    body = driving.spec(driving.upload(http)["id"])

    def away(*_given, **_named):
        raise Unavailable("The database is away.")

    def create(retries):
        return http.post("/v1/jobs", json=body, headers={"x-stainless-retry-count": str(retries)})

    with monkeypatch.context() as patched:
        patched.setattr(jobs, "submit", away)
        assert [create(retries).status_code for retries in (0, 1)] == [503, 503]
    made = create(2).json()["id"]
    assert create(1).json()["id"] == made
    # So this is another wish.
    assert create(0).json()["id"] != made


def test_an_idempotency_key_stays_good_when_the_api_key_is_another(live, http):
    body, headers = driving.spec(driving.upload(http)["id"]), {"idempotency-key": "a"}
    first = http.post("/v1/jobs", json=body, headers=headers).json()
    new = http.post("/v1/keys", json={"name": "after it"}).json()["secret"]
    with live.http(new) as rotated:
        assert rotated.post("/v1/jobs", json=body, headers=headers).json()["id"] == first["id"]


def test_cancelling_twice_is_fine_and_what_has_ended_says_not_to_try_again(live, http):
    job = driving.submit(http)["id"]
    assert [http.post(f"/v1/jobs/{job}/cancel").json()["state"] for _ in range(2)] == ["cancelled", "cancelled"]
    failed = driving.submit(http)["id"]
    driving.fail(live.services, failed, driving.run(live.services, failed))
    answer = http.post(f"/v1/jobs/{failed}/cancel")
    assert envelope(answer, 409)["code"] == "invalid_state"
    assert answer.headers["x-should-retry"] == "false"
    assert http.get(f"/v1/jobs/{failed}").json()["error"] == {
        "code": "out_of_memory", "message": "rank 1 needs more memory", "param": None, "rank": 1, "hint": "smaller",
    }  # fmt: skip


def test_a_running_job_is_asked_to_pause_and_a_paused_one_is_queued_again(live, http):
    job = driving.submit(http)["id"]
    assert http.post(f"/v1/jobs/{job}/pause").json()["state"] == "paused"
    assert http.post(f"/v1/jobs/{job}/resume").json()["state"] == "queued"
    driving.run(live.services, job)
    assert http.post(f"/v1/jobs/{job}/pause").json()["state"] == "pausing"
    assert http.post(f"/v1/jobs/{job}/cancel").json()["state"] == "cancelling"
    assert envelope(http.post(f"/v1/jobs/{job}/resume"), 409)


def test_a_paused_job_goes_on_in_another_layout(http):
    job = driving.submit(http)["id"]
    http.post(f"/v1/jobs/{job}/pause")
    refused = envelope(http.post(f"/v1/jobs/{job}/resume", json={"parallel": {"tensors": 2}}), 400)
    assert refused["param"].endswith("parallel.ParallelAsk.tensors") or "tensors" in refused["message"]
    answer = http.post(f"/v1/jobs/{job}/resume", json={"parallel": {"tensor": 2}})
    assert answer.status_code == 200, answer.text
    resumed = answer.json()
    assert (resumed["state"], resumed["slots"], resumed["spec"]["parallel"]) == ("queued", 2, {"tensor": 2})
    assert resumed["run_config"]["parallel"]["tensor"] == 2
    # Asked again, it is as it was asked; another one is too late.
    assert http.post(f"/v1/jobs/{job}/resume", json={"parallel": {"tensor": 2}}).status_code == 200
    assert "pause it first" in envelope(http.post(f"/v1/jobs/{job}/resume", json={"parallel": "auto"}), 409)["message"]
    (told,) = http.get(f"/v1/jobs/{job}/events", params={"type": "changed"}).json()["data"]
    assert (told["message"], told["data"]["parallel"]["to"]["tensor"]) == ("goes on in another layout: tensor 2", 2)


def test_lining_up_at_the_end_of_its_time_needs_a_time(http):
    body = driving.spec(driving.upload(http)["id"], at_max_runtime="requeue")
    assert "max_runtime" in envelope(http.post("/v1/jobs", json=body), 400)["message"]
    assert http.post("/v1/jobs", json=body | {"max_runtime": "4h"}).json()["spec"]["at_max_runtime"] == "requeue"


def test_a_failed_job_goes_again_under_its_id_and_one_that_succeeded_does_not(live, http):
    job = driving.submit(http)["id"]
    driving.fail(live.services, job, driving.run(live.services, job))
    retried, again = (http.post(f"/v1/jobs/{job}/retry") for _ in range(2))
    assert (retried.status_code, again.status_code) == (200, 200)
    one = again.json()
    assert (one["id"], one["state"], one["error"], one["finished_at"]) == (job, "queued", None, None)
    driving.succeed_from_start(live.services, job, driving.claim(live.services, job))
    done = http.get(f"/v1/jobs/{job}").json()
    assert (done["state"], done["attempt"]) == ("succeeded", 2)
    refused = http.post(f"/v1/jobs/{job}/retry")
    assert envelope(refused, 409)["code"] == "invalid_state"
    assert refused.headers["x-should-retry"] == "false"


def test_name_labels_and_priority_can_be_changed_and_nothing_else(http):
    first, second = driving.submit(http)["id"], driving.submit(http, labels={"team": "a"})["id"]
    before = http.get(f"/v1/jobs/{second}").json()["queue"]["position"]
    wish = {"priority": 100, "labels": {"stage": "x"}, "name": "late"}
    answer = http.patch(f"/v1/jobs/{second}", json=wish, headers={"content-type": "application/merge-patch+json"})
    job = answer.json()
    assert (job["priority"], job["name"]) == (100, "late")
    assert job["labels"] == {"team": "a", "stage": "x"}
    assert job == http.get(f"/v1/jobs/{second}").json()
    assert job["queue"]["position"] < min(before, http.get(f"/v1/jobs/{first}").json()["queue"]["position"])
    (told,) = http.get(f"/v1/jobs/{second}/events", params={"type": "changed"}).json()["data"]
    assert told["data"]["priority"] == {"from": 0, "to": 100}
    assert [one["id"] for one in http.get("/v1/jobs", params={"label[stage]": "x"}).json()["data"]] == [second]
    for wish, param in [
        ({"state": "running"}, "state"),
        ({"priority": 101}, "priority"),
        ({"priority": "5"}, "priority"),
        ({"labels": {"a": 1}}, "labels.a"),
        ({"name": "../x"}, "name"),
    ]:
        assert envelope(http.patch(f"/v1/jobs/{second}", json=wish), 400)["param"] == param
    assert http.patch(f"/v1/jobs/{second}", json={}).json() == job
    http.post(f"/v1/jobs/{second}/cancel")


def test_lists_go_newest_first_in_pages_and_are_filtered(http):
    file = driving.upload(http)["id"]
    made = [
        http.post("/v1/jobs", json=driving.spec(file, labels={"n": str(n % 2)}, name=f"n{n}")).json()["id"]
        for n in range(5)
    ]
    first = http.get("/v1/jobs", params={"limit": 3}).json()
    rest = http.get("/v1/jobs", params={"limit": 3, "after": first["data"][-1]["id"]}).json()
    assert [job["id"] for job in first["data"] + rest["data"]] == made[::-1]
    assert (first["object"], first["has_more"], rest["has_more"]) == ("list", True, False)
    odd = http.get("/v1/jobs", params={"label[n]": "1"}).json()["data"]
    assert [job["id"] for job in odd] == [made[3], made[1]]
    http.post(f"/v1/jobs/{made[0]}/cancel")
    cancelled = http.get("/v1/jobs", params={"state": "cancelled"}).json()["data"]
    assert [job["id"] for job in cancelled] == [made[0]]
    assert http.get("/v1/jobs", params={"kind": "finetune"}).json()["data"] == []
    both = http.get("/v1/jobs", params={"state": ["cancelled", "queued"], "limit": 2}).json()
    assert ([job["id"] for job in both["data"]], both["has_more"]) == (made[:2:-1], True)
    assert [job["id"] for job in http.get("/v1/jobs", params={"name": "n3"}).json()["data"]] == [made[3]]
    of_two = {"label[n]": "1", "label[m]": "1"}
    assert http.get("/v1/jobs", params=of_two).json()["data"] == []


@pytest.mark.parametrize(("path", "word"), [("jobs", "label"), ("fine_tuning/jobs", "metadata")])
def test_more_labels_than_a_job_can_have_are_not_looked_for(http, path, word):
    def asked(number):
        return http.get(f"/v1/{path}", params={f"{word}[{name}]": "x" for name in range(number)})

    assert asked(16).status_code == 200
    error = envelope(asked(17), 400)
    assert error["param"] == word


@pytest.mark.parametrize(("path", "word"), [("jobs", "label"), ("fine_tuning/jobs", "metadata")])
@pytest.mark.parametrize(
    "asked",
    ["[]=x", "[a=x", "[a]b=x", f"[{'a' * 65}]=x", "[a]=x&{word}[a]=y"],
    ids=["no name", "not closed", "more behind it", "a name that is too long", "two values"],
)
def test_a_filter_that_fits_no_job_is_an_error_and_not_all_jobs(http, path, word, asked):
    asked = word + asked.replace("{word}", word)
    error = envelope(http.get(f"/v1/{path}?{asked}"), 400)
    assert error["param"] == word


def test_a_filter_by_a_name_with_odd_characters_finds_none(http):
    driving.submit(http)
    for name in ("\n", "\u2028", "a]b", "\U0001f600", "%"):
        asked = quote(f"label[{name}]", safe="")
        assert http.get(f"/v1/jobs?{asked}=x").json()["data"] == [], name


def test_what_happened_is_listed_in_order_with_unique_ids_and_by_type(live, http):
    job = driving.submit(http)["id"]
    driving.succeed(live.services, job, driving.run(live.services, job))
    everything = http.get(f"/v1/jobs/{job}/events", params={"limit": 100}).json()["data"]
    assert [event["seq"] for event in everything] == list(range(1, len(everything) + 1))
    assert len({event["id"] for event in everything}) == len(everything)
    assert [event["data"]["state"] for event in everything if event["type"] == "state"] == [
        "queued", "starting", "running", "succeeded",
    ]  # fmt: skip
    refused = envelope(http.get(f"/v1/jobs/{job}/events", params={"type": ["step", "stpe"]}), 400)
    assert (refused["param"], "'stpe'" in refused["message"], "step" in refused["message"]) == ("type", True, True)
    steps = http.get(f"/v1/jobs/{job}/events", params={"type": "step", "limit": 2}).json()
    assert [event["data"]["step"] for event in steps["data"]] == [1, 2]
    assert steps["has_more"]
    rest = http.get(f"/v1/jobs/{job}/events", params={"type": "step", "after": steps["data"][-1]["id"]}).json()
    assert [event["data"]["step"] for event in rest["data"]] == [3, 4]
    newest = http.get(f"/v1/jobs/{job}/events", params={"order": "desc", "limit": 1}).json()["data"]
    assert newest == everything[-1:]


def test_progress_and_metrics_tell_the_steps(live, http):
    job = driving.submit(http)["id"]
    driving.run(live.services, job)
    progress = http.get(f"/v1/jobs/{job}").json()["progress"]
    assert (progress["step"], progress["total_steps"], progress["percent"]) == (4, 4, 100.0)
    assert (progress["tokens"], progress["loss"], progress["tokens_per_second"]) == (128, 1.25, 320.0)
    series = http.get(f"/v1/jobs/{job}/metrics", params={"names": "loss,lr"}).json()["series"]
    assert series["loss"] == [[1, 5.0], [2, 2.5], [3, 5.0 / 3], [4, 1.25]]
    assert set(series) == {"loss", "lr"}
    part = {"names": "loss", "from_step": 2, "to_step": 3}
    assert http.get(f"/v1/jobs/{job}/metrics", params=part).json()["series"]["loss"] == [[2, 2.5], [3, 5.0 / 3]]
    thin = http.get(f"/v1/jobs/{job}/metrics", params={"names": "loss", "max_points": 2}).json()["series"]["loss"]
    assert thin == [[1, 5.0], [4, 1.25]]


def test_logs_are_the_last_lines_of_a_rank_as_plain_text(live, http):
    job = driving.submit(http)["id"]
    assert "no log" in envelope(http.get(f"/v1/jobs/{job}/logs"), 404)["message"]
    folder = live.services.settings.runs / job / "1" / "logs"
    folder.mkdir(parents=True)
    (folder / "rank-1.log").write_text("one\ntwo\nthree\n")
    answer = http.get(f"/v1/jobs/{job}/logs", params={"rank": 1, "tail": 2})
    assert answer.text == "two\nthree\n"
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


def test_the_log_of_a_job_is_that_of_the_rank_it_failed_by_where_that_left_one_else_of_the_first(live, http):
    job = driving.submit(http)["id"]
    folder = live.services.settings.runs / job / "1" / "logs"
    folder.mkdir(parents=True)
    (folder / "rank-0.log").write_text("waits for rank 1\n")

    def told() -> tuple[str, str]:
        answer = http.get(f"/v1/jobs/{job}/logs")
        return answer.headers["x-log-rank"], answer.text

    assert told() == ("0", "waits for rank 1\n")
    driving.fail(live.services, job, driving.run(live.services, job))
    assert http.get(f"/v1/jobs/{job}").json()["error"]["rank"] == 1
    assert told() == ("0", "waits for rank 1\n")
    (folder / "rank-1.log").write_text("out of memory\n")
    assert told() == ("1", "out of memory\n")
    assert http.get(f"/v1/jobs/{job}/logs", params={"rank": 0}).text == "waits for rank 1\n"
    # What it failed by is past once it is queued again.
    http.post(f"/v1/jobs/{job}/retry")
    assert told() == ("0", "waits for rank 1\n")


def test_checkpoints_are_listed_newest_first(live, http, tmp_path):
    job = driving.submit(http)["id"]
    fence = driving.run(live.services, job)
    (tmp_path / "manifest.json").write_text("{}")
    for step in (2, 4):
        checkpoints.publish(live.services, job, fence=fence, step=step, folder=tmp_path, metrics={"loss": 1.0})
    listed = http.get(f"/v1/jobs/{job}/checkpoints").json()["data"]
    assert [(one["step"], one["object"], one["bytes"]) for one in listed] == [
        (4, "job.checkpoint", 2),
        (2, "job.checkpoint", 2),
    ]
    page = http.get(f"/v1/jobs/{job}/checkpoints", params={"limit": 1}).json()
    assert page["has_more"]
    rest = http.get(f"/v1/jobs/{job}/checkpoints", params={"after": page["data"][0]["id"]}).json()["data"]
    assert rest == listed[1:]


def test_a_checkpoint_that_its_run_went_back_from_is_marked(live, http, tmp_path):
    job = driving.submit(http)["id"]
    fence = driving.run(live.services, job)
    (tmp_path / "manifest.json").write_text("{}")
    for step in (2, 4):
        checkpoints.publish(live.services, job, fence=fence, step=step, folder=tmp_path, metrics={})
    with live.services.db.session() as session:
        jobs.record(session, job, fence=fence, events=[RolledBack(seq=100, time=0.0, step=2, from_step=4, rows=4)])
    checkpoints.publish(live.services, job, fence=fence, step=4, folder=tmp_path, metrics={})
    listed = http.get(f"/v1/jobs/{job}/checkpoints").json()["data"]
    assert [(one["step"], one["abandoned"]) for one in listed] == [(4, False), (4, True), (2, False)]


def test_who_holds_a_slot_is_told_to_its_project_alone(live, http):
    job = driving.submit(http)["id"]
    driving.run(live.services, job)

    def slots(client):
        (node,) = (node for node in client.get("/v1/nodes").json()["data"] if node["id"] == f"node-{job}")
        assert node["alive"]
        return node["slots"]

    assert slots(http)[0] == {"index": 0, "job_id": job, "held": True}
    with live.http(live.key()) as stranger:
        assert slots(stranger)[0] == {"index": 0, "job_id": None, "held": True}
        assert slots(stranger)[1] == {"index": 1, "job_id": None, "held": False}
