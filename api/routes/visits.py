"""Visits: a browser signs in, so that its pages can read, and listen to streams, without a key in any URL."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from api import browsers
from api.deps import OwnerDep, SessionDep
from api.errors import errors
from api.schemas import VisitOut
from api.trips import OneTrip
from core import visits
from core.errors import Forbidden

router = APIRouter(prefix="/v1/visits", tags=["visits"], route_class=OneTrip)


@router.post("", status_code=201, responses=errors(Forbidden))
def sign_in(request: Request, response: Response, owner: OwnerDep, session: SessionDep) -> VisitOut:
    """Sign a browser in: `fetch` this once with the key, and `EventSource` needs none.

    The answer sets a cookie (HttpOnly, SameSite=Strict) that opens every GET route that the key may read, for twelve
    hours, as long as the key is good. It opens nothing that changes something.
    """
    visit, token = visits.begin(session, owner)
    browsers.sign_in(request, response, token)
    return VisitOut.of(visit)


@router.delete("", responses=errors(), dependencies=[Depends(browsers.scheme)])
def sign_out(request: Request, response: Response, session: SessionDep) -> VisitOut:
    """Sign the browser out that asks, by its cookie."""
    visit = visits.end(session, browsers.token(request))
    browsers.sign_out(response)
    return VisitOut.of(visit)
