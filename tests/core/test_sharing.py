"""A checkpoint that another project may use: for as long as the permission, and the checkpoint, are there."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.schemas import AuditLogOut, ModelOut
from core import catalog, sharing
from core.errors import Forbidden, NotFound
from core.keys import Account
from core.models import AuditLog, CheckpointPermission
from tests import make


@pytest.fixture
def other(session: Session) -> Account:
    return Account(project_id=make.project(session).id, key_id="key-2", scopes=frozenset({"admin"}))


def test_a_permission_opens_one_checkpoint_to_one_project(
    session: Session, owner: Account, other: Account, tmp_path: Path
) -> None:
    job = make.job(session)
    shared, kept = (make.checkpoint(session, job, step) for step in (1, 2))
    (permission,) = sharing.grant(session, owner, shared.id, [other.project_id])
    assert sharing.grant(session, owner, shared.id, [other.project_id]) == [permission]
    assert catalog.get(session, other, shared.id, models=tmp_path).source == f"checkpoint:{shared.id}"
    with pytest.raises(NotFound):
        catalog.get(session, other, kept.id, models=tmp_path)
    assert list(sharing.page(session, owner, shared.id).data) == [permission]
    assert not sharing.page(session, owner, kept.id).data
    sharing.revoke(session, owner, shared.id, permission.id)
    with pytest.raises(NotFound):
        catalog.get(session, other, shared.id, models=tmp_path)
    told = session.scalars(select(AuditLog.action).order_by(AuditLog.created_at, AuditLog.id)).all()
    assert sorted(told) == ["checkpoint_permission.created", "checkpoint_permission.deleted"]


def test_whose_checkpoint_it_is_and_with_whom_it_is_shared_is_told_to_those_alone_who_may_know(
    session: Session, owner: Account, other: Account, tmp_path: Path
) -> None:
    shared = make.checkpoint(session, make.job(session), 1)
    sharing.grant(session, owner, shared.id, [other.project_id])
    model = catalog.get(session, other, shared.id, models=tmp_path)
    theirs = ModelOut.of(model, seen_by=other)
    assert (theirs.owned_by, theirs.job_id) == ("another-project", None)
    assert ModelOut.of(model, seen_by=owner).job_id == shared.job_id
    entry = session.scalars(select(AuditLog)).one()
    admin = Account(project_id=owner.project_id, key_id="key-3", scopes=frozenset({"admin"}))
    assert AuditLogOut.of(entry, seen_by=admin).data == {"checkpoint": shared.id, "to": other.project_id}
    of_a_project = Account(project_id="proj-home", key_id="key-4", scopes=frozenset({"admin"}))
    assert AuditLogOut.of(entry, seen_by=of_a_project).data == {"checkpoint": shared.id}


def test_only_who_manages_the_organisation_shares_and_learns_who_shares(
    session: Session, owner: Account, other: Account
) -> None:
    theirs = make.checkpoint(session, make.job(session, project_id=other.project_id), 1)
    (permission,) = sharing.grant(session, owner, theirs.id, [owner.project_id])
    for attempt in (
        lambda: sharing.grant(session, other, theirs.id, [owner.project_id]),
        lambda: sharing.page(session, other, theirs.id),
        lambda: sharing.revoke(session, other, theirs.id, permission.id),
    ):
        with pytest.raises(Forbidden):
            attempt()
    with pytest.raises(NotFound):
        sharing.grant(session, owner, theirs.id, ["proj-nobody"])
    with pytest.raises(NotFound):
        sharing.grant(session, owner, "ftckpt-none", [other.project_id])


def test_a_checkpoint_takes_its_permissions_with_it(session: Session, owner: Account, other: Account) -> None:
    checkpoint = make.checkpoint(session, make.job(session), 1)
    sharing.grant(session, owner, checkpoint.id, [other.project_id])
    session.delete(checkpoint)
    session.flush()
    assert session.scalars(select(CheckpointPermission)).all() == []
