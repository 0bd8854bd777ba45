"""Every error in one envelope, `{"error": {"message", "type", "param", "code"}}`, and how the page documents each."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy.exc import DataError
from starlette.exceptions import HTTPException

from core import db, space, storage
from core.described import Described
from core.errors import DiskFull, DomainError, InvalidFile, InvalidKey, InvalidRequest, TooManyRequests, Unavailable

log = structlog.get_logger()

DAYS = re.compile(r"datetime\.timedelta\((?:days=)?(\d+)\)")
"""A limit of a duration, as pydantic writes it."""
MAX_FINDINGS = 20
"""Findings that one answer lists; a file with a million bad lines is told its first ones."""


class ErrorDetail(Described):
    """What went wrong and what would work."""

    message: str
    """In words, with what to do about it."""
    type: str
    """`invalid_request_error`, `authentication_error`, `permission_error`, `rate_limit_error`, `insufficient_quota` or
    `server_error`."""
    param: str | None = None
    """Path of the field to blame, such as `training.lr`."""
    code: str | None = None
    """Stable name of the error, for programs."""
    errors: list[dict[str, Any]] | None = Field(None, exclude_if=lambda errors: errors is None)
    """Each finding, where there are several: lines of a file, fields of a body."""


class ErrorOut(BaseModel):
    """The one shape of every error."""

    error: ErrorDetail


def errors(*kinds: type[DomainError]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI `responses` for the errors that a route raises. What can happen everywhere is among them."""
    by_status: dict[int, list[str]] = {}
    everywhere: tuple[type[DomainError], ...] = (InvalidRequest, InvalidKey, TooManyRequests, Unavailable)
    for kind in dict.fromkeys(everywhere + kinds):
        by_status.setdefault(kind.status, []).append(f"`{kind.code}`: {(kind.__doc__ or '').splitlines()[0]}")
    return {
        status: {"model": ErrorOut, "description": "\n\n".join(lines)} for status, lines in sorted(by_status.items())
    }


def respond(status: int, detail: ErrorDetail, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": detail.model_dump()}, status_code=status, headers=dict(headers or {}))


def domain_error(error: DomainError) -> JSONResponse:
    findings = error.errors[:MAX_FINDINGS] if isinstance(error, InvalidFile) else []
    line = next((finding["line"] for finding in findings if finding.get("line")), None)
    detail = ErrorDetail(
        message=error.message,
        type=error.type,
        # As compilers say it: the file, and the line to go to.
        param=f"{error.param}:{line}" if line else error.param,
        code=error.code,
        errors=findings or None,
    )
    return respond(error.status, detail, error.headers)


def unforeseen(error: Exception) -> JSONResponse:
    """What a caller sees of an error that nobody handled: a full disk can be met anywhere; the rest are our mistakes.

    Of those nothing is told but the id (in the header) to report it by.
    """
    if space.is_full(error):
        return domain_error(DiskFull())
    detail = ErrorDetail(
        message="Something went wrong on our side; it is in the log under this answer's x-request-id.",
        type="server_error",
        code="internal",
    )
    return respond(500, detail)


UNREADABLE = (
    "The body can't be read: send JSON in UTF-8, nested no deeper than a few hundred levels, and no number of thousands"
    " of digits."
)

_HTTP_MESSAGES: dict[str | int, str] = {
    # The framework says this where it means a body that is no UTF-8, that is nested beyond what it can follow, or that
    # has a longer number than Python reads.
    "There was an error parsing the body": UNREADABLE,
    404: "There is no such route; the routes are listed at /docs.",
    405: "This route does not take that method; the `allow` header says which it takes.",
}


def http_error(error: HTTPException) -> JSONResponse:
    """Errors that the framework raises itself, such as an unknown path."""
    status = HTTPStatus(error.status_code)
    said = None if error.detail == status.phrase else str(error.detail)
    detail = ErrorDetail(
        message=_HTTP_MESSAGES.get(said or status, said or status.phrase),
        type="server_error" if status >= 500 else "invalid_request_error",
        code=status.name.lower() if status != HTTPStatus.BAD_REQUEST else InvalidRequest.code,
    )
    return respond(status, detail, error.headers)


def validation_error(found: Sequence[Mapping[str, Any]], body: object) -> JSONResponse:
    """A request that does not fit its types."""
    return respond(InvalidRequest.status, validation_detail(found, body))


def validation_detail(found: Sequence[Mapping[str, Any]], body: object) -> ErrorDetail:
    """What pydantic found, in words: the finding that tells most, and each where there are several."""
    findings = [_finding(error, body) for error in found]
    first = max(zip(found, findings, strict=True), key=_tells_most)[1]
    return ErrorDetail(
        message=f"{first['param']}: {first['message']}" if first["param"] else first["message"],
        type=InvalidRequest.type,
        param=first["param"],
        code=InvalidRequest.code,
        errors=findings[:MAX_FINDINGS] if len(findings) > 1 else None,
    )


def _tells_most(pair: tuple[Mapping[str, Any], dict[str, Any]]) -> tuple[int, bool]:
    """A union reports each of its branches: the deepest is nearest the mistake, and a misspelt field is missing too."""
    error, finding = pair
    return (finding["param"] or "").count("."), error["type"] == "extra_forbidden"


def _finding(error: Mapping[str, Any], body: object) -> dict[str, Any]:
    source, *path = error["loc"] or ("body",)
    kind, message = error["type"], str(error["msg"]).removeprefix("Value error, ")
    if kind == "json_invalid":
        reason = error.get("ctx", {}).get("error", message)
        return {"param": None, "message": f"The body is not valid JSON: {reason} at character {path[0]}."}
    if source == "body" and not path and kind != "value_error":
        return {"param": None, "message": "The body must be a JSON object, sent with Content-Type: application/json."}
    if kind == "extra_forbidden":
        message = "unknown field; check its spelling, or leave it out"
    if kind == "missing":
        message = "this field is required"
    if kind in {"tuple_type", "list_type"}:
        message = "this must be a list, also of a single one"
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        message = "this must be an object: {…}"
    message = DAYS.sub(r"\1 days", message)
    if kind in {"union_tag_not_found", "union_tag_invalid"}:
        # Said of the whole object, and meant is the one field that says which of its kinds it is.
        allowed = str(error.get("ctx", {}).get("expected_tags", ""))
        message = f"say one of {allowed}" if allowed else "this field is required"
        kind, path = "missing", [*path, str(error.get("ctx", {}).get("discriminator", "type")).strip("'")]
    keys = _keys(path, body, missing=kind == "missing") if source == "body" else [str(part) for part in path]
    return {"param": ".".join(keys) or None, "message": message}


def _keys(path: Sequence[str | int], body: Any, *, missing: bool) -> list[str]:
    """The part of an error's location that stands in the body. Pydantic mixes in the names of union branches."""
    keys = []
    for depth, part in enumerate(path):
        if _holds(body, part):
            body = body[part]
        elif not (missing and depth == len(path) - 1):
            continue
        keys.append(str(part))
    return keys


def _holds(body: Any, part: str | int) -> bool:
    if isinstance(body, dict):
        return part in body
    return isinstance(body, list) and isinstance(part, int) and part < len(body)


def install(app: FastAPI) -> None:
    """Make `app` answer each error in the envelope. Unforeseen exceptions are `api.app`'s middleware's to catch."""

    @app.exception_handler(DomainError)
    async def on_domain_error(request: Request, error: DomainError) -> JSONResponse:
        return domain_error(error)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return validation_error(error.errors(), error.body)

    @app.exception_handler(DataError)
    @app.exception_handler(UnicodeEncodeError)
    async def on_unstorable(request: Request, error: Exception) -> JSONResponse:
        # What no database takes can stand in any text of any request; each text would have to say so otherwise.
        log.info("a request can't be stored", error=type(error).__name__)
        return domain_error(InvalidRequest("A text holds NUL or half a surrogate pair, or a number is beyond 64 bits."))

    def absent(part: str) -> Callable[[Request, Exception], Awaitable[JSONResponse]]:
        async def on_absence(request: Request, error: Exception) -> JSONResponse:
            log.warning(f"the {part} is away", error=str(error))
            away = Unavailable(f"The {part} is away or busy; try again in a moment.")
            return domain_error(DiskFull() if space.is_full(error) else away)

        return on_absence

    for part, kinds in {"database": db.AWAY, "storage": storage.AWAY}.items():
        for kind in kinds:
            app.exception_handler(kind)(absent(part))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        return http_error(error)
