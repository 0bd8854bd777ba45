"""What endpoints ask for by type: the parts of the service, a session, and who is calling with what scope."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Annotated, Literal

from fastapi import Depends, Header, Query, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from sqlalchemy.orm import Session

from api import browsers, surroundings, trips
from api.failed_tries import FailedTries
from api.surroundings import MULTIPART_BYTES, Limit, Surroundings
from api.trips import in_place
from core import keys, quotas
from core.errors import TooManyRequests
from core.keys import Account
from core.services import Services
from core.settings import Settings
from core.tries import Try

Scope = Literal["read", "submit", "admin"]

bearer = HTTPBearer(auto_error=False, scheme_name="API key", description="On every route under `/v1`.")


# Not in a thread, which takes longer to reach than this to do. Other dependencies call it: FastAPI would look for each
# of them anew what it has to be given.
async def get_services(request: Request) -> Services:
    return services_of(request)


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(get_services)]


def get_session(request: Request) -> Session:
    return trips.write(services_of(request).db)


def get_reading(request: Request) -> Session:
    return trips.read(services_of(request).db)


# A trip's end, and so the commit, comes before the response: who holds an id can read it.
SessionDep = Annotated[Session, Depends(in_place(get_session))]
"""A transaction that may write."""
ReadingDep = Annotated[Session, Depends(in_place(get_reading))]
"""A transaction that only reads, and waits for no writer."""


def holding(scope: Scope, *, counted: bool = True) -> Callable[..., Awaitable[Account]]:
    """Whose key it is, if it has `scope` and is of the organisation and project that the request may name.

    The request is `counted` against what the key may ask in a minute.
    """

    def account(
        request: Request,
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)],
    ) -> Account:
        services = services_of(request)
        with trips.reading(services.db) as session:
            if credentials is None:
                found = browsers.signed_in(session, request)
            else:
                found = keys.authenticate(session, credentials.credentials)
        if counted:
            count(request, services, found)
        # Every request comes this way, few with these headers: FastAPI takes longer for each than a query for its row.
        said = request.headers.get
        found.belongs_to(organization=said("openai-organization"), project=said("openai-project"))
        found.require(scope)
        return found

    return in_place(account)


def count(request: Request, services: Services, account: Account) -> None:
    """Take one of the key's requests, and let the answer say what is left, in OpenAI's headers."""
    verdict = services.throttle.take(account.key_id)
    if verdict is None:
        return
    around = surroundings.of(request.scope)
    around.was_refused, headers = verdict.refused_lately, around.headers
    headers["x-ratelimit-limit-requests"] = str(verdict.per_minute)
    headers["x-ratelimit-remaining-requests"] = str(verdict.remaining)
    headers["x-ratelimit-reset-requests"] = f"{verdict.full_in:.3f}s"
    if not verdict.allowed:
        headers["retry-after"] = str(max(1, ceil(verdict.retry_after)))
        headers["retry-after-ms"] = str(ceil(verdict.retry_after * 1000))
        raise TooManyRequests(
            f"This key may ask {verdict.per_minute} times in a minute; ask again in {headers['retry-after']} s."
        )


OwnerDep = Annotated[Account, Depends(holding("read"))]
"""The caller, who may read."""
SubmitterDep = Annotated[Account, Depends(holding("submit"))]
"""The caller, who may also change things of their project."""
ListenerDep = Annotated[Account, Depends(holding("read", counted=False))]
"""The caller, who listens to a stream: one that breaks off comes back as often as it must."""
AdminDep = Annotated[Account, Depends(holding("admin"))]
"""The caller, who may also manage their project's keys, and with a key of the first project the organisation."""


def within_storage(request: Request, owner: SubmitterDep, services: ServicesDep) -> None:
    """Let the body be refused while it comes in, where it is more than the project may still store."""
    with services.db.reading() as session:
        left = quotas.storage_left(session, owner.project_id)
        if left is not None:
            most = max(left, 0) + MULTIPART_BYTES
            surroundings.of(request.scope).tighten(Limit(most, quotas.storage_full(session, owner.project_id)))


WithinStorage = Depends(in_place(within_storage))
"""For routes that store their body."""

AfterDep = Annotated[str | None, Query(max_length=64, description="Id of the last item of the page before.")]
LimitDep = Annotated[int, Query(ge=1, le=100, description="Items in a page.")]
OrderDep = Annotated[Literal["asc", "desc"], Query(description="By time.")]


@dataclass(frozen=True)
class Creating:
    """What a create of a job works with, in one: FastAPI looks for each dependency as long as a query takes."""

    owner: Account
    session: Session
    """That of the create, which may write."""
    reading: Session
    """For what can be looked up before."""
    settings: Settings
    idempotency_key: str | None
    number: int
    """How many other tries its client says that it has made before."""
    around: Surroundings
    failed: FailedTries

    def tried(self, ask: BaseModel) -> Try:
        """Which try of a create this is, whose body is `ask`."""
        this = Try.of(
            self.owner,
            ask.model_dump_json().encode(),
            idempotency_key=self.idempotency_key,
            number=self.number,
            came_at=self.around.came_at,
            may_be_belated=not self.around.was_refused,
        )
        if this.digest is None or this.idempotency_key is not None:
            return this
        if this.number == 0:
            self.around.first_try = this.digest
        return replace(this, first_was_here=this.digest in self.failed) if this.number else this


def creating(
    request: Request,
    owner: SubmitterDep,
    idempotency_key: Annotated[
        str | None, Header(min_length=1, max_length=255, description="The same key again returns the same job.")
    ] = None,
    retries: Annotated[int, Header(alias="x-stainless-retry-count", ge=0, le=10**6, include_in_schema=False)] = 0,
) -> Creating:
    services = services_of(request)
    session, reading = trips.write(services.db), trips.read(services.db)
    around = surroundings.of(request.scope)
    failed: FailedTries = request.app.state.failed_tries
    return Creating(owner, session, reading, services.settings, idempotency_key, retries, around, failed)


CreatingDep = Annotated[Creating, Depends(in_place(creating))]
"""The caller, who may create, and what that takes."""
