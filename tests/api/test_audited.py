"""Every route that changes something leaves an entry in the audit log, by the id of the request that changed it.

The routes come from the OpenAPI document: one that is added later fails here until it says how it succeeds, or why it
leaves no entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from core.models import AuditLog
from core.projects import DEFAULT_PROJECT
from tests import make
from tests.api import driving
from tests.api.conftest import Live, new_project
from tests.api.test_models import MODEL

WRITING = ("post", "patch", "put", "delete")
UNAUDITED = {
    "post /v1/plans": "nothing is kept",
    "post /v1/files/{file_id}/preview": "nothing is kept",
    "post /v1/completions": "nothing is kept",
    "post /v1/chat/completions": "nothing is kept",
    "post /v1/uploads/{upload_id}/parts": "there are thousands of one upload, which is told when it begins and ends",
}


@dataclass
class Scene:
    """What an admin of the organisation has, made when it is first asked for."""

    live: Live
    http: httpx.Client
    folder: Path
    made: dict[str, Any] = field(default_factory=dict)

    def base(self) -> str:
        folder = self.live.services.settings.models / "audited-base"
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in MODEL.items():
            (folder / path.partition("/")[2]).write_bytes(content)
        return folder.name

    def file(self) -> str:
        id_: str = driving.upload(self.http)["id"]
        return id_

    def job(self, state: str = "queued", *, tuned: bool = False) -> str:
        """A job in a state; one that is `tuned` is OpenAI's too."""
        if tuned:
            body = {"model": self.base(), "training_file": self.file()}
            id_: str = self.http.post("/v1/fine_tuning/jobs", json=body).json()["id"]
        else:
            id_ = driving.submit(self.http)["id"]
        if state == "paused":
            self.http.post(f"/v1/jobs/{id_}/pause")
        if state == "failed":
            driving.fail(self.live.services, id_, driving.run(self.live.services, id_))
        return id_

    def checkpoint(self) -> str:
        job = self.job()
        with self.live.services.db.session() as session:
            return make.checkpoint(session, session.get_one(driving.jobs.Job, job), 4).id

    def permission(self) -> str:
        checkpoint = self.checkpoint()
        body = {"project_ids": [self.project()]}
        path = f"/v1/fine_tuning/checkpoints/{checkpoint}/permissions"
        return f"{path}/{self.http.post(path, json=body).json()['data'][0]['id']}"

    def upload(self, *, full: bool = False) -> str:
        body = {"bytes": len(driving.TEXT), "filename": "a.txt", "purpose": "pretrain"}
        id_: str = self.http.post("/v1/uploads", json=body).json()["id"]
        if full:
            form = {"data": ("part", driving.TEXT)}
            self.made[id_] = self.http.post(f"/v1/uploads/{id_}/parts", files=form).json()["id"]
        return id_

    def model(self) -> str:
        body = {"id": f"named-{make.new_id('x')}", "source": f"dir:{self.base()}"}
        id_: str = self.http.post("/v1/models", json=body).json()["id"]
        return id_

    def project(self) -> str:
        with self.live.services.db.session() as session:
            return new_project(session)

    def key(self) -> str:
        id_: str = self.http.post("/v1/keys", json={"name": "a"}).json()["id"]
        return id_

    def cookie(self) -> str:
        set_ = self.http.post("/v1/visits").headers["set-cookie"]
        self.http.cookies.clear()
        return set_.partition(";")[0]

    def endpoint(self) -> str:
        body = {"name": "a", "url": "http://127.0.0.1:9/hook", "event_types": ["job.failed"]}
        id_: str = self.http.post("/v1/webhook_endpoints", json=body).json()["id"]
        return id_


Asked = tuple[str, dict[str, Any]]
"""A path, and what is sent there."""
SUCCEEDS: dict[str, Callable[[Scene], Asked]] = {
    "post /v1/jobs": lambda of: ("/v1/jobs", {"json": driving.spec(of.file())}),
    "patch /v1/jobs/{job_id}": lambda of: (f"/v1/jobs/{of.job()}", {"json": {"priority": 3}}),
    "delete /v1/jobs/{job_id}": lambda of: (f"/v1/jobs/{of.job('failed')}", {}),
    "post /v1/jobs/{job_id}/cancel": lambda of: (f"/v1/jobs/{of.job()}/cancel", {}),
    "post /v1/jobs/{job_id}/pause": lambda of: (f"/v1/jobs/{of.job()}/pause", {}),
    "post /v1/jobs/{job_id}/resume": lambda of: (f"/v1/jobs/{of.job('paused')}/resume", {}),
    "post /v1/jobs/{job_id}/retry": lambda of: (f"/v1/jobs/{of.job('failed')}/retry", {}),
    "post /v1/fine_tuning/jobs": lambda of: (
        "/v1/fine_tuning/jobs", {"json": {"model": of.base(), "training_file": of.file()}},
    ),
    "post /v1/fine_tuning/jobs/{job_id}/cancel": lambda of: (
        f"/v1/fine_tuning/jobs/{of.job(tuned=True)}/cancel", {},
    ),
    "post /v1/fine_tuning/jobs/{job_id}/pause": lambda of: (f"/v1/fine_tuning/jobs/{of.job(tuned=True)}/pause", {}),
    "post /v1/fine_tuning/jobs/{job_id}/resume": lambda of: (
        f"/v1/fine_tuning/jobs/{of.job('paused', tuned=True)}/resume", {},
    ),
    "post /v1/fine_tuning/checkpoints/{checkpoint}/permissions": lambda of: (
        f"/v1/fine_tuning/checkpoints/{of.checkpoint()}/permissions", {"json": {"project_ids": [of.project()]}},
    ),
    "delete /v1/fine_tuning/checkpoints/{checkpoint}/permissions/{permission_id}": lambda of: (of.permission(), {}),
    "post /v1/files": lambda of: (
        "/v1/files", {"data": {"purpose": "pretrain"}, "files": {"file": ("a.txt", driving.TEXT)}},
    ),
    "delete /v1/files/{file_id}": lambda of: (f"/v1/files/{of.file()}", {}),
    "post /v1/uploads": lambda of: (
        "/v1/uploads", {"json": {"bytes": 9, "filename": "a.txt", "purpose": "pretrain"}},
    ),
    "post /v1/uploads/{upload_id}/complete": lambda of: (
        f"/v1/uploads/{(upload := of.upload(full=True))}/complete", {"json": {"part_ids": [of.made[upload]]}},
    ),
    "post /v1/uploads/{upload_id}/cancel": lambda of: (f"/v1/uploads/{of.upload()}/cancel", {}),
    "post /v1/models": lambda of: ("/v1/models", {"json": {"id": "audited", "source": f"dir:{of.base()}"}}),
    "delete /v1/models/{model}": lambda of: (f"/v1/models/{of.model()}", {}),
    "post /v1/projects": lambda of: ("/v1/projects", {"json": {"name": "a"}}),
    "patch /v1/projects/{project_id}": lambda of: (f"/v1/projects/{of.project()}", {"json": {"name": "b"}}),
    "post /v1/projects/{project_id}/archive": lambda of: (f"/v1/projects/{of.project()}/archive", {}),
    "post /v1/keys": lambda of: ("/v1/keys", {"json": {"name": "a"}}),
    "delete /v1/keys/{key_id}": lambda of: (f"/v1/keys/{of.key()}", {}),
    "post /v1/visits": lambda of: ("/v1/visits", {}),
    "delete /v1/visits": lambda of: ("/v1/visits", {"headers": {"cookie": of.cookie()}}),
    "post /v1/webhook_endpoints": lambda of: (
        "/v1/webhook_endpoints",
        {"json": {"name": "a", "url": "http://127.0.0.1:9/hook", "event_types": ["job.failed"]}},
    ),
    "post /v1/webhook_endpoints/{endpoint_id}": lambda of: (
        f"/v1/webhook_endpoints/{of.endpoint()}", {"json": {"name": "b"}},
    ),
    "delete /v1/webhook_endpoints/{endpoint_id}": lambda of: (f"/v1/webhook_endpoints/{of.endpoint()}", {}),
    "post /v1/webhook_endpoints/{endpoint_id}/rotate_secret": lambda of: (
        f"/v1/webhook_endpoints/{of.endpoint()}/rotate_secret", {},
    ),
    # Nobody listens there, so that it is no success; but something was sent all the same.
    "post /v1/webhook_endpoints/{endpoint_id}/test": lambda of: (
        f"/v1/webhook_endpoints/{of.endpoint()}/test", {"json": {"event_type": "job.failed"}},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def scene(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with live.http(live.key(project=DEFAULT_PROJECT)) as http:
        yield Scene(live, http, tmp_path_factory.mktemp("audited"))


def test_each_route_that_writes_says_how_it_succeeds_or_why_it_leaves_no_entry(live: Live) -> None:
    with live.http(None) as http:
        paths = http.get("/openapi.json").json()["paths"]
    writing = {f"{method} {path}" for path, methods in paths.items() for method in methods if method in WRITING}
    assert writing == {*SUCCEEDS, *UNAUDITED}


@pytest.mark.parametrize("route", SUCCEEDS)
def test_what_was_changed_is_in_the_audit_log(scene: Scene, route: str) -> None:
    path, sent = SUCCEEDS[route](scene)
    answer = scene.http.request(route.partition(" ")[0], path, **sent)
    assert answer.is_success or route.endswith("/test"), answer.text
    of_it = select(AuditLog).where(AuditLog.request_id == answer.headers["x-request-id"])
    with scene.live.services.db.reading() as session:
        entries = session.scalars(of_it).all()
    assert entries, f"{route} succeeded, and nobody can see who did it"
    assert {(entry.actor_project_id, bool(entry.actor_key_id), bool(entry.object_id)) for entry in entries} == {
        (DEFAULT_PROJECT, True, True)
    }
