"""One trip to a thread for each request: its key's check, its session, the endpoint, and the JSON of the answer.

FastAPI makes a trip for each of these, back and forth, and a trip takes about as long as a query. Here a route's whole
work goes to a thread once. There FastAPI's coroutine runs through without a stop, for nothing in it has to be waited
for: endpoints are plain functions, and so is all that they depend on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from inspect import iscoroutinefunction
from threading import Semaphore
from typing import Any, ParamSpec, TypeVar

from anyio import CapacityLimiter, from_thread, to_thread
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from core.db import Database, follow
from core.hanging import meanwhile

P = ParamSpec("P")
Result = TypeVar("Result")

_FEW = "few_at_once"


class Trip(ExitStack):
    """What is open until the thread has the answer."""

    reading: Session | None = None
    """The one session that all parts of the request read by."""


_trip: ContextVar[Trip | None] = ContextVar("trip", default=None)
"""This thread's; None on the event loop."""


class Few:
    """Threads for requests that more of them would only slow down.

    Of `most` at a time so many are `at_work`, while others commit. More would pass the interpreter's lock to and fro at
    each statement, and leave no thread to the requests that only read.
    """

    def __init__(self, most: int, *, at_work: int) -> None:
        self.limiter = CapacityLimiter(most)
        self.working = Semaphore(at_work)
        """Whose turn it is to do all but commit."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let another one have the turn, and a thread more, while this one waits for what is no work of ours."""
        from_thread.run_sync(self._lend, 1)
        self.working.release()
        try:
            yield
        finally:
            from_thread.run_sync(self._lend, -1)
            self.working.acquire()

    def _lend(self, threads: int) -> None:
        self.limiter.total_tokens += threads


class OneTrip(APIRoute):
    """A route whose endpoint is a plain function; another is FastAPI's own."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.is_plain = not iscoroutinefunction(endpoint)
        self.is_of_few = getattr(endpoint, _FEW, False)
        super().__init__(path, in_place(endpoint) if self.is_plain else endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if not self.is_plain:
            return handle

        async def handle_there(request: Request) -> Response:
            if self.body_field is not None:
                try:
                    await request.body()
                except ClientDisconnect as error:
                    raise HTTPException(400, "There was an error parsing the body") from error
            few: Few | None = request.app.state.few if self.is_of_few else None
            if few is None:
                return await run_in_threadpool(_there, handle, request)
            return await to_thread.run_sync(_there, handle, request, few, limiter=few.limiter)

        return handle_there


def few_at_once(endpoint: Callable[P, Result]) -> Callable[P, Result]:
    """Let an endpoint have the application's `few` threads, and not those of all."""
    setattr(endpoint, _FEW, True)
    return endpoint


def in_place(call: Callable[P, Result]) -> Callable[P, Awaitable[Result]]:
    """`call` as FastAPI is given it, so that it runs in the thread where its request is, or else in one of its own."""

    @wraps(call)
    async def called(*given: P.args, **named: P.kwargs) -> Result:
        if _trip.get() is None:
            return await run_in_threadpool(call, *given, **named)
        return call(*given, **named)

    return called


def reading(db: Database) -> AbstractContextManager[Session]:
    """A transaction that only reads, for a block: the request's, which stays open, or else one of its own."""
    return db.reading() if _trip.get() is None else nullcontext(read(db))


def read(db: Database) -> Session:
    """The transaction that the request reads by, open until there is an answer."""
    trip = _own()
    if trip.reading is None:
        trip.reading = trip.enter_context(db.reading())
    return trip.reading


def write(db: Database) -> Session:
    """A transaction that may write, committed before the answer is sent, or rolled back by what is raised."""
    trip = _own()
    session = trip.enter_context(db.session())
    if trip.reading is not None:
        follow(session, trip.reading)
    return session


def _own() -> Trip:
    trip = _trip.get()
    assert trip is not None, "it would stay open: only a plain endpoint has a trip"
    return trip


def _there(
    handle: Callable[[Request], Coroutine[Any, Any, Response]],
    request: Request,
    few: Few | None = None,
) -> Response:
    with Trip() as trip:
        # The thread's context is a copy, which goes with the call.
        _trip.set(trip)
        if few is None:
            return _through(handle(request))
        meanwhile.set(few.aside)
        # The trip's end commits.
        with few.working:
            return _through(handle(request))


def _through(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """What a coroutine returns that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        result: Result = ended.value
        return result
    coroutine.close()
    raise RuntimeError("A plain endpoint depends on a coroutine that waits; nobody would wake it in this thread.")
