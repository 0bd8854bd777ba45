"""The peer of the API: a bare FastAPI application whose routes insert one row, and select one row, as ours must.

The row is a job's, in the same table with its indexes, and the body is judged as ours is. What the service makes of the
body, it is given beforehand.
"""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from sqlalchemy.orm import Session

from core import schema
from core.db import Database
from core.keys import DEFAULT_PROJECT
from core.models import Job, Project, new_id
from core.spec import JobSpec


def writing(request: Request) -> Iterator[Session]:
    with request.app.state.database.session() as session:
        yield session


def reading(request: Request) -> Iterator[Session]:
    with request.app.state.database.reading() as session:
        yield session


router = APIRouter(prefix="/v1/jobs")


@router.post("", status_code=201)
def create(
    spec: JobSpec, request: Request, session: Annotated[Session, Depends(writing, scope="function")]
) -> dict[str, Any]:
    job = Job(
        id=new_id("job"),
        project_id=DEFAULT_PROJECT,
        kind=spec.kind,
        spec=spec.model_dump(mode="json", by_alias=True, exclude_unset=True),
        **request.app.state.resolved,
    )
    session.add(job)
    session.flush()
    return shown(job)


@router.get("/{job_id}")
def read(job_id: str, session: Annotated[Session, Depends(reading, scope="function")]) -> dict[str, Any]:
    job = session.get(Job, job_id)
    if job is None:
        raise HTTPException(404)
    return shown(job)


def shown(job: Job) -> dict[str, Any]:
    return {"id": job.id, "kind": job.kind, "spec": job.spec, "run_config": job.run_config, "plan": job.plan}


def create_app(database: Database, resolved: dict[str, Any]) -> FastAPI:
    """No key, no check, no event: what FastAPI, SQLAlchemy and the database take by themselves.

    `resolved` is of each job what the service works out: `run_config`, `plan` and `slots`.
    """
    app = FastAPI()
    app.state.database = database
    app.state.resolved = resolved
    app.include_router(router)
    return app


def main() -> None:
    """Serve on a port of the system's choice, which is said in a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("database")
    parser.add_argument("resolved", type=Path, help="a file of JSON")
    asked = parser.parse_args()
    schema.upgrade(asked.database)
    database = Database(asked.database)
    with database.session() as session:
        session.add(Project(id=DEFAULT_PROJECT, name="default"))
    listening = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"port": listening.getsockname()[1]}), flush=True)  # noqa: T201
    app = create_app(database, json.loads(asked.resolved.read_text()))
    config = uvicorn.Config(app, http="httptools", log_config=None, access_log=False)
    uvicorn.Server(config).run([listening])


if __name__ == "__main__":
    main()
