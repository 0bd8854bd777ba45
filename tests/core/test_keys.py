"""Who may come in."""

from __future__ import annotations

import hashlib
import time

import pytest
from sqlalchemy.orm import Session

from core import keys, projects
from core.errors import Forbidden, InvalidKey, InvalidRequest, NotFound
from core.keys import DEFAULT_PROJECT, SETTINGS_KEY, Account
from core.models import ApiKey
from tests import make
from tests.conftest import ADMIN_KEY


def test_a_new_key_opens_its_project(session: Session) -> None:
    make.project(session, "proj-other")
    key, secret = keys.create(session, "proj-other", name="ci", scopes=["submit"])
    account = keys.authenticate(session, secret)
    assert account == Account(project_id="proj-other", key_id=key.id, scopes=frozenset({"submit"}))


def test_only_the_sha256_of_a_key_is_kept(session: Session) -> None:
    key, secret = keys.create(session, DEFAULT_PROJECT, name="ci", scopes=["read"])
    assert key.digest == hashlib.sha256(secret.encode()).hexdigest()
    assert secret not in str({column: getattr(key, column) for column in (*ApiKey.__table__.columns.keys(),)})


@pytest.mark.parametrize(
    "bearer",
    [None, "", "x", "ts_", "ts__", "ts_nobody_secret", "ts_" + "a" * 4000, ADMIN_KEY + "x", ADMIN_KEY[:-1], "é"],
)
def test_an_unknown_key_opens_nothing(session: Session, bearer: str | None) -> None:
    with pytest.raises(InvalidKey):
        keys.authenticate(session, bearer)


def test_the_id_of_a_key_without_its_secret_opens_nothing(session: Session) -> None:
    _, secret = keys.create(session, DEFAULT_PROJECT, name="ci", scopes=["read"])
    with pytest.raises(InvalidKey):
        keys.authenticate(session, secret[:-1] + ("a" if secret[-1] != "a" else "b"))


def test_a_revoked_key_opens_nothing_at_once_and_revoking_twice_is_fine(session: Session, owner: Account) -> None:
    key, secret = keys.create(session, DEFAULT_PROJECT, name="ci", scopes=["read"])
    first = keys.revoke(session, owner, key.id).revoked_at
    with pytest.raises(InvalidKey):
        keys.authenticate(session, secret)
    assert keys.revoke(session, owner, key.id).revoked_at == first


@pytest.mark.parametrize(("seconds", "opens"), [(60, True), (-1, False)], ids=["valid", "expired"])
def test_a_key_opens_until_it_expires(session: Session, seconds: float, opens: bool) -> None:
    _, secret = keys.create(session, DEFAULT_PROJECT, name="ci", scopes=["read"], expires_at=time.time() + seconds)
    if opens:
        keys.authenticate(session, secret)
    else:
        with pytest.raises(InvalidKey):
            keys.authenticate(session, secret)


def test_another_projects_key_can_be_neither_seen_nor_revoked(session: Session) -> None:
    make.project(session, "proj-other")
    make.project(session, "proj-third")
    stranger = Account(project_id="proj-third", key_id="k", scopes=frozenset({"admin"}))
    key, secret = keys.create(session, "proj-other", name="theirs", scopes=["admin"])
    with pytest.raises(NotFound):
        keys.revoke(session, stranger, key.id)
    keys.authenticate(session, secret)
    assert key.id not in {listed.id for listed in keys.page(session, stranger).data}
    with pytest.raises(NotFound, match="There is no project 'proj-other'"):
        keys.page(session, stranger, project="proj-other")
    with pytest.raises(NotFound, match="There is no project 'proj-other'"):
        keys.issue(session, stranger, name="in", scopes=["read"], project="proj-other")


def test_an_admin_of_the_organisation_makes_sees_and_ends_keys_of_every_project(
    session: Session, owner: Account
) -> None:
    make.project(session, "proj-other")
    key, secret = keys.issue(session, owner, name="in", scopes=["admin"], project="proj-other", expires_in=3600)
    assert keys.authenticate(session, secret).project_id == "proj-other"
    assert key.expires_at is not None
    assert 0 < key.expires_at - time.time() < 3700
    assert [listed.id for listed in keys.page(session, owner, project="proj-other").data] == [key.id]
    keys.revoke(session, owner, key.id)
    with pytest.raises(InvalidKey):
        keys.authenticate(session, secret)


@pytest.mark.parametrize(
    ("project", "scope", "manages"),
    [(DEFAULT_PROJECT, "admin", True), (DEFAULT_PROJECT, "submit", False), ("proj-other", "admin", False)],
)
def test_only_admin_keys_of_the_first_project_manage_the_organisation(project: str, scope: str, manages: bool) -> None:
    assert Account(project, "k", frozenset({scope})).manages_organization is manages


def test_the_keys_of_an_archived_project_open_nothing(session: Session, owner: Account) -> None:
    make.project(session, "proj-other")
    key, secret = keys.create(session, "proj-other", name="theirs", scopes=["admin"])
    assert keys.closed(session, [key.id]) == set()
    projects.archive(session, owner, "proj-other")
    with pytest.raises(InvalidKey):
        keys.authenticate(session, secret)
    assert keys.closed(session, [key.id, SETTINGS_KEY]) == {key.id}
    with pytest.raises(InvalidRequest, match="archived"):
        keys.issue(session, owner, name="late", scopes=["read"], project="proj-other")


@pytest.mark.parametrize(
    ("has", "needs", "may"),
    [
        ("read", "read", True),
        ("read", "submit", False),
        ("submit", "read", True),
        ("submit", "admin", False),
        ("admin", "submit", True),
    ],
)
def test_a_scope_includes_the_lesser_ones(has: str, needs: str, may: bool) -> None:
    account = Account(project_id="p", key_id="k", scopes=frozenset({has}))
    if may:
        account.require(needs)
    else:
        with pytest.raises(Forbidden, match=needs):
            account.require(needs)


@pytest.mark.parametrize("scopes", [[], ["root"]], ids=["none", "unknown"])
def test_a_key_needs_scopes_that_exist(session: Session, scopes: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="read, submit, admin"):
        keys.create(session, DEFAULT_PROJECT, name="ci", scopes=scopes)


def test_the_first_start_makes_an_admin_key_and_later_ones_do_not(session: Session) -> None:
    session.query(ApiKey).delete()
    secret = keys.ensure_admin(session, None)
    assert secret is not None
    assert keys.authenticate(session, secret).scopes == {"admin"}
    assert keys.ensure_admin(session, None) is None


def test_a_changed_admin_key_in_the_settings_replaces_the_old_one(session: Session) -> None:
    assert keys.authenticate(session, ADMIN_KEY).project_id == DEFAULT_PROJECT
    assert keys.ensure_admin(session, "another-key-of-ours") is None
    keys.authenticate(session, "another-key-of-ours")
    with pytest.raises(InvalidKey):
        keys.authenticate(session, ADMIN_KEY)


def test_an_admin_key_that_was_revoked_stays_so_after_a_restart(session: Session, owner: Account) -> None:
    keys.revoke(session, owner, keys.SETTINGS_KEY)
    keys.ensure_admin(session, ADMIN_KEY)
    with pytest.raises(InvalidKey):
        keys.authenticate(session, ADMIN_KEY)
