"""Forms with one file in them, the file spooled to disk; what is no such form is told what to send."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import BinaryIO

from fastapi import Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from core.errors import InvalidRequest

CHUNK = 1024 * 1024
MAX_FIELDS = 16


@dataclass(frozen=True)
class Form:
    """What came."""

    file: BinaryIO
    filename: str
    fields: Mapping[str, str]
    """Those that there are, of the ones that may be."""

    def chunks(self) -> Iterator[bytes]:
        while chunk := self.file.read(CHUNK):
            yield chunk


@asynccontextmanager
async def received(request: Request, part: str, *, fields: Collection[str] = ()) -> AsyncIterator[Form]:
    """The form of this request: its one file is the `part` of this name, each of `fields` is there once or not."""
    wanted = f"Send the file as the part `{part}` of a multipart/form-data body."
    known = [*fields, part]
    form = await _read(request, part, wanted)
    try:
        if unknown := sorted(set(form) - set(known)):
            names = " and ".join(f"`{name}`" for name in known)
            raise InvalidRequest(f"There is no field {unknown[0][:64]!r} here; send {names}.", param=unknown[0][:64])
        if twice := next((name for name in known if len(form.getlist(name)) > 1), None):
            raise InvalidRequest(f"The field `{twice}` is there twice; send it once.", param=twice)
        file = form.get(part)
        if not isinstance(file, UploadFile):
            raise InvalidRequest(f"{wanted} One that the body ends in the middle of is not taken.", param=part)
        texts = {name: value for name in fields if isinstance(value := form.get(name), str)}
        yield Form(file.file, file.filename or "", texts)
    finally:
        await form.close()


async def _read(request: Request, part: str, wanted: str) -> FormData:
    """All of the form. What is said to be another kind of body is not read: a form of names and values has no file."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data":
        raise InvalidRequest(wanted, param=part)
    try:
        return await request.form(max_files=1, max_fields=MAX_FIELDS)
    except UnicodeError as error:
        charset = options.get(b"charset", b"").decode("latin-1")[:64]
        raise InvalidRequest(
            f"The form's texts can't be read as {charset!r}, which its Content-Type says they are; send them in UTF-8, "
            "and leave `charset` out.",
            param=part,
        ) from error
    except ClientDisconnect as error:
        raise InvalidRequest("The upload broke off.", param=part) from error
    except HTTPException as error:
        if error.status_code != HTTPStatus.BAD_REQUEST:
            raise
        raise InvalidRequest(f"The form can't be read: {error.detail} {wanted}", param=part) from error
