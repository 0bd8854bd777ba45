"""API keys of the caller's project; those of every project, for an admin of the organisation."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal, Self

from fastapi import APIRouter, Path, Query
from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from api.deps import AdminDep, AfterDep, LimitDep, ReadingDep, SessionDep
from api.errors import errors
from api.names import Name
from api.schemas import KeyList, KeyOut, NewKeyOut
from api.trips import OneTrip
from core import keys
from core.described import Described
from core.errors import Forbidden, NotFound
from core.spec import duration

router = APIRouter(prefix="/v1/keys", tags=["keys"], route_class=OneTrip)

KeyId = Annotated[str, Path(description="Id of the key.")]
ProjectId = Annotated[str | None, Query(max_length=64, description="Of this project; default: your key's own.")]


class NewKey(Described):
    """A key to be made."""

    model_config = ConfigDict(strict=True, extra="forbid")
    name: Name
    """What it is for."""
    scopes: list[Literal["read", "submit", "admin"]] = Field(["read", "submit"], min_length=1, max_length=3)
    """Each includes those before it. `admin` is the project's admin; of the first project, the organisation's."""
    project: str | None = Field(None, min_length=1, max_length=64)
    """Id of the project that it opens; null is your key's own."""
    expires_at: int | None = Field(None, gt=0, le=2**40)
    """Unix seconds; null lasts until it is revoked."""
    expires_in: (
        Annotated[timedelta, BeforeValidator(duration), Field(strict=False, gt=timedelta(0), le=timedelta(days=36500))]
        | None
    ) = None
    """Such as `30d` or `12h`, or seconds, instead of `expires_at`."""

    @model_validator(mode="after")
    def ends_once(self) -> Self:
        if self.expires_at is not None and self.expires_in is not None:
            raise ValueError("say expires_at or expires_in, not both")
        return self


@router.post("", status_code=201, responses=errors(NotFound, Forbidden))
def create(new: NewKey, owner: AdminDep, session: SessionDep) -> NewKeyOut:
    """Make a key. Its secret is in this answer and nowhere else, ever."""
    key, secret = keys.issue(
        session,
        owner,
        name=new.name,
        scopes=new.scopes,
        project=new.project,
        expires_at=new.expires_at,
        expires_in=new.expires_in.total_seconds() if new.expires_in else None,
    )
    return NewKeyOut.made(key, secret)


@router.get("", responses=errors(NotFound, Forbidden))
def list_keys(
    owner: AdminDep, session: ReadingDep, project: ProjectId = None, after: AfterDep = None, limit: LimitDep = 100
) -> KeyList:
    """List a project's keys, newest first, revoked ones among them."""
    page = keys.page(session, owner, project=project, after=after, limit=limit)
    return KeyList(data=[KeyOut.of(key) for key in page.data], has_more=page.has_more)


@router.get("/{key_id}", responses=errors(NotFound, Forbidden))
def get_key(key_id: KeyId, owner: AdminDep, session: ReadingDep) -> KeyOut:
    """Get a key, without its secret."""
    return KeyOut.of(keys.get(session, owner, key_id))


@router.delete("/{key_id}", responses=errors(NotFound, Forbidden))
def revoke(key_id: KeyId, owner: AdminDep, session: SessionDep) -> KeyOut:
    """Revoke a key: it opens nothing from this moment on, and streams that it opened end."""
    return KeyOut.of(keys.revoke(session, owner, key_id))
