"""Training files, in OpenAI's shapes. What a file means is judged in `core.files` while it comes in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from api import ranges
from api.deps import AfterDep, OrderDep, OwnerDep, ReadingDep, ServicesDep, SessionDep, SubmitterDep
from api.errors import errors
from api.schemas import DeletedOut, FileList, FileOut
from core import files
from core.errors import FileTooLarge, Forbidden, InUse, InvalidFile, InvalidRequest, NotFound

PATH = "/v1/files"
CHUNK = 1024 * 1024
MAX_FIELDS = 16
FIELDS = {"purpose", "file"}
WANTED = "Send the file as the part `file` of a multipart/form-data body."

router = APIRouter(prefix=PATH, tags=["files"])

FileId = Annotated[str, Path(description="Id of the file.", examples=["file-4f1c09a1b2c3d4e5f6a7b8c9"])]


@dataclass(frozen=True)
class Upload:
    """The parts of the form, the file spooled to disk."""

    filename: str
    purpose: str
    file: BinaryIO

    def chunks(self) -> Iterator[bytes]:
        while chunk := self.file.read(CHUNK):
            yield chunk


async def received(request: Request, owner: SubmitterDep) -> AsyncIterator[Upload]:
    """The form, read only after the key was found good: nobody else's bytes reach our disk."""
    try:
        async with request.form(max_files=1, max_fields=MAX_FIELDS) as form:
            if unknown := sorted(set(form) - FIELDS):
                raise InvalidRequest(
                    f"There is no field {unknown[0]!r} here; send `purpose` and `file`.", param=unknown[0]
                )
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise InvalidRequest(WANTED, param="file")
            if not isinstance(purpose, str):
                raise InvalidRequest("Say what the file is for: `purpose=fine-tune`.", param="purpose")
            yield Upload(file.filename or "", purpose, file.file)
    except ClientDisconnect as error:
        raise InvalidRequest("The upload broke off.", param="file") from error
    except HTTPException as error:
        if error.status_code != HTTPStatus.BAD_REQUEST:
            raise
        raise InvalidRequest(f"The form can't be read: {error.detail} {WANTED}", param="file") from error


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
                        "file": {"type": "string", "format": "binary"},
                    },
                }
            }
        },
    }
}


@router.post("", openapi_extra=FORM, responses=errors(InvalidFile, FileTooLarge, Forbidden))
def upload(upload: Annotated[Upload, Depends(received)], owner: SubmitterDep, services: ServicesDep) -> FileOut:
    """Upload a training file.

    It is validated while it comes in: chat (`{"messages": […]}`), completion (`{"prompt", "completion"}`) or text, one
    JSON object a line or plain text. A file that can't be trained on is refused, with the lines to correct.
    """
    file = files.create(
        services.db,
        services.storage,
        owner,
        filename=upload.filename,
        purpose=upload.purpose,
        chunks=upload.chunks(),
        max_bytes=services.settings.max_file_bytes,
    )
    return FileOut.of(file)


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


@router.get("/{file_id}/report", responses=errors(NotFound))
def get_report(file_id: FileId, owner: OwnerDep, session: ReadingDep) -> dict[str, Any]:
    """Get what validation found: the format, how many examples, and what is odd about them."""
    return files.get(session, owner, file_id).report
