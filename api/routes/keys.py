"""API keys of the caller's project."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from api.deps import AdminDep, ReadingDep, SessionDep
from api.errors import errors
from api.schemas import KeyList, KeyOut, NewKeyOut
from core import keys
from core.errors import Forbidden, NotFound

router = APIRouter(prefix="/v1/keys", tags=["keys"])


class NewKey(BaseModel):
    """A key to be made."""

    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)
    name: str = Field(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f]+$")
    """What it is for."""
    scopes: list[Literal["read", "submit", "admin"]] = Field(["read", "submit"], min_length=1, max_length=3)
    """Each includes those before it."""
    expires_at: int | None = Field(None, gt=0, le=2**40)
    """Unix seconds; null lasts until it is revoked."""


@router.post("", status_code=201, responses=errors(Forbidden))
def create(new: NewKey, owner: AdminDep, session: SessionDep) -> NewKeyOut:
    """Make a key. Its secret is in this answer and nowhere else, ever."""
    key, secret = keys.create(
        session, owner.project_id, name=new.name, scopes=new.scopes, expires_at=new.expires_at
    )  # fmt: skip
    return NewKeyOut.made(key, secret)


@router.get("", responses=errors(Forbidden))
def list_keys(owner: AdminDep, session: ReadingDep) -> KeyList:
    """List the project's keys, newest first, revoked ones among them."""
    return KeyList(data=[KeyOut.of(key) for key in keys.list_(session, owner)])


@router.delete("/{key_id}", responses=errors(NotFound, Forbidden))
def revoke(
    key_id: Annotated[str, Path(description="Id of the key.")], owner: AdminDep, session: SessionDep
) -> KeyOut:  # fmt: skip
    """Revoke a key: it opens nothing from this moment on."""
    return KeyOut.of(keys.revoke(session, owner, key_id))
