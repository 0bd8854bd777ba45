"""The peer of the API: a bare FastAPI application whose routes insert one row, and select one row, as ours must."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Iterator
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from sqlalchemy import JSON, String
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from core.db import Database
from core.models import new_id


class Base(DeclarativeBase):
    pass


class Thing(Base):
    """A row about as large as a job's."""

    __tablename__ = "bare_things"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    body: Mapped[dict[str, Any]] = mapped_column(JSON)


def writing(request: Request) -> Iterator[Session]:
    with request.app.state.database.session() as session:
        yield session


def reading(request: Request) -> Iterator[Session]:
    with request.app.state.database.reading() as session:
        yield session


router = APIRouter(prefix="/v1/jobs")


@router.post("", status_code=201)
def create(body: dict[str, Any], session: Annotated[Session, Depends(writing, scope="function")]) -> dict[str, Any]:
    thing = Thing(id=new_id("thing"), body=body)
    session.add(thing)
    session.flush()
    return {"id": thing.id, "body": thing.body}


@router.get("/{thing_id}")
def read(thing_id: str, session: Annotated[Session, Depends(reading, scope="function")]) -> dict[str, Any]:
    thing = session.get(Thing, thing_id)
    if thing is None:
        raise HTTPException(404)
    return {"id": thing.id, "body": thing.body}


def create_app(database: Database) -> FastAPI:
    """No key, no check, no event: what FastAPI, SQLAlchemy and the database take by themselves."""
    app = FastAPI()
    app.state.database = database
    app.include_router(router)
    return app


def main() -> None:
    """Serve on a port of the system's choice, which is said in a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("database")
    url = parser.parse_args().database
    database = Database(url)
    Base.metadata.create_all(database.engine)
    listening = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"port": listening.getsockname()[1]}), flush=True)  # noqa: T201
    config = uvicorn.Config(create_app(database), http="httptools", log_config=None, access_log=False)
    uvicorn.Server(config).run([listening])


if __name__ == "__main__":
    main()
