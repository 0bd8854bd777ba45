"""Models, in OpenAI's shapes: bases to start from and results of jobs."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from api.deps import OwnerDep, ReadingDep, ServicesDep, SessionDep, SubmitterDep
from api.errors import errors
from api.schemas import DeletedOut, ModelList, ModelOut
from api.trips import OneTrip
from core import catalog
from core.errors import Forbidden, InUse, InvalidSpec, NotFound

router = APIRouter(prefix="/v1/models", tags=["models"], route_class=OneTrip)


class JobSource(BaseModel):
    """The result of a job."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    job: str


class NewModel(BaseModel):
    """A name for a model that is there already."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    id: str = Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")
    source: Annotated[str, Field(pattern=r"^dir:[^\x00-\x1f]+$")] | JobSource
    """`dir:<folder under the models directory>`, or `{"job": id}`."""
    object: Literal["model"] = "model"


@router.post("", status_code=201, responses=errors(InvalidSpec, NotFound, Forbidden))
def register(new: NewModel, owner: SubmitterDep, session: SessionDep, services: ServicesDep) -> ModelOut:
    """Register a base: a folder under the models directory, or a job's result under a name of your own."""
    source = new.source if isinstance(new.source, str) else {"job": new.source.job}
    return ModelOut.of(catalog.register(session, owner, new.id, source, models=services.settings.models), seen_by=owner)


@router.get("", responses=errors())
def list_models(owner: OwnerDep, session: ReadingDep, services: ServicesDep) -> ModelList:
    """List the models that can be trained further or sampled from."""
    found = catalog.list_(session, owner, models=services.settings.models)
    return ModelList(data=[ModelOut.of(model, seen_by=owner) for model in found])


# A model's name may hold slashes, which arrive decoded.
@router.get("/{model:path}", responses=errors(NotFound))
def get_model(
    model: Annotated[str, Path(description="Name of the model.")],
    owner: OwnerDep,
    session: ReadingDep,
    services: ServicesDep,
) -> ModelOut:
    """Get a model."""
    return ModelOut.of(catalog.get(session, owner, model, models=services.settings.models), seen_by=owner)


@router.delete("/{model:path}", responses=errors(NotFound, InUse, Forbidden))
def delete_model(
    model: Annotated[str, Path(description="Name of the model.")],
    owner: SubmitterDep,
    session: SessionDep,
    services: ServicesDep,
    force: Annotated[
        bool, Query(description="Also where checkpoints are adapters on it, which can't be used then.")
    ] = False,
) -> DeletedOut:
    """Delete a model: its name. The files that a job made stay with the job, and one that is still needed stays."""
    catalog.delete(session, owner, model, models=services.settings.models, force=force)
    return DeletedOut(id=model, object="model")
