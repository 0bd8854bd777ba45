"""What can go wrong in the domain, each error with the answer that a caller can act on.

One handler in `api` turns them into HTTP.
"""

from __future__ import annotations

from typing import ClassVar


class DomainError(Exception):
    """An outcome that the caller caused and can mend; its text says how."""

    status: ClassVar[int] = 400
    code: ClassVar[str] = "invalid_request"
    type: ClassVar[str] = "invalid_request_error"
    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """Path of the field to blame, such as `training.lr`."""


class InvalidRequest(DomainError):
    """The request is malformed: not JSON, an unknown field, a value out of range."""


class ContextTooLong(InvalidRequest):
    """The prompt leaves no room in the model's length."""

    code = "context_length_exceeded"


class InvalidSpec(DomainError):
    """The job can't run as asked."""

    code = "invalid_spec"


class InvalidFile(DomainError):
    """The file can't be used; `errors` holds each finding with its line."""

    code = "invalid_file"

    def __init__(
        self, message: str, *, param: str | None = "file", errors: list[dict[str, object]] | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.errors = errors or []


class FileTooLarge(InvalidFile):
    """The upload exceeds what this server takes."""

    status, code = 413, "file_too_large"


class InvalidModel(DomainError):
    """The model's files can't be used."""

    code = "invalid_model"


class NotReady(DomainError):
    """The model's files are not all there yet, or could not be fetched."""

    status, code = 409, "model_not_ready"
    # The openai client would try again for seconds, and a download takes minutes.
    headers: ClassVar[dict[str, str]] = {"x-should-retry": "false"}


class InvalidKey(DomainError):
    """No such key, or it was revoked or has expired."""

    status, code, type = 401, "invalid_api_key", "authentication_error"
    headers: ClassVar[dict[str, str]] = {"www-authenticate": "Bearer"}


class Forbidden(DomainError):
    """The key is known but lacks the scope."""

    status, code, type = 403, "insufficient_scope", "permission_error"


class NotFound(DomainError):
    """There is no such thing, or it belongs to another project: the two look the same."""

    status, code = 404, "not_found"


class InvalidMove(DomainError):
    """The job, or upload, is not in a state that allows this."""

    status, code = 409, "invalid_state"
    # The openai client retries every 409 unless told that it is in vain.
    headers: ClassVar[dict[str, str]] = {"x-should-retry": "false"}


class InUse(DomainError):
    """Something else still needs it."""

    status, code = 409, "in_use"
    headers: ClassVar[dict[str, str]] = {"x-should-retry": "false"}


class QuotaExceeded(DomainError):
    """The project has used what it may."""

    status, code, type = 429, "insufficient_quota", "insufficient_quota"
    # The openai client tries every 429 again; this one stays until something is freed.
    headers: ClassVar[dict[str, str]] = {"x-should-retry": "false"}


class TooManyRequests(DomainError):
    """This key asks too often; `retry-after` says in how many seconds it may again."""

    status, code, type = 429, "rate_limit_exceeded", "rate_limit_error"


class Unavailable(DomainError):
    """A part of the service that this needs is not there now; trying again later can work."""

    status, code, type = 503, "unavailable", "server_error"


class Undelivered(DomainError):
    """A webhook endpoint gave no answer."""

    code = "undelivered"


class TimedOut(DomainError):
    """It took longer than anyone waits here."""

    status, code, type = 504, "timeout", "server_error"
    # It would take as long again.
    headers: ClassVar[dict[str, str]] = {"x-should-retry": "false"}


class Failed(DomainError):
    """Something went wrong on our side."""

    status, code, type = 500, "internal", "server_error"


class DiskFull(Unavailable):
    """The disk is full, so nothing was kept; it works again once whoever runs the service has freed space."""

    code = "disk_full"

    def __init__(self) -> None:
        super().__init__("The server's disk is full, so nothing was kept: free space on it, then try again.")
