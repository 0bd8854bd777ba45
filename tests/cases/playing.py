"""A case folder played: its requests sent over HTTP, and the job that comes of them run by the engine, in here."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import select

from core.models import Job
from engine.config import RunConfig
from engine.data.format import InvalidData
from engine.data.prepare import Prepared, prepare, tokenizer_for
from engine.events import Event
from engine.failure import explain
from engine.stop import StopWish
from engine.tokenizer import Tokenizer
from engine.trainer import train
from tests.api.conftest import Live
from workers.staging import stage


@dataclass(frozen=True)
class Case:
    """A folder with files, the requests that use them, and what must come of it."""

    folder: Path
    said: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Case:
        return cls(folder, json.loads((folder / "expect.json").read_text(encoding="utf-8")))

    @property
    def expect(self) -> dict[str, Any]:
        return self.said["expect"]

    @property
    def reference(self) -> dict[str, Any]:
        return self.said.get("reference") or {}


@dataclass
class Play:
    """What became of a case."""

    case: Case
    live: Live
    http: httpx.Client
    scratch: Path
    model: str
    """Name of the base: the shared one, or the folder that the case brings."""
    refusals: list[dict[str, Any]] = field(default_factory=list)
    """Error objects of requests that were refused."""
    uploads: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the name that the case saves an id under."""
    job: dict[str, Any] | None = None

    def send(self) -> Play:
        """Every request of the case, as far as what they need was accepted."""
        for request in self.case.said["request"]:
            if request["path"] == "/v1/files":
                self.upload(request)
            else:
                self.submit(request["json"])
        return self

    def upload(self, request: dict[str, Any], *, filename: str | None = None) -> httpx.Response:
        form = request["multipart"]
        content = (self.case.folder / form["file"]).read_bytes()
        named = form["filename"] if filename is None else filename
        answer = self.http.post(
            "/v1/files", data={"purpose": form["purpose"]}, files={"file": (named, content, form["content_type"])}
        )
        if answer.is_success:
            self.uploads[request["save_id"]] = answer.json()
        else:
            self.refusals.append(refusal(answer))
        return answer

    def submit(self, body: dict[str, Any]) -> httpx.Response | None:
        """The job; None where the file that it needs was refused."""
        if body["training_file"] not in self.uploads:
            return None
        ids = {"model": self.model, "training_file": self.uploads[body["training_file"]]["id"]}
        # Every weight, unless the case has a wish: what is expected of weights is then expected of all.
        answer = self.http.post("/v1/fine_tuning/jobs", json={"method": {"type": "full"}, **body, **ids})
        if answer.is_success:
            self.job = answer.json()
        else:
            self.refusals.append(refusal(answer))
        return answer

    @property
    def asked_for_a_job(self) -> bool:
        return any("json" in request for request in self.case.said["request"])

    @property
    def asked(self) -> dict[str, Any]:
        return next(request["json"] for request in self.case.said["request"] if "json" in request)

    @property
    def report(self) -> dict[str, Any]:
        file = self.uploads[self.asked["training_file"]]
        return self.http.get(f"/v1/files/{file['id']}/report").json()

    @cached_property
    def staged(self) -> tuple[Path, RunConfig]:
        """The run directory that a worker would make of the job."""
        return self.stage("run")

    def stage(self, name: str) -> tuple[Path, RunConfig]:
        assert self.job is not None, self.refusals
        with self.live.services.db.reading() as session:
            job = session.scalars(select(Job).where(Job.id == self.job["id"])).one()
        run_dir = self.scratch / name
        return run_dir, stage(self.live.services, job, run_dir)

    @cached_property
    def rows(self) -> tuple[Tokenizer, Prepared]:
        """What the engine trains on; raises what it refuses the data with."""
        run_dir, run = self.staged
        tokenizer = tokenizer_for(run, run_dir, lambda *_: None)
        return tokenizer, prepare(run, run_dir, tokenizer, lambda *_: None)

    @cached_property
    def documents(self) -> list[list[int]]:
        """The ids of each document, in the order of the rows."""
        _, prepared = self.rows
        found = []
        for index in range(len(prepared.train)):
            row = prepared.train.row(index)
            for number in range(int(row.documents[row.filled - 1]) + 1):
                found.append([int(identity) for identity in row.tokens[row.documents == number]])
        return found

    @cached_property
    def learned(self) -> list[int]:
        """The ids that are labels."""
        _, prepared = self.rows
        rows = [prepared.train.row(index) for index in range(len(prepared.train))]
        return [int(identity) for row in rows for identity in row.tokens[row.trained]]

    @cached_property
    def trained(self) -> list[Event]:
        """The run's events. A run that fails is a refusal, as the job's error would be."""
        run_dir, run = self.staged
        return trained(run, run_dir, self.refusals)

    def is_accepted(self) -> bool:
        return self.job is not None and any(event.type == "finished" for event in self.trained)

    def warnings(self) -> list[dict[str, Any]]:
        """What the report and the run's log say without refusing."""
        logged = [event.message for event in self.trained if event.type == "log" and event.level == "warning"]
        return [*self.report["warnings"], *({"message": message, "line": None} for message in logged)]


def trained(run: RunConfig, run_dir: Path, refusals: list[dict[str, Any]]) -> list[Event]:
    seen: list[Event] = []
    try:
        train(run, run_dir, seen.append, StopWish())
    except Exception as problem:  # whatever ends a run ends a job with its text
        failed = explain(problem, rank=0)
        cause: BaseException | None = problem
        while cause is not None and not isinstance(cause, InvalidData):
            cause = cause.__cause__
        found = [finding.to_dict() for finding in cause.findings] if isinstance(cause, InvalidData) else []
        refusals.append({"message": failed.message, "code": failed.code, "errors": found})
    return seen


def refusal(answer: httpx.Response) -> dict[str, Any]:
    """The error object; anything but a refusal in words fails here."""
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["message"]
    return error
