"""Models, in OpenAI's shapes: bases to start from and results of jobs."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from anyio import to_thread
from fastapi import APIRouter, Path, Query, Request
from pydantic import ConfigDict, Field, field_validator

from api.deps import OwnerDep, ReadingDep, ServicesDep, SessionDep, SubmitterDep
from api.errors import errors
from api.schemas import DeletedOut, ModelList, ModelOut
from api.trips import OneTrip
from api.turns import Turns
from core import catalog, downloads
from core.described import Described
from core.errors import Forbidden, InUse, InvalidModel, InvalidSpec, NotFound, QuotaExceeded
from core.keys import Account
from core.services import Services

router = APIRouter(prefix="/v1/models", tags=["models"], route_class=OneTrip)


CHECKPOINT = "ftckpt-"
"""How the ids of checkpoints begin, which are names of models, too."""


class JobSource(Described):
    """The result of a job."""

    model_config = ConfigDict(extra="forbid")
    job: str


class NewModel(Described):
    """A name for a model that is there already."""

    model_config = ConfigDict(extra="forbid")
    id: str = Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")
    source: Annotated[str, Field(pattern=r"^(?:dir:[^\x00-\x1f]+|hf://[^\x00-\x20]+)$", max_length=512)] | JobSource
    """`dir:<folder under the models directory>`, `hf://org/name@revision` on a hub, or `{"job": id}`."""
    object: Literal["model"] = "model"

    @field_validator("id")
    @classmethod
    def no_checkpoints(cls, id_: str) -> str:
        if id_.startswith(CHECKPOINT):
            raise ValueError(f"names that begin with {CHECKPOINT} are those of checkpoints; choose another")
        return id_

    @field_validator("id")
    @classmethod
    def no_path(cls, id_: str) -> str:
        """Browsers and clients take `/./` and `/../` out of a URL, and proxies `//`: nobody could ask for the model."""
        if any(part[:1] in {"", "."} for part in id_.split("/")):
            raise ValueError("what stands between slashes must not be empty, nor begin with a dot; choose another")
        return id_


@router.post("", status_code=201, responses=errors(InvalidSpec, InvalidModel, NotFound, Forbidden, QuotaExceeded))
async def register(new: NewModel, request: Request, owner: SubmitterDep, services: ServicesDep) -> ModelOut:
    """Register a base: a folder under the models directory, a job's result under a name of your own, or one of a hub.

    A base of a hub is looked at, and its revision pinned to a commit; then it is fetched in the background.
    """
    if isinstance(new.source, str) and new.source.startswith("hf://"):
        # The hub takes seconds to answer, apart from the other endpoints' threads, and a few of each project.
        turns: Turns = request.app.state.posting_turns
        async with turns.taken(owner.project_id):
            call = partial(_fetched, services, owner, new.id, new.source)
            return await to_thread.run_sync(call, limiter=request.app.state.posting)
    source = new.source if isinstance(new.source, str) else {"job": new.source.job}
    return await to_thread.run_sync(partial(_named, services, owner, new.id, source))


def _fetched(services: Services, owner: Account, name: str, source: str) -> ModelOut:
    found = downloads.find(services.settings, owner, source)
    with services.db.session() as session:
        model = downloads.begin(session, owner, name, found, models=services.settings.models)
        return ModelOut.of(model, seen_by=owner, download=downloads.of(session, [model])[model.key])


def _named(services: Services, owner: Account, name: str, source: str | dict[str, str]) -> ModelOut:
    with services.db.session() as session:
        model = catalog.register(session, owner, name, source, models=services.settings.models)
        return ModelOut.of(model, seen_by=owner)


@router.get("", responses=errors())
def list_models(owner: OwnerDep, session: ReadingDep, services: ServicesDep) -> ModelList:
    """List the models that can be trained further or sampled from."""
    found = catalog.list_(session, owner, models=services.settings.models)
    coming = downloads.of(session, found)
    return ModelList(data=[ModelOut.of(model, seen_by=owner, download=coming.get(model.key)) for model in found])


# A model's name may hold slashes, which arrive decoded.
@router.get("/{model:path}", responses=errors(NotFound))
def get_model(
    model: Annotated[str, Path(description="Name of the model.")],
    owner: OwnerDep,
    session: ReadingDep,
    services: ServicesDep,
) -> ModelOut:
    """Get a model."""
    found = catalog.get(session, owner, model, models=services.settings.models)
    return ModelOut.of(found, seen_by=owner, download=downloads.of(session, [found]).get(found.key))


@router.delete("/{model:path}", responses=errors(NotFound, InUse, Forbidden))
def delete_model(
    model: Annotated[str, Path(description="Name of the model.")],
    owner: SubmitterDep,
    session: SessionDep,
    reading: ReadingDep,
    services: ServicesDep,
    force: Annotated[
        bool, Query(description="Also where checkpoints are adapters on it, which can't be used then.")
    ] = False,
) -> DeletedOut:
    """Delete a model: its name. The files that a job made stay with the job, and one that is still needed stays."""
    catalog.delete(session, owner, model, models=services.settings.models, force=force, reading=reading)
    return DeletedOut(id=model, object="model")
