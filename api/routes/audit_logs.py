"""The audit log: who changed what, when and from where."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from api.deps import AdminDep, AfterDep, LimitDep, ReadingDep
from api.errors import errors
from api.schemas import AuditLogList, AuditLogOut
from api.trips import OneTrip, in_place
from core import audit
from core.errors import Forbidden, NotFound

router = APIRouter(prefix="/v1/audit_logs", tags=["audit"], route_class=OneTrip)

Given = Annotated[str | None, Query(max_length=255)]
Time = Annotated[float | None, Query(ge=0, le=2**53, allow_inf_nan=False, description="Unix seconds.")]


def wanted(
    project: Given = None,
    action: Annotated[str | None, Query(max_length=255, description="Such as `job.created`.")] = None,
    object_id: Annotated[str | None, Query(max_length=255, description="Id of the changed thing.")] = None,
    key_id: Annotated[str | None, Query(max_length=255, description="Id of the key that changed it.")] = None,
    since: Time = None,
    until: Time = None,
) -> audit.Wanted:
    return audit.Wanted(project, action, object_id, key_id, since, until)


@router.get("", responses=errors(NotFound, Forbidden))
def list_audit_logs(
    owner: AdminDep,
    session: ReadingDep,
    wanted: Annotated[audit.Wanted, Depends(in_place(wanted))],
    after: AfterDep = None,
    limit: LimitDep = 20,
) -> AuditLogList:
    """List changes and who made them, newest first: your project's, or the organisation's for an admin of that."""
    page = audit.page(session, owner, wanted, after=after, limit=limit)
    return AuditLogList(data=[AuditLogOut.of(entry, seen_by=owner) for entry in page.data], has_more=page.has_more)
