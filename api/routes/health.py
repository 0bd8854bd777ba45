"""Health and measures. They need no key and tell nothing that is anybody's."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.deps import ReadingDep, ServicesDep
from api.measures import CONTENT_TYPE, Measures
from api.schemas import AliveOut, ReadyOut
from api.trips import OneTrip
from core import health

router = APIRouter(tags=["service"], route_class=OneTrip)


@router.get("/healthz")
async def healthz() -> AliveOut:
    """Say that this process answers."""
    return AliveOut()


@router.get("/readyz", responses={503: {"model": ReadyOut, "description": "Something is missing; `checks` says what."}})
def readyz(services: ServicesDep, response: Response) -> ReadyOut:
    """Say whether jobs can be taken and run: the database, the broker and a worker are there."""
    checks = health.checks(services)
    ready = set(checks.values()) == {"ok"}
    response.status_code = 200 if ready else 503
    return ReadyOut(status="ready" if ready else "not ready", checks=checks)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def metrics(request: Request, session: ReadingDep) -> Response:
    """Measures in Prometheus' text format: jobs by state, the queue, slots, hosts, requests and their latency."""
    measures: Measures = request.app.state.measures
    return Response(measures.render(health.standing(session)), media_type=CONTENT_TYPE)
