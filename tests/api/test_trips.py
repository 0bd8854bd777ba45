"""A request's work is one trip to a thread: one thread, one session to read by, and a commit before the answer."""

import asyncio
import itertools
import threading
from collections.abc import Generator
from types import coroutine
from typing import Annotated

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Request
from sqlalchemy import select
from sqlalchemy.orm import Session

from api import trips
from api.trips import Few, OneTrip, few_at_once, in_place
from core.db import Database, after_commit
from core.hanging import meanwhile
from core.models import Project
from tests import make


def asked(router: APIRouter, method: str, path: str, **options: object) -> httpx.Response:
    """What an application of these routes answers."""
    app = FastAPI()
    app.include_router(router)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)  # type: ignore[arg-type]

    return asyncio.run(asyncio.wait_for(ask(), 20))


def test_all_that_a_plain_endpoint_depends_on_runs_in_its_thread() -> None:
    router, seen = APIRouter(route_class=OneTrip), []

    def first() -> None:
        seen.append(threading.get_ident())

    def second(_: Annotated[None, Depends(in_place(first))]) -> None:
        seen.append(threading.get_ident())

    @router.post("/")
    def endpoint(body: dict[str, int], _: Annotated[None, Depends(in_place(second))]) -> dict[str, int]:
        """Double it."""
        seen.append(threading.get_ident())
        return {name: 2 * value for name, value in body.items()}

    answer = asked(router, "POST", "/", json={"a": 2})
    assert answer.json() == {"a": 4}
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert threading.get_ident() not in seen


def test_of_few_requests_one_works_while_another_commits_and_the_rest_hold_no_thread(database: Database) -> None:
    router, numbers = APIRouter(route_class=OneTrip), itertools.count(1)
    alone, both, crowded = threading.Lock(), threading.Barrier(2), threading.Event()

    @router.post("/")
    @few_at_once
    def create(session: Annotated[Session, Depends(in_place(lambda: trips.write(database)))]) -> int:
        """Let the first be still at its commit when the second works."""
        assert alone.acquire(blocking=False)
        number = next(numbers)
        if number == 1:
            assert crowded.wait(20)
            after_commit(session, lambda: both.wait(20))
        alone.release()
        if number == 2:
            both.wait(20)
        return number

    @router.get("/")
    def read() -> str:
        """Answer while creates wait."""
        return "read"

    app = FastAPI()
    app.include_router(router)

    async def ask() -> tuple[list[int], str]:
        app.state.few = few = Few(2, at_work=1)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            creates = [asyncio.create_task(client.post("/")) for _ in range(4)]
            while few.limiter.statistics().tasks_waiting < 2:
                await asyncio.sleep(0)
            reading = await client.get("/")
            crowded.set()
            return sorted([(await create).json() for create in creates]), reading.json()

    assert asyncio.run(asyncio.wait_for(ask(), 60)) == ([1, 2, 3, 4], "read")


def test_the_event_loop_waits_in_no_dependency_of_a_coroutine() -> None:
    router, seen = APIRouter(route_class=OneTrip), []

    @router.get("/")
    async def endpoint(_: Annotated[None, Depends(in_place(lambda: seen.append(threading.get_ident())))]) -> None:
        """Nothing."""

    assert asked(router, "GET", "/").status_code == 200
    assert threading.get_ident() not in seen


def test_a_request_reads_by_one_session_and_writes_by_another_that_commits_before_the_answer(
    database: Database,
) -> None:
    router, sessions = APIRouter(route_class=OneTrip), []

    def look() -> Session:
        with trips.reading(database) as session:
            session.scalars(select(Project.id)).all()
            sessions.append(session)
            return session

    @router.post("/{name}")
    def endpoint(
        name: str,
        looked: Annotated[Session, Depends(in_place(look))],
        session: Annotated[Session, Depends(in_place(lambda: trips.write(database)))],
        reading: Annotated[Session, Depends(in_place(lambda: trips.read(database)))],
    ) -> str:
        """Make a project."""
        assert (looked.in_transaction(), reading is looked) == (True, True)
        make.project(session, name)
        # Neither keeps a connection that only the other works with.
        assert not looked.in_transaction()
        if name == "proj-bad":
            raise KeyError(name)
        return name

    assert asked(router, "POST", "/proj-good").json() == "proj-good"
    with pytest.raises(KeyError):
        asked(router, "POST", "/proj-bad")
    with database.reading() as session:
        assert "proj-good" in (names := session.scalars(select(Project.id)).all())
        assert "proj-bad" not in names


def test_a_session_is_refused_where_nothing_would_close_it(database: Database) -> None:
    with pytest.raises(AssertionError, match="stay open"):
        trips.read(database)
    with pytest.raises(AssertionError, match="stay open"):
        trips.write(database)


def test_a_dependency_that_would_have_to_be_waited_for_is_an_error_and_not_a_request_that_hangs() -> None:
    router = APIRouter(route_class=OneTrip)

    @coroutine
    def pause() -> Generator[None]:
        yield

    async def slow() -> None:
        await pause()

    @router.get("/")
    def endpoint(_: Annotated[None, Depends(slow)]) -> None:
        """Nothing."""

    with pytest.raises(RuntimeError, match="a coroutine that waits"):
        asked(router, "GET", "/")


def test_a_plain_endpoint_may_ask_for_the_request() -> None:
    router = APIRouter(route_class=OneTrip)

    @router.get("/{name}")
    def endpoint(request: Request) -> str:
        """Say the path."""
        return request.url.path

    assert asked(router, "GET", "/there").json() == "/there"


def test_one_of_the_few_that_waits_aside_leaves_its_turn_and_its_thread_to_others_and_takes_them_again() -> None:
    router, aside, back = APIRouter(route_class=OneTrip), threading.Barrier(3), threading.Event()
    working = threading.Lock()

    @router.post("/{name}")
    @few_at_once
    def create(name: str) -> str:
        """Two wait for what hangs, and the third does not."""
        if name != "third":
            with meanwhile.get()():
                aside.wait(20)
                assert back.wait(20)
        assert working.acquire(blocking=False)
        working.release()
        return name

    app = FastAPI()
    app.include_router(router)

    async def ask() -> list[str]:
        app.state.few = few = Few(2, at_work=1)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            waiting = [asyncio.create_task(client.post(f"/{name}")) for name in ("first", "second")]
            await asyncio.to_thread(aside.wait, 20)
            assert few.limiter.total_tokens == 4
            third = await client.post("/third")
            back.set()
            answers = [third.json(), *[(await wait).json() for wait in waiting]]
            assert (few.limiter.total_tokens, few.limiter.borrowed_tokens) == (2, 0)
        return answers

    assert asyncio.run(asyncio.wait_for(ask(), 60)) == ["third", "first", "second"]
