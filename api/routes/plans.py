"""Plans: what a job would be and need, before it is submitted."""

from __future__ import annotations

from fastapi import APIRouter

from api.deps import OwnerDep, ReadingDep, ServicesDep
from api.errors import errors
from api.schemas import PlanOut
from api.trips import OneTrip
from core import plans
from core.errors import InvalidSpec, NotFound, NotReady
from core.spec import JobSpec

router = APIRouter(prefix="/v1/plans", tags=["jobs"], route_class=OneTrip)


@router.post("", responses=errors(InvalidSpec, NotFound, NotReady))
def plan(spec: JobSpec, owner: OwnerDep, session: ReadingDep, services: ServicesDep) -> PlanOut:
    """Plan a job without queueing it: what it would read, its layout, bytes, FLOPs and disk, and when it would start.

    What can't run is refused as a submit would refuse it, in the same words.
    """
    return PlanOut.of(spec.kind, plans.plan(session, owner, spec, settings=services.settings))
