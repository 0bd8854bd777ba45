"""The HTTP application: routes put together, and what happens around each request."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any

import structlog
from anyio import CapacityLimiter
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import errors, heads, openapi, pages, surroundings
from api.failed_tries import FailedTries
from api.measures import Measures
from api.protocol import request_id as new_request_id
from api.routes import (
    audit_logs,
    completions,
    files,
    fine_tuning,
    health,
    jobs,
    keys,
    models,
    nodes,
    plans,
    projects,
    uploads,
    visits,
    webhooks,
)
from api.sse import Streams
from api.surroundings import MULTIPART_BYTES, Limit, Surroundings
from api.trips import Few
from api.turns import Turns
from core import audit, examining
from core.services import Services
from core.settings import Settings
from core.uploads import PART_BYTES

log = structlog.get_logger()

MAX_JSON_BYTES = 4 * 1024 * 1024
"""Largest body other than an upload."""
CREATING_WITH_ONE_WRITER, CREATING_AT_ONCE = (2, 1), (3, 3)
"""Creates of jobs, and how many of them do more than commit, where the database has one writer and where it has many.

More wait, without a thread.
"""
POSTING_AT_ONCE, POSTING_OF_A_PROJECT = 16, 2
"""Samples that are on their way to webhook endpoints, in all and of one project; more wait."""
SAMPLING_OF_A_PROJECT = 32
"""Answers of a project that samplers are asked for at once, which is half of what one works at; more wait here."""
UPLOADS: tuple[tuple[re.Pattern[str], Callable[[Settings], int]], ...] = (
    (re.compile(re.escape(files.PATH)), lambda settings: settings.max_file_bytes),
    (re.compile(rf"{uploads.PATH}/[^/]+/parts"), lambda settings: min(PART_BYTES, settings.max_file_bytes)),
)
"""The paths that a file may be sent to, and how large one."""
NO_GUESSING = {"x-content-type-options": "nosniff"}
"""What others wrote, such as a log, is no page of ours, whatever a browser thinks that it looks like."""
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
"""That a route may take. HEAD is GET without a body."""
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class App(FastAPI):
    """FastAPI with our OpenAPI page."""

    def openapi(self) -> dict[str, Any]:
        if not self.openapi_schema:
            self.openapi_schema = openapi.document(self)
        return self.openapi_schema


def create_app(services: Services) -> FastAPI:
    """The application over `services`, which stay the caller's to close."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.streams = Streams(services)
        most, at_work = CREATING_WITH_ONE_WRITER if services.db.has_one_writer else CREATING_AT_ONCE
        app.state.few = Few(most, at_work=at_work)
        app.state.posting = CapacityLimiter(POSTING_AT_ONCE)
        app.state.posting_turns = Turns(POSTING_OF_A_PROJECT)
        app.state.sampling_turns = Turns(SAMPLING_OF_A_PROJECT)
        app.state.examining = CapacityLimiter(examining.AT_ONCE)
        yield
        await app.state.streams.ended()

    app = App(
        title="Trainshed",
        version=openapi.VERSION,
        summary=openapi.SUMMARY,
        description=openapi.DESCRIPTION,
        openapi_tags=openapi.TAGS,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.services = services
    app.state.measures = Measures()
    app.state.failed_tries = FailedTries()
    errors.install(app)
    for part in (
        jobs,
        plans,
        fine_tuning,
        files,
        uploads,
        models,
        completions,
        nodes,
        projects,
        keys,
        visits,
        audit_logs,
        webhooks,
        health,
    ):
        app.include_router(part.router)
    pages.install(app)
    app.add_middleware(Around)
    return app


class Around:
    """Around each request: an id, a limit on the body, the time it took, and an answer when we fail."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        around = Surroundings(new_request_id())
        surroundings.put(scope, around)
        client = scope.get("client")
        came = audit.origin.set(audit.Origin(around.request_id, client[0] if client else None))
        measures: Measures = scope["app"].state.measures
        started, status = time.perf_counter(), 0
        inner = heads.as_get(scope)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status >= HTTPStatus.INTERNAL_SERVER_ERROR and around.first_try is not None:
                    scope["app"].state.failed_tries.note(around.first_try)
                headers = MutableHeaders(scope=message)
                headers.update({"x-request-id": around.request_id} | NO_GUESSING | around.headers)
                if status == HTTPStatus.METHOD_NOT_ALLOWED:
                    headers["allow"] = ", ".join(_taken(scope))
            await send(message)

        with structlog.contextvars.bound_contextvars(request=around.request_id):
            try:
                if CONTROL.search(scope["path"]) or b"%00" in scope["query_string"]:
                    nothing = HTTPException(404, "There is nothing under a name with control characters.")
                    await errors.http_error(nothing)(scope, receive, send_with_id)
                else:
                    answer = partial(heads.without_body, self.app) if scope["method"] == "HEAD" else self.app
                    await answer(inner, limited(scope, receive), send_with_id)
            except Exception as error:
                # The edge of the process: the log gets the stack, the caller an id to report.
                log.exception("a request failed", method=scope["method"], path=scope["path"])
                if status:
                    raise
                await errors.unforeseen(error)(scope, receive, send_with_id)
            finally:
                audit.origin.reset(came)
                route = getattr(inner.get("route"), "path", "unknown")
                measures.request(scope["method"], route, status, time.perf_counter() - started)


def _taken(scope: Scope) -> list[str]:
    """The methods that a path takes, by all the routes that it has: the one that refuses says only its own."""
    routes: list[BaseRoute] = scope["app"].routes
    asked = [{**scope, "method": method} for method in METHODS]
    taken = [one["method"] for one in asked if any(route.matches(one)[0] is Match.FULL for route in routes)]
    return [*taken, "HEAD"] if "GET" in taken else taken


def limited(scope: Scope, receive: Receive) -> Receive:
    """`receive`, counting: what is too large is refused before it comes in, or while it does if it did not say so."""
    services: Services = scope["app"].state.services
    sizes = (size(services.settings) for path, size in UPLOADS if path.fullmatch(scope["path"]))
    size = next(sizes, None)
    most = MAX_JSON_BYTES if size is None else size + MULTIPART_BYTES
    around, taken = surroundings.of(scope), 0
    announced = int(Headers(scope=scope).get("content-length", "0"))
    around.tighten(
        Limit(most, HTTPException(413, f"The body is larger than the {most} bytes that this server takes here."))
    )

    async def receive_counted() -> Message:
        nonlocal taken
        _refuse_beyond(around.limit, announced)
        message = await receive()
        taken += len(message.get("body", b""))
        _refuse_beyond(around.limit, taken)
        return message

    return receive_counted


def _refuse_beyond(limit: Limit | None, size: int) -> None:
    if limit is not None and size > limit.most_bytes:
        raise limit.refusal
