"""Hosts that run jobs."""

from __future__ import annotations

from fastapi import APIRouter

from api.deps import OwnerDep, ReadingDep
from api.errors import errors
from api.schemas import NodeList, NodeOut
from api.trips import OneTrip
from core import jobs, nodes

router = APIRouter(prefix="/v1/nodes", tags=["nodes"], route_class=OneTrip)


@router.get("", responses=errors())
def list_nodes(owner: OwnerDep, session: ReadingDep) -> NodeList:
    """List hosts, their slots, and who holds them. Of another project's job only that it holds a slot is told."""
    found = nodes.listing(session)
    mine = jobs.owned(session, owner, {slot.job_id for status in found for slot in status.slots if slot.job_id})
    return NodeList(data=[NodeOut.of(status, mine=mine) for status in found])
