"""Files in parts, in OpenAI's shapes, with what OpenAI lacks: to ask which parts are there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import ConfigDict, Field
from sqlalchemy.orm import Session

from api import forms
from api.deps import (
    AfterDep,
    LimitDep,
    OrderDep,
    OwnerDep,
    ReadingDep,
    ServicesDep,
    SessionDep,
    SubmitterDep,
    WithinStorage,
)
from api.errors import errors
from api.forms import Form
from api.schemas import UploadList, UploadOut, UploadPartList, UploadPartOut
from api.trips import OneTrip
from core import files, uploads
from core.described import Described
from core.errors import FileTooLarge, Forbidden, InvalidFile, InvalidMove, NotFound, QuotaExceeded
from core.keys import Account
from core.models import Upload
from core.services import Services

PATH = "/v1/uploads"

router = APIRouter(prefix=PATH, tags=["uploads"], route_class=OneTrip)

UploadId = Annotated[str, Path(description="Id of the upload.", examples=["upload-4f1c09a1b2c3d4e5f6a7b8c9"])]


class ExpiresAfter(Described):
    """How long the file stays."""

    model_config = ConfigDict(strict=True, extra="forbid")

    anchor: Literal["created_at"]
    seconds: int = Field(ge=files.SHORTEST_STAY, le=files.LONGEST_STAY)
    """From an hour to 30 days."""


class NewUpload(Described):
    """A file that is going to come in parts."""

    model_config = ConfigDict(strict=True, extra="forbid")

    bytes: int = Field(ge=1, le=2**53)
    """Exactly as many as all parts will have together."""
    filename: str = Field(min_length=1, max_length=4096)
    purpose: str = Field(max_length=64)
    """What the file is for, as in `POST /v1/files`."""
    mime_type: str | None = Field(None, max_length=255)
    """Any; what a file holds is told by its content."""
    expires_after: ExpiresAfter | None = None
    """How long the file stays; null stays until it is deleted."""


class Completion(Described):
    """What makes the file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    part_ids: list[Annotated[str, Field(max_length=64)]] = Field(max_length=uploads.MOST_PARTS)
    """The parts, in order. Others that were sent are dropped."""
    md5: str | None = Field(None, max_length=64)
    """Of the whole file, in hexadecimal digits; checked where it is there."""


@router.post("", responses=errors(FileTooLarge, Forbidden, QuotaExceeded))
def create_upload(new: NewUpload, owner: SubmitterDep, session: SessionDep, services: ServicesDep) -> UploadOut:
    """Begin an upload in parts. It takes them for an hour.

    `upload_file_chunked` of the openai client does all of it. Parts may come in any order and at once, of at most
    64 MiB each. When something breaks off, `GET /v1/uploads/{id}/parts` tells what is there.
    """
    upload = uploads.create(
        session,
        owner,
        filename=new.filename,
        purpose=new.purpose,
        num_bytes=new.bytes,
        max_bytes=services.settings.max_file_bytes,
        file_expires_after=None if new.expires_after is None else new.expires_after.seconds,
    )
    return _shown(session, upload)


@router.get("", responses=errors(NotFound))
def list_uploads(
    owner: OwnerDep,
    session: ReadingDep,
    after: AfterDep = None,
    limit: LimitDep = 20,
    status: Annotated[
        Literal["pending", "completed", "cancelled", "expired"] | None, Query(description="Only uploads that are so.")
    ] = None,
) -> UploadList:
    """List uploads, newest first: a process that was killed finds what it had begun. One that ended stays for a day."""
    page = uploads.page(session, owner, after=after, limit=limit, wanted=status)
    return UploadList(data=[_shown(session, upload) for upload in page.data], has_more=page.has_more)


@router.get("/{upload_id}", responses=errors(NotFound))
def get_upload(upload_id: UploadId, owner: OwnerDep, session: ReadingDep) -> UploadOut:
    """Get an upload. One that has ended is told for a day."""
    return _shown(session, uploads.get(session, owner, upload_id))


@router.get("/{upload_id}/parts", responses=errors(NotFound))
def list_parts(
    upload_id: UploadId,
    owner: OwnerDep,
    session: ReadingDep,
    after: AfterDep = None,
    limit: Annotated[int, Query(ge=1, le=uploads.MOST_PARTS, description="Parts in a page.")] = uploads.MOST_PARTS,
    order: OrderDep = "asc",
) -> UploadPartList:
    """List the parts that are there, oldest first, each with its size and md5. An upload that has ended has none."""
    page = uploads.parts(session, owner, upload_id, after=after, limit=limit, order=order)
    return UploadPartList(data=[UploadPartOut.of(part) for part in page.data], has_more=page.has_more)


async def received_part(
    upload_id: UploadId,
    request: Request,
    owner: SubmitterDep,
    services: ServicesDep,
    within: Annotated[None, WithinStorage],
) -> AsyncIterator[Form]:
    """The form, read only once the upload was found to take it."""
    await to_thread.run_sync(partial(_check_open, services, owner, upload_id))
    async with forms.received(request, "data") as form:
        yield form


def _check_open(services: Services, owner: Account, upload_id: str) -> None:
    with services.db.reading() as session:
        uploads.check_open(session, owner, upload_id)


FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["data"],
                    "properties": {"data": {"type": "string", "format": "binary"}},
                }
            }
        },
    }
}


@router.post(
    "/{upload_id}/parts",
    openapi_extra=FORM,
    responses=errors(NotFound, InvalidMove, FileTooLarge, QuotaExceeded, Forbidden),
)
async def add_part(
    upload_id: UploadId, form: Annotated[Form, Depends(received_part)], owner: SubmitterDep, services: ServicesDep
) -> UploadPartOut:
    """Add a part. It is kept, whole, once this is answered; one that broke off is not."""
    add = partial(uploads.add_part, services.db, services.storage, owner, upload_id, form.chunks())
    return UploadPartOut.of(await to_thread.run_sync(add))


@router.post(
    "/{upload_id}/complete",
    responses=errors(NotFound, InvalidMove, InvalidFile, FileTooLarge, QuotaExceeded, Forbidden),
)
async def complete_upload(
    upload_id: UploadId, completion: Completion, request: Request, owner: SubmitterDep, services: ServicesDep
) -> UploadOut:
    """Make the file of its parts, in this order.

    It is judged as `POST /v1/files` judges. What is refused leaves the upload open, so that parts can be sent again.
    Completing twice from the same parts answers the same file.
    """
    gathered = await to_thread.run_sync(partial(_gathered, services, owner, upload_id, completion))
    complete = partial(_complete, services, owner, gathered, completion.md5)
    # What starts a process of its own waits where examinations do.
    holds_ids = await to_thread.run_sync(partial(gathered.may_hold_ids, services.storage))
    return await to_thread.run_sync(complete, limiter=request.app.state.examining if holds_ids else None)


def _gathered(services: Services, owner: Account, upload_id: str, completion: Completion) -> uploads.Gathered:
    with services.db.reading() as session:
        return uploads.gather(session, owner, upload_id, completion.part_ids, md5=completion.md5)


def _complete(services: Services, owner: Account, gathered: uploads.Gathered, md5: str | None) -> UploadOut:
    uploads.complete(
        services.db, services.storage, owner, gathered, md5=md5, max_bytes=services.settings.max_file_bytes
    )
    with services.db.reading() as session:
        return _shown(session, uploads.get(session, owner, gathered.upload.id))


@router.post("/{upload_id}/cancel", responses=errors(NotFound, InvalidMove, Forbidden))
def cancel_upload(upload_id: UploadId, owner: SubmitterDep, session: SessionDep, services: ServicesDep) -> UploadOut:
    """Give an upload up, with its parts. Asking twice is fine."""
    return _shown(session, uploads.cancel(session, services.storage, owner, upload_id))


def _shown(session: Session, upload: Upload) -> UploadOut:
    return UploadOut.of(upload, uploads.status(session, upload), uploads.file(session, upload))
