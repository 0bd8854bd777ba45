"""Who is calling and what they may do. A key is shown once; only its digest is kept."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, bindparam, delete, or_, select, update
from sqlalchemy.orm import Session

from core import audit, paging, projects
from core.db import directly, lock
from core.errors import Forbidden, InvalidKey, InvalidRequest, NotFound
from core.models import ApiKey, Project, Visit, database_now
from core.paging import Page
from core.projects import DEFAULT_PROJECT as DEFAULT_PROJECT
from core.projects import ORGANIZATION

SCOPES = ("read", "submit", "admin")
"""Each includes those before it."""

SETTINGS_KEY = "key-settings"
"""Id of the admin key that the settings name."""
FIRST_KEY_NAME = "first admin key"


@dataclass(frozen=True)
class Account:
    """The holder of a key, as far as the domain cares."""

    project_id: str
    key_id: str
    scopes: frozenset[str]
    visit_id: str | None = None
    """Of a browser that signed in with the key; None of who sends the key itself."""

    @property
    def manages_organization(self) -> bool:
        """Whether this is an admin key of the first project, which may manage all of them; another manages its own."""
        return self.project_id == DEFAULT_PROJECT and "admin" in self.scopes

    def require(self, scope: str) -> None:
        """Raise Forbidden unless this key has `scope` or one that includes it."""
        if not self.scopes & set(SCOPES[SCOPES.index(scope) :]):
            raise Forbidden(
                f"This key may {', '.join(sorted(self.scopes)) or 'nothing'}; this needs one with the scope {scope!r}."
            )

    def belongs_to(self, *, organization: str | None, project: str | None) -> None:
        """Raise InvalidKey where a request says that it is for another organisation or project than this key's.

        The words are the same whether there is such a project or not.
        """
        if organization and organization != ORGANIZATION:
            raise InvalidKey(f"This key's organisation is {ORGANIZATION}; leave the header OpenAI-Organization out.")
        if project and project != self.project_id:
            raise InvalidKey(f"This key's project is {self.project_id}; leave the header OpenAI-Project out.")


def issue(
    session: Session,
    owner: Account,
    *,
    name: str,
    scopes: Collection[str],
    project: str | None = None,
    expires_at: float | None = None,
    expires_in: float | None = None,
) -> tuple[ApiKey, str]:
    """A key of the owner's project, or of any for who manages the organisation, good for `expires_in` seconds."""
    home = projects.active(session, owner, project or owner.project_id)
    if expires_in is not None:
        expires_at = _now(session) + expires_in
    elif expires_at is not None and expires_at <= _now(session):
        raise InvalidRequest(
            "The key would have expired already; say a later time, in seconds since 1970.", param="expires_at"
        )
    key, secret = create(session, home.id, name=name, scopes=scopes, expires_at=expires_at)
    told = {"name": name, "scopes": key.scopes, "expires_at": expires_at}
    audit.record(session, owner, "api_key.created", key.id, project_id=home.id, **told)
    return key, secret


def _now(session: Session) -> float:
    return session.scalar(select(database_now())) or 0.0


def create(
    session: Session, project_id: str, *, name: str, scopes: Collection[str], expires_at: float | None = None
) -> tuple[ApiKey, str]:
    """A new key and its secret, which can't be had again."""
    if unknown := sorted(set(scopes) - set(SCOPES)):
        raise InvalidRequest(f"There is no scope {unknown[0]!r}; there are {', '.join(SCOPES)}.", param="scopes")
    if not scopes:
        raise InvalidRequest(f"A key needs at least one scope of {', '.join(SCOPES)}.", param="scopes")
    number = secrets.token_hex(12)
    secret = f"ts_{number}_{secrets.token_urlsafe(32)}"
    key = ApiKey(
        id=f"key-{number}",
        project_id=project_id,
        name=name,
        digest=digest_of(secret),
        scopes=[scope for scope in SCOPES if scope in scopes],
        expires_at=expires_at,
    )
    session.add(key)
    session.flush()
    return key, secret


def authenticate(session: Session, bearer: str | None) -> Account:
    """The account that `bearer` opens; InvalidKey if none. Revocation and expiry count from this moment on."""
    if not bearer:
        raise InvalidKey("Send a key: the header `Authorization: Bearer <key>`.")
    named = SETTINGS_KEY
    if bearer.startswith("ts_") and bearer.count("_") >= 2:
        named = f"key-{bearer.split('_', 2)[1][:56]}"
    keys = directly(session, _OPENING, {"named": named}).all()
    digest = digest_of(bearer)
    # Compared in constant time, each of them, so that the time tells nothing about a digest.
    matching = [key for key in keys if hmac.compare_digest(key.digest, digest)]
    if not matching:
        raise InvalidKey("This key is not known here, was revoked or has expired.")
    key = matching[0]
    return Account(project_id=key.project_id, key_id=key.id, scopes=frozenset(key.scopes))


def closed(session: Session, key_ids: Collection[str]) -> set[str]:
    """Which of these keys open nothing any more."""
    return set(key_ids) - set(session.scalars(good(select(ApiKey.id)).where(ApiKey.id.in_(key_ids))))


def good(query: Select[Any]) -> Select[Any]:
    """Of `query` those keys that open something at this moment."""
    return query.join(Project).where(
        ApiKey.revoked_at.is_(None),
        or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > database_now()),
        Project.archived_at.is_(None),
    )


# Built once: the statement of every request takes longer to put together than to run.
_OPENING = good(select(ApiKey.id, ApiKey.project_id, ApiKey.digest, ApiKey.scopes)).where(
    ApiKey.id.in_([SETTINGS_KEY, bindparam("named")])
)


def revoke(session: Session, owner: Account, key_id: str) -> ApiKey:
    """End a key that the owner may `get`, at once; ending it twice changes nothing."""
    home = get(session, owner, key_id).project_id
    key = session.scalars(
        update(ApiKey)
        .where(ApiKey.id == key_id, ApiKey.revoked_at.is_(None))
        .values(revoked_at=database_now())
        .returning(ApiKey)
        .execution_options(synchronize_session=False, populate_existing=True)
    ).one_or_none()
    if key is None:
        return get(session, owner, key_id)
    audit.record(session, owner, "api_key.revoked", key.id, project_id=home)
    return key


def get(session: Session, owner: Account, key_id: str) -> ApiKey:
    """A key of the owner's project, or any for who manages the organisation."""
    key = session.scalars(
        select(ApiKey).where(ApiKey.id == key_id).execution_options(populate_existing=True)
    ).one_or_none()
    if key is None or not (key.project_id == owner.project_id or owner.manages_organization):
        raise NotFound(f"There is no key {key_id!r}.")
    return key


def page(
    session: Session, owner: Account, *, project: str | None = None, after: str | None = None, limit: int = 20
) -> Page[ApiKey]:
    """Keys of the owner's project, or of another that they may see, revoked ones among them, newest first."""
    home = projects.get(session, owner, project or owner.project_id)
    query = select(ApiKey).where(ApiKey.project_id == home.id)
    return paging.by_age(session, query, ApiKey.created_at, ApiKey.id, after=after, limit=limit)


def ensure_admin(session: Session, admin_key: str | None) -> str | None:
    """See to it that somebody can come in: the key that the settings name, or a new one at the first start.

    Returns the new secret when it made one, to be shown once. A changed `admin_key` replaces the one named before.
    """
    # Several processes may start at once.
    lock(session, "first key")
    if session.get(Project, DEFAULT_PROJECT) is None:
        session.add(Project(id=DEFAULT_PROJECT, name="default"))
        session.flush()
    if admin_key is not None:
        _follow_settings(session, admin_key)
        return None
    if session.scalars(select(ApiKey.id).limit(1)).first() is not None:
        return None
    return create(session, DEFAULT_PROJECT, name=FIRST_KEY_NAME, scopes=["admin"])[1]


def _follow_settings(session: Session, admin_key: str) -> None:
    digest = digest_of(admin_key)
    key = session.get(ApiKey, SETTINGS_KEY)
    if key is None:
        session.add(
            ApiKey(
                id=SETTINGS_KEY,
                project_id=DEFAULT_PROJECT,
                name="admin key of the settings",
                digest=digest,
                scopes=["admin"],
            )
        )
    elif key.digest != digest:
        key.digest, key.revoked_at = digest, None
        session.execute(delete(Visit).where(Visit.key_id == SETTINGS_KEY))
    session.flush()


def digest_of(secret: str) -> str:
    """What is kept of a secret that is shown once."""
    return hashlib.sha256(secret.encode()).hexdigest()
