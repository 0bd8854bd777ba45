"""Models over HTTP, in OpenAI's shapes: folders found by name, results of jobs, names with slashes."""

import json
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event

import pytest

from core import catalog, jobs
from engine.families import shape_of_config
from engine.naming import shapes_of
from tests import make
from tests.api import driving
from tests.api.test_requests import envelope
from tests.fakes.hub import COMMIT, hub
from tests.workers.test_lease import until
from workers.fetcher import Fetcher
from workers.orders import Orders

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 260,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
MODEL = {
    "model/config.json": json.dumps(CONFIG).encode(),
    "model/model.safetensors": make.weights(
        {name: ("F32", sizes) for name, sizes in shapes_of(shape_of_config(CONFIG)).items()}
    ),
    "model/tokenizer.json": make.tokenizer(260),
}


@pytest.fixture
def base(live):
    """A folder in the models directory."""
    folder = live.services.settings.models / "tiny-base"
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in MODEL.items():
        (folder / path.partition("/")[2]).write_bytes(content)
    return folder.name


def test_a_folder_under_the_models_directory_is_a_model_for_everyone(live, http, base):
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    (found,) = (model for model in listed["data"] if model["id"] == base)
    assert (found["object"], found["owned_by"], found["job_id"]) == ("model", "trainshed", None)
    assert isinstance(found["created"], int)
    assert found["shape"]["hidden_size"] == 16
    assert http.get(f"/v1/models/{base}").json() == found
    with live.http(live.key()) as stranger:
        assert stranger.get(f"/v1/models/{base}").status_code == 200


def test_the_model_of_a_job_is_its_projects_alone_and_can_be_named_with_slashes(live, http, tmp_path):
    job = driving.finished(live.services, http, tmp_path, MODEL)
    made = http.get(f"/v1/jobs/{job}").json()["model"]
    assert http.get(f"/v1/models/{made}").json()["job_id"] == job
    name = f"ft:tiny/mine::{job}"
    registered = http.post("/v1/models", json={"id": name, "source": {"job": job}})
    assert registered.status_code == 201
    for path in (name, name.replace("/", "%2F")):
        assert http.get(f"/v1/models/{path}").json() == registered.json()
    with live.http(live.key()) as stranger:
        for model in (made, name):
            envelope(stranger.get(f"/v1/models/{model}"), 404)
        assert not {made, name} & {model["id"] for model in stranger.get("/v1/models").json()["data"]}


def test_a_model_is_deleted_by_its_name_and_what_a_job_made_stays(live, http, tmp_path):
    job = driving.finished(live.services, http, tmp_path, MODEL)
    made, name = http.get(f"/v1/jobs/{job}").json()["model"], f"ft:tiny/mine::{job}"
    http.post("/v1/models", json={"id": name, "source": {"job": job}})
    with live.http(live.key()) as stranger:
        envelope(stranger.delete(f"/v1/models/{made}"), 404)
    gone = {"object": "model", "deleted": True}
    assert http.delete(f"/v1/models/{name.replace('/', '%2F')}").json() == {"id": name, **gone}
    assert http.get(f"/v1/models/{made}").status_code == 200
    needing = driving.submit(http, kind="finetune", model={"base": made}, tokenizer={"from": "base"})["id"]
    answer = http.delete(f"/v1/models/{made}")
    assert envelope(answer, 409)["code"] == "in_use"
    assert answer.headers["x-should-retry"] == "false"
    http.post(f"/v1/jobs/{needing}/cancel")
    assert http.delete(f"/v1/models/{made}").json() == {"id": made, **gone}
    for model in (made, name):
        envelope(http.get(f"/v1/models/{model}"), 404)
        envelope(http.delete(f"/v1/models/{model}"), 404)
    assert http.get(f"/v1/jobs/{job}/artifacts/model/config.json").content == MODEL["model/config.json"]


def test_what_is_there_for_everyone_is_deleted_by_the_organisation_or_where_it_lies(organization, http, base):
    name = "shared-by-all"
    assert organization.post("/v1/models", json={"id": name, "source": f"dir:{base}"}).status_code == 201
    assert envelope(http.delete(f"/v1/models/{name}"), 403)["code"] == "insufficient_scope"
    assert organization.delete(f"/v1/models/{name}").json()["deleted"]
    envelope(http.get(f"/v1/models/{name}"), 404)
    assert "take the folder away" in envelope(http.delete(f"/v1/models/{base}"), 400)["message"]
    assert http.get(f"/v1/models/{base}").status_code == 200


def test_a_folder_gets_another_name(live, http, base):
    name = f"another-{live.key()[-6:]}"
    answer = http.post("/v1/models", json={"id": name, "source": f"dir:{base}"})
    assert answer.status_code == 201, answer.text
    assert http.get(f"/v1/models/{name}").json()["id"] == name
    envelope(http.post("/v1/models", json={"id": name, "source": f"dir:{base}"}), 400)


@pytest.mark.parametrize(
    ("source", "status"),
    [
        pytest.param("dir:../../etc", 404, id="a path out of it"),
        pytest.param("dir:nothing", 404, id="a folder that is not there"),
        pytest.param("ftp://x", 400, id="a source of no kind"),
        pytest.param({"job": "job-0"}, 404, id="a job that is not there"),
        pytest.param({"job": "job-0", "x": 1}, 400, id="an unknown field"),
        pytest.param(7, 400, id="a number"),
    ],
)
def test_what_cannot_be_a_model_is_refused(http, source, status):
    error = envelope(http.post("/v1/models", json={"id": "new", "source": source}), status)
    assert error["param"].startswith("source")


def test_a_base_serves_a_fine_tune(http, base):
    file = driving.upload(http)["id"]
    body = {"kind": "finetune", "model": {"base": base}, "data": {"train": [file]}}
    answer = http.post("/v1/jobs", json=body)
    assert answer.status_code == 201, answer.text
    assert answer.json()["run_config"]["lora"]["rank"] == 16


def test_a_folder_on_a_host_that_does_not_answer_keeps_nobody_waiting_for_long(live, http, base, monkeypatch, request):
    is_there, back = catalog._is_model, Event()
    request.addfinalizer(back.set)

    def answers(folder):
        return (folder.name != "away" or back.wait()) and is_there(folder)

    monkeypatch.setattr(catalog, "_is_model", answers)
    (live.services.settings.models / "away").mkdir()
    monkeypatch.setattr(catalog._folders, "seconds", 1.0)
    body = {"kind": "finetune", "model": {"base": "away"}, "data": {"train": [driving.upload(http)["id"]]}}
    cancelled = driving.submit(http)["id"]
    http.post(f"/v1/jobs/{cancelled}/cancel")
    with live.services.db.session() as session:
        jobs.find(session, cancelled).spec = body
    retried = http.post(f"/v1/jobs/{cancelled}/retry")
    asked = [retried, http.post("/v1/jobs", json=body), http.post("/v1/plans", json=body), http.get("/v1/models/away")]
    for answer in asked:
        error = envelope(answer, 503)
        assert error["code"] == "unavailable"
        assert "'away' in the models directory does not answer" in error["message"]
    listed = [model["id"] for model in http.get("/v1/models").json()["data"]]
    assert base in listed
    assert "away" not in listed
    monkeypatch.setattr(catalog._folders, "seconds", 60)
    assert http.get(f"/v1/models/{base}").status_code == 200
    assert driving.submit(http)["state"] == "queued"
    back.set()
    until(lambda: not catalog._folders._under_way)
    assert "has no config.json" in envelope(http.post("/v1/jobs", json=body), 400)["message"]
    assert http.get("/v1/models").status_code == 200


def test_while_some_wait_for_folders_that_hang_others_create(live, http, monkeypatch, request):
    is_there, back, reached = catalog._is_model, Event(), set()
    request.addfinalizer(back.set)

    def answers(folder):
        if not folder.name.startswith("gone"):
            return is_there(folder)
        reached.add(folder.name)
        return back.wait() and is_there(folder)

    monkeypatch.setattr(catalog, "_is_model", answers)
    monkeypatch.setattr(catalog._folders, "seconds", 60)
    models, file, job = live.services.settings.models, driving.upload(http)["id"], driving.submit(http)["id"]
    for name in ("gone-0", "gone-1", "gone-2", "gone-3", "gone-4", "gone-5"):
        (models / name).mkdir()
    body = {"kind": "finetune", "data": {"train": [file]}}
    fine_tune = {"model": "gone-2", "training_file": file}
    asked = [
        ("POST", "/v1/jobs", body | {"model": {"base": "gone-0"}}, 400),
        ("POST", "/v1/jobs", body | {"model": {"base": "gone-1"}}, 400),
        ("POST", "/v1/fine_tuning/jobs", fine_tune, 400),
        ("POST", "/v1/completions", {"model": "gone-3", "prompt": "a"}, 400),
        ("POST", "/v1/models", {"id": "gone-4", "source": {"job": job}}, 404),
        ("DELETE", "/v1/models/gone-5", None, 400),
    ]
    with ThreadPoolExecutor(len(asked)) as clients:
        waiting = [clients.submit(http.request, method, path, json=json) for method, path, json, _ in asked]
        until(lambda: len(reached) == len(asked))
        with live.http(live.key()) as another:
            assert driving.submit(another)["state"] == "queued"
        assert not wait(waiting, 0).done
        back.set()
        assert [answer.result().status_code for answer in waiting] == [status for *_, status in asked]


def test_a_models_directory_that_hangs_is_asked_once_whatever_the_names(live, http, base, monkeypatch, request):
    statvfs, back, asked = catalog.statvfs, Event(), []
    request.addfinalizer(back.set)

    def hang(path):
        asked.append(path)
        return back.wait() and statvfs(path)

    monkeypatch.setattr(catalog, "statvfs", hang)
    monkeypatch.setattr(catalog._folders, "seconds", 0.05)
    for name in ("a", "b", "c"):
        error = envelope(http.get(f"/v1/models/{name}"), 503)
        assert error["message"].startswith("The models directory does not answer: ")
    assert http.get("/v1/models").status_code == 200, "what has a row is still listed"
    assert asked == [live.services.settings.models]
    monkeypatch.setattr(catalog._folders, "seconds", 60)
    back.set()
    until(lambda: not catalog._folders._under_way)
    assert http.get(f"/v1/models/{base}").status_code == 200


@pytest.fixture
def fake(live, monkeypatch):
    """A hub with `MODEL`, which is the server's."""
    files = {path.partition("/")[2]: content for path, content in MODEL.items()}
    with hub("org/tiny", files, large=frozenset({"model.safetensors"}), token="hf_secret") as fake:
        told = {"hf_endpoint": fake.url, "hf_token": "hf_secret"}
        monkeypatch.setattr(live.services, "settings", live.services.settings.model_copy(update=told))
        yield fake


def test_a_base_of_a_hub_is_pinned_at_once_and_fetched_in_the_background(live, organization, http, fake, request):
    name = "hub/tiny"
    request.addfinalizer(lambda: live.services.storage.delete_tree("hub"))
    made = organization.post("/v1/models", json={"id": name, "source": "hf://org/tiny@v1.0"})
    assert made.status_code == 201, made.text
    total = sum(map(len, fake.files.values()))
    download = {"source": f"hf://org/tiny@{COMMIT}", "bytes": 0, "total_bytes": total, "reason": None}
    assert (made.json()["status"], made.json()["download"]) == ("downloading", download)
    assert made.json()["shape"]["hidden_size"] == 16
    assert not fake.of("model.safetensors")
    body = {"kind": "finetune", "model": {"base": name}, "data": {"train": [driving.upload(http)["id"]]}}
    for path, asked in (("jobs", body), ("plans", body), ("completions", {"model": name, "prompt": "a"})):
        refused = http.post(f"/v1/{path}", json=asked)
        error = envelope(refused, 409)
        assert error["code"] == "model_not_ready"
        assert f"0 of {total:,} bytes so far" in error["message"]
        assert refused.headers["x-should-retry"] == "false"
    Fetcher(live.services).look(Orders())
    found = http.get(f"/v1/models/{name}").json()
    assert (found["status"], found["download"]) == ("ready", download | {"bytes": total})
    assert found in http.get("/v1/models").json()["data"]
    assert http.post("/v1/jobs", json=body).status_code == 201
    assert "hf_secret" not in http.get("/v1/models").text


def test_a_job_whose_base_is_fetched_anew_is_retried_once_that_is_there(live, organization, http, fake, request):
    request.addfinalizer(lambda: live.services.storage.delete_tree("hub"))
    made = {"id": "hub/again", "source": "hf://org/tiny@v1.0"}
    organization.post("/v1/models", json=made)
    Fetcher(live.services).look(Orders())
    job = driving.submit(http, kind="finetune", model={"base": made["id"]}, tokenizer={"from": "base"})["id"]
    http.post(f"/v1/jobs/{job}/cancel")
    organization.delete(f"/v1/models/{made['id']}")
    assert "not there any more" in envelope(http.post(f"/v1/jobs/{job}/retry"), 409)["message"]
    organization.post("/v1/models", json=made)
    refused = envelope(http.post(f"/v1/jobs/{job}/retry"), 409)
    assert refused["code"] == "model_not_ready"
    assert refused["message"].startswith("The job can't be retried yet: hub/again is still being fetched")
    Fetcher(live.services).look(Orders())
    assert http.post(f"/v1/jobs/{job}/retry").json()["state"] == "queued"
    http.post(f"/v1/jobs/{job}/cancel")


@pytest.mark.parametrize(
    ("source", "status", "words"),
    [
        pytest.param("hf://org/other", 404, "is not there, or is private or gated", id="another repository"),
        pytest.param("hf://org", 400, "hf://org/name@revision", id="no repository"),
        pytest.param("hf://org/tiny@../main", 400, "hf://org/name@revision", id="no revision"),
    ],
)
def test_what_cannot_be_fetched_is_refused_at_the_door(http, fake, source, status, words):
    error = envelope(http.post("/v1/models", json={"id": "new", "source": source}), status)
    assert error["param"] == "source"
    assert words in error["message"]


def test_a_hub_is_asked_by_admins_alone_and_not_where_the_operator_says_so(live, http, fake, monkeypatch):
    body = {"id": "new", "source": "hf://org/tiny"}
    with live.http(live.key("submit")) as submitter:
        envelope(submitter.post("/v1/models", json=body), 403)
    told = {"hf_hub_offline": True}
    monkeypatch.setattr(live.services, "settings", live.services.settings.model_copy(update=told))
    assert "HF_HUB_OFFLINE" in envelope(http.post("/v1/models", json=body), 400)["message"]
    assert not fake.asked
    told = {"hf_hub_offline": False, "hf_endpoint": "http://127.0.0.1:1"}
    monkeypatch.setattr(live.services, "settings", live.services.settings.model_copy(update=told))
    assert "can't be asked now" in envelope(http.post("/v1/models", json=body), 503)["message"]


def test_no_model_takes_the_name_of_a_checkpoint(live, http):
    answer = http.post("/v1/models", json={"id": "ftckpt-0123456789abcdef01234567", "source": "hf://org/name"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "id"
    assert "choose another" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["a/../../x", "a/..", "a/./b", "a/.hidden", "a//b", "a/"])
def test_no_model_has_a_name_that_a_url_cannot_hold(http, name):
    """RFC 3986, 5.2.4: who sends a URL removes the segments `.` and `..` from it."""
    error = envelope(http.post("/v1/models", json={"id": name, "source": "dir:anything"}), 400)
    assert error["param"] == "id"
    assert "choose another" in error["message"]
