"""Plans over HTTP: what a submit would make, nothing queued, and refused in the same words."""

import shutil

import pytest

from core import nodes
from core.models import Model, Node
from engine.plan.cluster import Device, Link, as_facts
from tests.api import driving
from tests.api.test_files import parquet
from tests.api.test_models import MODEL
from tests.api.test_requests import envelope


def test_a_plan_is_what_a_submit_makes_and_queues_nothing(live, http):
    file = driving.upload(http)
    row = b'{"question": "2 + 2?", "choices": ["3", "4"], "answer": 1}'
    questions = driving.upload(http, row, "questions.jsonl")["id"]
    data = {"train": [file["id"]], "validation": file["id"], "evaluation": questions, "seq_len": 32}
    asked = driving.spec(file["id"], data=data)
    with live.http(live.key("read")) as reader:
        # Another project's file is none.
        assert envelope(reader.post("/v1/plans", json=asked), 404)["param"] == "data.train.0"
    plan = http.post("/v1/plans", json=asked).json()
    assert http.get("/v1/jobs").json()["data"] == []
    job = http.post("/v1/jobs", json=asked).json()
    now = {"now": None}
    assert plan["run_config"]["data"] | now == job["run_config"]["data"] | now
    assert {**plan["run_config"], "data": 0} == {**job["run_config"], "data": 0}
    assert (plan["slots"], plan["bytes_per_rank"]) == (job["slots"], job["plan"]["bytes_per_rank"])
    assert [(one["use"], one["id"], one["bytes"]) for one in plan["data"]] == [
        ("train", file["id"], len(driving.TEXT)), ("validation", file["id"], len(driving.TEXT)),
        ("evaluation", questions, len(row)),
    ]  # fmt: skip
    assert plan["data"][0]["report"]["characters"] == len(driving.TEXT)


def test_a_plan_counts_bytes_flops_and_disk_as_by_hand(http):
    file = driving.upload(http)["id"]
    training = {"steps": 4, "global_batch": 2, "keep_checkpoints": 3, "precision": "fp32"}
    plan = http.post("/v1/plans", json=driving.spec(file, training=training)).json()
    # A layer has four squares of 16, three matrices of 16 x 32 and two norms; tied embeddings of 260 entries; a norm.
    layer = 4 * 16 * 16 + 3 * 16 * 32
    assert plan["parameters"] == plan["trainable_parameters"] == layer + 2 * 16 + 260 * 16 + 16
    # Two rows of 32 tokens: six operations a weight and token (Kaplan et al. 2020), and for each of 32 x 32 pairs of a
    # row two products of 16 forward, twice that backward.
    assert plan["flops_per_step"] == 2 * 32 * 6 * (layer + 260 * 16) + 2 * 32 * 32 * 2 * 2 * 16 * 3
    # Weights and Adam's two moments in fp32; three are kept, and a fourth is there until the oldest goes.
    assert plan["disk"]["checkpoint_bytes"] == 12 * plan["parameters"]
    assert plan["disk"]["result_bytes"] == 4 * plan["parameters"]
    assert plan["disk"]["total_bytes"] == (4 * 12 + 4) * plan["parameters"]
    phases = plan["bytes_by_phase"]
    assert list(phases) == ["steady", "forward", "backward", "optimizer", "checkpoint"]
    # On a CPU a checkpoint's copy lies in the same memory.
    assert max(phases.values()) == phases["checkpoint"] == plan["bytes_per_rank"]["total"]
    assert plan["bytes_per_rank"]["snapshot"] == 12 * plan["parameters"]
    layout = plan["layout"]
    assert (layout["ranks"], layout["global_batch"], layout["seq_len"], layout["precision"]) == (1, 2, 32, "fp32")
    assert layout["micro_batch"] * layout["micro_batches"] == 2
    assert (plan["estimated_steps"], plan["estimated_tokens"]) == (4, 4 * 2 * 32)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"colour": 1}, id="an unknown field"),
        pytest.param({"parallel": {"tensor": 3}}, id="heads that tensor does not divide"),
        pytest.param({"data": {"train": ["file-00"]}}, id="a file that is not there"),
        pytest.param({"kind": "finetune", "model": {"base": "none"}}, id="no such base"),
    ],
)
def test_what_cannot_run_is_refused_in_the_words_of_a_submit(http, change):
    body = driving.spec(driving.upload(http)["id"], **change)
    planned, submitted = http.post("/v1/plans", json=body), http.post("/v1/jobs", json=body)
    assert planned.status_code == submitted.status_code >= 400
    assert planned.json() == submitted.json()


def test_a_document_of_ids_longer_than_a_row_is_refused_by_plan_and_submit_alike(live, http):
    folder = live.services.settings.models / "of-short-rows"
    folder.mkdir(parents=True)
    for path, content in MODEL.items():
        (folder / path.partition("/")[2]).write_bytes(content)
    ids = [[1, 2], [3] * 18, [4] * 18]
    file = driving.upload(http, parquet(input_ids=ids, loss_mask=[[1] * len(each) for each in ids]), "ids")["id"]
    body = {"kind": "finetune", "model": {"base": folder.name}, "data": {"train": [file], "seq_len": 16}}
    planned, submitted = (http.post(path, json=body) for path in ("/v1/plans", "/v1/jobs"))
    error = envelope(planned, 400)
    assert error == envelope(submitted, 400)
    assert error["param"] == "data.train.0"
    assert f"document 2 of {file} has 18 ids" in error["message"]
    body["data"] |= {"seq_len": 17}
    assert http.post("/v1/plans", json=body).status_code == 200
    shutil.rmtree(folder)


def test_a_plan_says_what_the_job_would_wait_for(live, http):
    file = driving.upload(http)["id"]
    with live.services.db.session() as session:
        for node in nodes.alive(session):
            nodes.drain(session, node.name)
    waits = http.post("/v1/plans", json=driving.spec(file)).json()["queue"]
    assert "trainshed worker" in waits["reason"]
    with live.services.db.session() as session:
        nodes.register(session, f"node-{file}", device="cpu", num_slots=64)
    now = http.post("/v1/plans", json=driving.spec(file, priority=100)).json()["queue"]
    assert now["position"] >= 1
    assert now["reason"] is None
    with live.services.db.session() as session:
        nodes.drain(session, f"node-{file}")


def test_a_base_that_is_only_planned_with_is_not_registered(live, http):
    folder = live.services.settings.models / "only-planned"
    folder.mkdir(parents=True)
    for path, content in MODEL.items():
        (folder / path.partition("/")[2]).write_bytes(content)
    body = {"kind": "finetune", "model": {"base": folder.name}, "data": {"train": [driving.upload(http)["id"]]}}
    plan = http.post("/v1/plans", json=body).json()
    assert plan["trainable_parameters"] < plan["parameters"]
    with live.services.db.reading() as session:
        assert session.get(Model, folder.name) is None
    shutil.rmtree(folder)


def test_a_plan_says_how_long_it_takes_by_what_a_node_measured_and_which_layouts_would_do(live, http):
    device = Device("toy", {"fp32": 1e9}, bandwidth=1e9, efficiency=1.0, launch=1e-6, measured=True)
    file = driving.upload(http)["id"]
    asked = driving.spec(file, training={"steps": 4, "global_batch": 4}, resources={"gpus": 2})
    before = http.post("/v1/plans", json=asked).json()
    assert before["time"]["step_seconds"] is None
    assert before["time"]["calibration"].startswith("not calibrated yet")
    assert (before["alternatives"], before["lost"]) == ([], [])
    with live.services.db.session() as session:
        nodes.register(session, "slow", device="cpu", num_slots=2, rates=as_facts(device, Link(1e8, 1e-4)))
    try:
        plan = http.post("/v1/plans", json=asked).json()
        job = http.post("/v1/jobs", json=asked).json()
    finally:
        with live.services.db.session() as session:
            session.delete(session.get_one(Node, "slow"))
    time = plan["time"]
    assert sum(time["seconds_by_term"].values()) == pytest.approx(time["step_seconds"])
    assert time["eta_seconds"] == pytest.approx(4 * time["step_seconds"])
    assert time["calibration"] == "measured on a node (toy)"
    # What auto takes is the best of the five.
    best = plan["alternatives"][0]
    assert (best["parallel"], best["micro_batch"]) == (plan["layout"]["parallel"], plan["layout"]["micro_batch"])
    assert best["seconds"]["total"] == pytest.approx(time["step_seconds"])
    assert len(plan["alternatives"]) == 5
    assert plan["lost"]
    assert job["plan"]["step_seconds"] == pytest.approx(time["step_seconds"])
    # Nothing has run.
    assert job["compared"] == {}
