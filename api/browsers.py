"""The cookie of a browser that signed in: where it is read, and how it is set.

It is HttpOnly, so no script sees it, and SameSite=Strict, so no other site's page sends it; a request that a browser
says comes from another origin is not let in by it either. It opens what reads, and is in no URL.
"""

from __future__ import annotations

from fastapi import Request, Response
from fastapi.security import APIKeyCookie
from sqlalchemy.orm import Session

from core import visits
from core.errors import InvalidKey
from core.keys import Account

COOKIE = "trainshed_visit"
PATH = "/v1"
scheme = APIKeyCookie(
    name=COOKIE, auto_error=False, scheme_name="visit", description="Of a browser that signed in (`POST /v1/visits`)."
)
NO_KEY = "This route needs a key: send `Authorization: Bearer <key>`."
OURS = frozenset({"same-origin", "none"})
"""What `Sec-Fetch-Site` says of our own pages, and of what somebody typed in."""


def token(request: Request) -> str:
    """What the browser was given when it signed in. Raises InvalidKey where there is nothing that may be believed."""
    cookie = request.cookies.get(COOKIE)
    if cookie is None or request.headers.get("sec-fetch-site", "none") not in OURS:
        raise InvalidKey(NO_KEY)
    return cookie


def signed_in(session: Session, request: Request) -> Account:
    """Who a request is from that has no key, if it only reads."""
    if request.method not in {"GET", "HEAD"}:
        raise InvalidKey(NO_KEY)
    return visits.account(session, token(request))


def sign_in(request: Request, response: Response, value: str) -> None:
    """Give the browser its cookie."""
    response.set_cookie(
        COOKIE,
        value,
        max_age=int(visits.LASTS.total_seconds()),
        path=PATH,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


def sign_out(response: Response) -> None:
    """Take the cookie away."""
    response.delete_cookie(COOKIE, path=PATH, httponly=True, samesite="strict")
