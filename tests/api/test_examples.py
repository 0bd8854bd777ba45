"""The bodies that the page shows, sent as they are written, but for the ids of what is there."""

from __future__ import annotations

import json
import shutil
import socket

import pytest

from api import examples
from api.examples import BODIES
from core import jobs
from core.states import JobState
from tests.api import driving
from tests.api.test_fine_tuning import checkpoint
from tests.api.test_models import MODEL
from tests.api.test_openapi import operations, page
from tests.api.test_requests import envelope
from tests.cases import bases

__all__ = ["page"]

LINE = b'{"prompt":"a","completion":"b"}\n'
UNDELIVERED = "POST /v1/webhook_endpoints/{endpoint_id}/test"
SAMPLES = {"POST /v1/completions", "POST /v1/chat/completions"}


def test_every_route_that_takes_json_shows_a_body(page):
    takes = {
        name for name, operation in operations(page)
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    }  # fmt: skip
    assert takes - set(BODIES) == {"POST /v1/jobs", "POST /v1/plans"}
    assert set(BODIES) <= takes
    assert page["components"]["schemas"]["JobSpec"]["examples"]


@pytest.fixture
def send(live, organization, tmp_path, monkeypatch):
    """Send the body of an operation, with the ids of what was made before; its answer."""
    real = socket.getaddrinfo

    def offline(host, *rest, **more):
        if host == "example.com":
            raise socket.gaierror("no way out of here")
        return real(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", offline)
    models = live.services.settings.models
    bases.write(models / examples.BASE)
    made = driving.finished(live.services, organization, tmp_path, MODEL)
    ids = {
        examples.FILE: driving.upload(organization, LINE, "train.jsonl")["id"],
        examples.JOB: made,
        examples.PROJECT: organization.post("/v1/projects", json={"name": "other"}).json()["id"],
    }

    def send(operation: str, **path: str):
        method, route = operation.split()
        text = json.dumps(BODIES[operation])
        for shown, real in (ids | path).items():
            text = text.replace(shown, real)
        return organization.request(method, route.format_map(path), json=json.loads(text))

    send.made, send.ids = made, ids
    yield send
    shutil.rmtree(models / examples.BASE)


def test_each_body_that_the_page_shows_is_taken(live, organization, send, tmp_path):
    paused = driving.submit(organization, training={"steps": 4, "global_batch": 2})["id"]
    with live.services.db.session() as session:
        jobs.move(session, paused, JobState.PAUSED)
    spec = {"kind": "finetune", "model": {"base": examples.BASE}, "data": {"train": [send.ids[examples.FILE]]}}
    tuned = organization.post("/v1/jobs", json=spec).json()["id"]
    saved = checkpoint(live, tuned, driving.run(live.services, tuned), 2, tmp_path / "saved")
    answers = {
        name: send(name, **path)
        for name, path in {
            "PATCH /v1/jobs/{job_id}": {"job_id": send.made},
            "POST /v1/jobs/{job_id}/resume": {"job_id": paused},
            "POST /v1/fine_tuning/jobs": {},
            "POST /v1/fine_tuning/checkpoints/{checkpoint}/permissions": {"checkpoint": saved},
            "POST /v1/files/{file_id}/preview": {"file_id": send.ids[examples.FILE]},
            "POST /v1/uploads": {},
            "POST /v1/models": {},
            "POST /v1/projects": {},
            "PATCH /v1/projects/{project_id}": {"project_id": send.ids[examples.PROJECT]},
            "POST /v1/keys": {},
            "POST /v1/webhook_endpoints": {},
        }.items()
    }
    upload = answers["POST /v1/uploads"].json()["id"]
    part = organization.post(f"/v1/uploads/{upload}/parts", files={"data": LINE}).json()["id"]
    endpoint = answers["POST /v1/webhook_endpoints"].json()["id"]
    answers["POST /v1/uploads/{upload_id}/complete"] = send(
        "POST /v1/uploads/{upload_id}/complete", upload_id=upload, **{examples.PART: part}
    )
    for name in BODIES:
        if "{endpoint_id}" in name:
            answers[name] = send(name, endpoint_id=endpoint)
    # The endpoint's host is somebody's, so nothing was sent there.
    assert envelope(answers.pop(UNDELIVERED), 400)["code"] == "undelivered"
    for name, answer in answers.items():
        assert answer.is_success, f"{name}: {answer.text}"
    assert set(answers) | {UNDELIVERED} | SAMPLES == set(BODIES)
