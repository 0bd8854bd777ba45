"""Training files, in OpenAI's shapes. What a file means is judged in `core.files` while it comes in."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import ConfigDict, Field

from api import forms, ranges
from api.deps import AfterDep, OrderDep, OwnerDep, ReadingDep, ServicesDep, SessionDep, SubmitterDep, WithinStorage
from api.errors import errors
from api.forms import Form
from api.schemas import DeletedOut, FileList, FileOut, PreviewOut, ReportOut
from api.trips import OneTrip
from core import examining, files, inspecting
from core.described import Described
from core.errors import (
    FileTooLarge,
    Forbidden,
    InUse,
    InvalidFile,
    InvalidModel,
    InvalidRequest,
    NotFound,
    NotReady,
    QuotaExceeded,
)
from core.keys import Account
from core.services import Services

PATH = "/v1/files"
EXPIRES_AFTER = ("expires_after[anchor]", "expires_after[seconds]")
"""How a form spells the object."""

router = APIRouter(prefix=PATH, tags=["files"], route_class=OneTrip)

Template = Literal["base", "chatml", "plain"]
Overlong = Literal["error", "drop", "truncate"]
FileId = Annotated[str, Path(description="Id of the file.", examples=["file-4f1c09a1b2c3d4e5f6a7b8c9"])]


@dataclass(frozen=True)
class Upload:
    """A file that came, and what it is for."""

    form: Form
    purpose: str
    expires_after: int | None
    """Seconds; None stays."""

    def may_hold_ids(self) -> bool:
        head = self.form.file.read(inspecting.HEAD_BYTES)
        self.form.file.seek(0)
        return self.purpose in files.TRAINING and inspecting.may_hold_ids(head)


async def received(request: Request, within: Annotated[None, WithinStorage]) -> AsyncIterator[Upload]:
    """The form, read only after the key was found good: nobody else's bytes reach our disk."""
    async with forms.received(request, "file", fields=("purpose", *EXPIRES_AFTER)) as form:
        if (purpose := form.fields.get("purpose")) is None:
            raise InvalidRequest("Say what the file is for: `purpose=fine-tune`.", param="purpose")
        yield Upload(form, purpose, _stay(*map(form.fields.get, EXPIRES_AFTER)))


def _stay(anchor: str | None, seconds: str | None) -> int | None:
    """The two fields of an `expires_after`, which come together or not at all."""
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(f"`{EXPIRES_AFTER[0]}` must be `created_at`.", param=EXPIRES_AFTER[0])
    stay = int(seconds) if re.fullmatch("[0-9]{1,9}", seconds or "", re.ASCII) and seconds else 0
    files.check_stay(stay, param=EXPIRES_AFTER[1])
    return stay


FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["purpose", "file"],
                    "properties": {
                        "purpose": {"type": "string", "enum": list(files.PURPOSES)},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": files.SHORTEST_STAY,
                            "maximum": files.LONGEST_STAY,
                        },
                        "file": {"type": "string", "format": "binary"},
                    },
                }
            }
        },
    }
}


@router.post("", openapi_extra=FORM, responses=errors(InvalidFile, FileTooLarge, QuotaExceeded, Forbidden))
async def upload(
    request: Request, upload: Annotated[Upload, Depends(received)], owner: SubmitterDep, services: ServicesDep
) -> FileOut:
    """Upload a training file.

    It is validated while it comes in: chat (`{"messages": […]}`), completion (`{"prompt", "completion"}`), preference
    (`{"prompt", "chosen", "rejected"}`) or text, one JSON object a line or plain text; or ids, as Parquet or a tar of
    Megatron's `.idx` and `.bin`. A file that can't be trained on is refused, with the lines to correct. With
    `expires_after` it is removed after so many seconds, or as soon afterwards as no job needs it.
    """
    create = partial(
        files.create,
        services.db,
        services.storage,
        owner,
        filename=upload.form.filename,
        purpose=upload.purpose,
        chunks=upload.form.chunks(),
        max_bytes=services.settings.max_file_bytes,
        expires_after=upload.expires_after,
    )
    # What starts a process of its own waits where examinations do.
    limiter = request.app.state.examining if upload.may_hold_ids() else None
    return FileOut.of(await to_thread.run_sync(create, limiter=limiter))


@router.get("", responses=errors(NotFound))
def list_files(
    owner: OwnerDep,
    session: ReadingDep,
    after: AfterDep = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Files in a page.")] = 10_000,
    order: OrderDep = "desc",
    purpose: Annotated[str | None, Query(max_length=32, description="Only files for this.")] = None,
) -> FileList:
    """List files, newest first."""
    page = files.page(session, owner, after=after, limit=limit, order=order, purpose=purpose)
    return FileList(data=[FileOut.of(file) for file in page.data], has_more=page.has_more)


@router.get("/{file_id}", responses=errors(NotFound))
def get_file(file_id: FileId, owner: OwnerDep, session: ReadingDep) -> FileOut:
    """Get a file's description."""
    return FileOut.of(files.get(session, owner, file_id))


@router.delete("/{file_id}", responses=errors(NotFound, InUse, Forbidden))
def delete_file(file_id: FileId, owner: SubmitterDep, session: SessionDep, services: ServicesDep) -> DeletedOut:
    """Delete a file. One that a job still needs stays."""
    files.delete(session, services.storage, owner, file_id)
    return DeletedOut(id=file_id, object="file")


@router.get(
    "/{file_id}/content",
    response_class=StreamingResponse,
    responses=errors(NotFound, ranges.RangeNotSatisfiable)
    | {200: ranges.BYTES, 206: {"description": "The part asked for."}, 304: {"description": "Your copy is good."}},
)
def get_content(
    request: Request, file_id: FileId, owner: OwnerDep, session: ReadingDep, services: ServicesDep
) -> Response:
    """Download a file as it was uploaded. Takes `Range`."""
    file = files.get(session, owner, file_id)
    return ranges.answer(
        request.headers,
        size=file.bytes,
        etag=file.sha256,
        filename=file.filename,
        open_=lambda start, end: services.storage.stream(file.storage_key, start, end),
    )


BaseDep = Annotated[
    str | None, Query(max_length=255, description="A model: how would a job that starts from it read this?")
]
SeqLenDep = Annotated[int | None, Query(ge=2, le=2**20, description="Tokens in a row. Default: as a job's.")]
OverlongDep = Annotated[Overlong, Query(description="What a job would do with an example longer than a row.")]


@router.get(
    "/{file_id}/report",
    response_model=ReportOut,
    response_model_exclude_unset=True,
    responses=errors(NotFound, InvalidModel),
)
async def get_report(
    file_id: FileId,
    request: Request,
    owner: OwnerDep,
    services: ServicesDep,
    base: BaseDep = None,
    seq_len: SeqLenDep = None,
    overlong: OverlongDep = "error",
    packing: Annotated[bool, Query(description="Whether rows hold several examples.")] = True,
    template: Annotated[Template, Query(description="The chat template that the job would name.")] = "base",
) -> dict[str, Any]:
    """Get what validation found: the format, how many examples, and what is odd about them.

    With a `base`, also what becomes of each under its tokenizer and chat template: how many are kept, truncated,
    dropped, or left out since nothing in them would be learned, with their lines; tokens, how many of them are
    learned, and how full the rows are. `problem` says why a job would fail. A file that takes too long is told as far
    as it was read: `complete` is then false.
    """
    if base is None:
        return await to_thread.run_sync(partial(_report, services, owner, file_id))
    question = examining.Question(file_id, base, seq_len, overlong, packing, template)
    return await _aside(request, partial(examining.survey, services, owner, question))


def _report(services: Services, owner: Account, file_id: str) -> dict[str, Any]:
    with services.db.reading() as session:
        return files.get(session, owner, file_id).report


class PreviewAsk(Described):
    """Which examples to show, and through whose template."""

    model_config = ConfigDict(extra="forbid", strict=True)

    base: str = Field(min_length=1, max_length=255)
    """Name of the model that a job would start from."""
    first_line: int = Field(1, ge=1)
    """Examples from this line of the file on."""
    limit: int = Field(3, ge=1, le=20)
    """Examples wanted."""
    seq_len: int | None = Field(None, ge=2, le=2**20)
    """Tokens in a row. Default: as a job's."""
    template: Template = "base"
    """The chat template that the job would name."""
    overlong: Overlong = "error"
    """What the job would do with an example longer than a row."""


@router.post("/{file_id}/preview", responses=errors(NotFound, InvalidModel, NotReady))
async def preview(
    file_id: FileId, ask: PreviewAsk, request: Request, owner: OwnerDep, services: ServicesDep
) -> PreviewOut:
    """See examples as a model would: rendered through a base's chat template, in ids, with what of them is learned."""
    question = examining.Question(file_id, ask.base, ask.seq_len, ask.overlong, template=ask.template)
    seen = partial(examining.preview, services, owner, question, first_line=ask.first_line, limit=ask.limit)
    return PreviewOut.model_validate(await _aside(request, seen))


async def _aside(request: Request, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """In a thread apart from the other endpoints': however many wait for an examination, a submit does not."""
    return await to_thread.run_sync(call, limiter=request.app.state.examining)
