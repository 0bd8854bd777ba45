"""What `/v1/fine_tuning` answers: OpenAI's objects, with more of ours in fields that they have no name for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field

from api.schemas import JobErrorOut, ListOut, Out, ProgressOut, QueueOut, whole
from core import openai_jobs
from core.models import Checkpoint, CheckpointPermission, Job, JobEvent
from core.openai_jobs import Status
from core.projects import ORGANIZATION
from core.scheduler import Prospect
from core.states import JobState


class HyperparametersOut(Out):
    """As numbers, also where "auto" was asked for."""

    n_epochs: float | int
    batch_size: int
    learning_rate_multiplier: float | int
    """Times the default rate of the method."""
    beta: float | None = Field(None, exclude_if=lambda beta: beta is None)
    """Under dpo."""


class AdaptersOut(Out):
    """The LoRA adapters that are trained."""

    rank: int
    alpha: float
    dropout: float
    rslora: bool
    targets: list[str] | None


class MethodSettingsOut(Out):
    hyperparameters: HyperparametersOut
    lora: AdaptersOut | None
    """Null: every weight is trained."""


class MethodOut(Out):
    type: Literal["supervised", "dpo"]
    supervised: MethodSettingsOut | None = Field(None, exclude_if=lambda settings: settings is None)
    dpo: MethodSettingsOut | None = Field(None, exclude_if=lambda settings: settings is None)


class FineTuningJobOut(Out):
    """OpenAI's fine-tuning job object; `project_id` and what follows it are ours."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    """While it runs and has taken a step."""
    model: str
    """What it starts from."""
    fine_tuned_model: str | None
    """Name of the result, once it has succeeded."""
    organization_id: str
    status: Status
    """One of OpenAI's six; `state` is finer."""
    training_file: str
    validation_file: str | None
    result_files: list[str]
    """Once it has succeeded, a CSV of its losses by step; unless you deleted it."""
    trained_tokens: int | None
    """Once it has ended."""
    seed: int
    hyperparameters: HyperparametersOut
    method: MethodOut
    integrations: list[dict[str, Any]]
    metadata: dict[str, str] | None
    """Its labels; null where it has none."""
    error: JobErrorOut | None
    """Why it failed, and null otherwise."""

    project_id: str
    state: JobState
    suffix: str | None
    training_files: list[str]
    """All of them."""
    priority: int
    progress: ProgressOut
    queue: QueueOut
    spec: dict[str, Any]
    """What was asked, as `POST /v1/jobs` takes it. `GET /v1/jobs/{id}` tells everything."""

    @classmethod
    def of(cls, job: Job, *, now: float, result_file: str | None, prospect: Prospect | None = None) -> Self:
        succeeded = job.state is JobState.SUCCEEDED
        failure = openai_jobs.error(job)
        files = openai_jobs.training_files(job)
        return cls(
            id=job.id,
            created_at=int(job.created_at),
            finished_at=whole(job.finished_at),
            estimated_finish=openai_jobs.estimated_finish(job, now=now),
            model=job.base_model or "",
            fine_tuned_model=job.result_model if succeeded else None,
            organization_id=ORGANIZATION,
            status=openai_jobs.STATUSES[job.state],
            training_file=files[0],
            validation_file=openai_jobs.validation_file(job),
            result_files=[result_file] if succeeded and result_file else [],
            trained_tokens=openai_jobs.trained_tokens(job),
            seed=job.run_config["training"]["seed"],
            hyperparameters=HyperparametersOut.model_validate(openai_jobs.hyperparameters(job)),
            method=MethodOut.model_validate(openai_jobs.method(job)),
            integrations=job.spec.get("integrations", []),
            metadata=job.labels or None,
            error=JobErrorOut.model_validate(failure) if failure else None,
            project_id=job.project_id,
            state=job.state,
            suffix=job.name,
            training_files=files,
            priority=job.priority,
            progress=ProgressOut.model_validate(job.progress),
            queue=QueueOut.of(prospect, reason=job.queue_reason),
            spec=job.spec,
        )


class PageOut(ListOut):
    """A page of a list, and its ends: one of the client's kinds of page goes on after the last."""

    first_id: str | None = None
    last_id: str | None = None


def ends(items: Sequence[Any]) -> dict[str, str | None]:
    return {"first_id": items[0].id if items else None, "last_id": items[-1].id if items else None}


class FineTuningJobList(PageOut):
    data: list[FineTuningJobOut]


class FineTuningEventOut(Out):
    """OpenAI's event object."""

    id: str
    """Unlike that of any other event of any job."""
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any]
    """Of metrics: `step`, `total_steps`, `train_loss`, `train_mean_token_accuracy`, or `valid_loss`,
    `valid_mean_token_accuracy` and both as `full_…`, and what else `GET /v1/jobs/{id}/events` tells."""
    event: str
    """Its type there."""

    @classmethod
    def of(cls, event: JobEvent, job: Job) -> Self:
        levels: Mapping[str, Any] = openai_jobs.LEVELS
        return cls(
            id=openai_jobs.event_id(event),
            created_at=int(event.created_at),
            level=levels.get(event.level, event.level),
            message=event.message,
            type="metrics" if openai_jobs.is_metrics(event) else "message",
            data=openai_jobs.event_data(event, total_steps=job.progress.get("total_steps")),
            event=event.type,
        )


class FineTuningEventList(PageOut):
    data: list[FineTuningEventOut]


class CheckpointMetricsOut(Out):
    """What was known at its step."""

    step: int
    train_loss: float | None
    train_mean_token_accuracy: float | None
    valid_loss: float | None
    valid_mean_token_accuracy: float | None
    full_valid_loss: float | None
    full_valid_mean_token_accuracy: float | None


class FineTuningCheckpointOut(Out):
    """OpenAI's checkpoint object."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    """Name of its model, to sample from or to start a job with: the id."""
    fine_tuning_job_id: str
    step_number: int
    metrics: CheckpointMetricsOut

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        return cls(
            id=checkpoint.id,
            created_at=int(checkpoint.created_at),
            fine_tuned_model_checkpoint=checkpoint.id,
            fine_tuning_job_id=checkpoint.job_id,
            step_number=checkpoint.step,
            metrics=CheckpointMetricsOut.model_validate(openai_jobs.checkpoint_metrics(checkpoint)),
        )


class FineTuningCheckpointList(PageOut):
    data: list[FineTuningCheckpointOut]


class PermissionOut(Out):
    """Word that a project may use a checkpoint."""

    id: str
    object: Literal["checkpoint.permission"] = "checkpoint.permission"
    created_at: int
    project_id: str

    @classmethod
    def of(cls, permission: CheckpointPermission) -> Self:
        return cls(id=permission.id, created_at=int(permission.created_at), project_id=permission.project_id)


class PermissionList(PageOut):
    data: list[PermissionOut]
