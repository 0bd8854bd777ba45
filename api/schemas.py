"""What the API answers. Files, models and completions have OpenAI's shapes; jobs and what belongs to them have ours."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field

from core import audit, plans, quotas, webhooks
from core.described import Described
from core.keys import Account
from core.models import (
    ApiKey,
    Artifact,
    AuditLog,
    Checkpoint,
    File,
    HubDownload,
    Job,
    JobEvent,
    Model,
    Project,
    Upload,
    UploadPart,
    Visit,
    WebhookDelivery,
    WebhookEndpoint,
)
from core.nodes import NodeStatus
from core.plans import Planned
from core.preemption import Preemption
from core.projects import ORGANIZATION
from core.quotas import Usage
from core.scheduler import Prospect
from core.states import JobState


class Out(Described):
    """A part of an answer."""

    model_config = ConfigDict(frozen=True)


class ListOut(Out):
    """A page of a list."""

    object: Literal["list"] = "list"
    has_more: bool = False
    """Whether another page follows; ask for it with `after`, the id of this page's last item."""


class DeletedOut(Out):
    """Word that something is gone."""

    id: str
    object: str
    deleted: bool = True


# Files


class FileOut(Out):
    """OpenAI's file object."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    """The label that the client gave it."""
    purpose: str
    status: Literal["processed"] = "processed"
    """A file that is here passed validation."""
    status_details: str | None = None
    expires_at: int | None = None
    """When it is removed, or as soon afterwards as no job needs it; null stays."""
    sha256: str

    @classmethod
    def of(cls, file: File) -> Self:
        return cls(
            id=file.id,
            bytes=file.bytes,
            created_at=int(file.created_at),
            filename=file.filename,
            purpose=file.purpose,
            expires_at=None if file.expires_at is None else int(file.expires_at),
            sha256=file.sha256,
        )


class FindingOut(Out):
    """One thing that is wrong, or odd, in a file."""

    line: int | None
    column: int | None
    field: str | None
    """Such as `messages[2].content`; null where the line as a whole is meant."""
    message: str


class PlacesOut(Out):
    """Examples that share a fate."""

    count: int
    lines: list[dict[str, Any]]
    """Where the first of them are: `line`, and what is known of it (`tokens`, or the `message` of who refused it)."""


class ReportOut(Out):
    """What is known of a file; from `base` on only where one was named. What doesn't concern its format is left out."""

    model_config = ConfigDict(extra="allow")

    format: str | None = None
    """`text`, `chat`, `completion`, `preference`, `choice` or `tokens`; null: it is no training data."""
    plain_text: bool = False
    """It is text as it stands, not JSON Lines."""
    examples: int = 0
    """Documents, conversations or pairs that can be trained on, or questions to ask."""
    characters: int = 0
    """Of their text, markup left out."""
    empty_lines: int = 0
    errors: list[FindingOut] = Field([])
    warnings: list[FindingOut] = Field([])
    vocab_size: int | None = None
    """Of a tokenizer: entries."""
    base: str | None = None
    """Name of the model that the rest is told for."""
    seq_len: int | None = None
    """Tokens in a row."""
    complete: bool = True
    """False: it took too long, and what was read until then is told."""
    examined: int = 0
    kept: int = 0
    truncated: PlacesOut | None = None
    dropped: PlacesOut | None = None
    """Longer than a row."""
    untrainable: PlacesOut | None = None
    """Nothing in them would be learned."""
    refused: PlacesOut | None = None
    """The base's chat template has no form for them."""
    longest: dict[str, int] | None = None
    """`line` and `tokens`."""
    tokens: int | None = None
    trainable_tokens: int | None = None
    rows: int | None = None
    filled: float | None = None
    """Share of the rows' tokens that is no padding."""
    problem: str | None = None
    """Why a job that reads the file so would fail; null: it would not."""


class SpanOut(Out):
    """A run of text that is learned, or is not."""

    trained: bool
    text: str


class ShownOut(Out):
    """An example as the model sees it."""

    line: int
    fate: Literal["kept", "truncated", "overlong", "untrainable", "refused"]
    """What becomes of it; overlong is dropped, or fails the job."""
    message: str | None = None
    """Why the base's template refuses it."""
    tokens: int | None = None
    trainable_tokens: int | None = None
    more: bool = False
    """There are more ids than are shown."""
    ids: list[int] = Field([])
    mask: list[int] = Field([])
    """For each id, 1 where it is learned."""
    text: str | None = None
    """Of the ids, control tokens included."""
    spans: list[SpanOut] = Field([])
    rejected: ShownOut | None = None
    """Of a preference pair the other answer; the example itself is the better one."""
    choices: list[ShownOut] = Field([])
    """Of a multiple-choice question each choice, of which the tokens that count are marked; the example itself is the
    right one."""
    answer: int | None = None
    """Which of them is right."""


class PreviewOut(Out):
    """Some examples of a file under a base."""

    object: Literal["list"] = "list"
    base: str
    seq_len: int
    data: list[ShownOut]


class FileList(ListOut):
    data: list[FileOut]


# Uploads


class UploadOut(Out):
    """OpenAI's upload object."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    """As many as were announced."""
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: FileOut | None = None
    """What it became; null before, and once that is deleted."""

    @classmethod
    def of(cls, upload: Upload, status: str, file: File | None = None) -> Self:
        return cls.model_validate(
            {
                "id": upload.id,
                "bytes": upload.bytes,
                "created_at": int(upload.created_at),
                "expires_at": int(upload.expires_at),
                "filename": upload.filename,
                "purpose": upload.purpose,
                "status": status,
                "file": None if file is None else FileOut.of(file),
            }
        )


class UploadList(ListOut):
    data: list[UploadOut]


class UploadPartOut(Out):
    """OpenAI's part of an upload, with what tells whether it is the right one."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str
    bytes: int
    md5: str

    @classmethod
    def of(cls, part: UploadPart) -> Self:
        return cls(
            id=part.id, created_at=int(part.created_at), upload_id=part.upload_id, bytes=part.bytes, md5=part.md5
        )


class UploadPartList(ListOut):
    data: list[UploadPartOut]


# Jobs


class ProgressOut(Out):
    """How far a job is. What isn't known yet is null."""

    step: int = 0
    total_steps: int | None = None
    train_rows: int | None = None
    """Rows that there are to train on. A step has no more, whatever `training.global_batch` is."""
    tokens: int | None = None
    percent: float | None = None
    eta_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    """Model FLOPs utilisation in 0..1."""
    hfu: float | None = None
    """Hardware FLOPs utilisation in 0..1: what is computed again in the backward pass counts too."""
    loss: float | None = None
    """Mean over the last step's label tokens, in nats."""
    validation_loss: float | None = None
    """Of the last validation."""
    choice_accuracy: float | None = None
    """Share of the multiple-choice questions whose right choice the model held likeliest, when last asked, in 0..1."""
    choice_accuracy_normalized: float | None = None
    """The same by the log-probability of a character, as longer choices are less likely by themselves."""
    best_validation_loss: float | None = None
    """The lowest so far."""
    best_step: int | None = None
    """The step that had it."""
    stopped_early: bool | None = None
    """Once finished: the validation loss had rested for as long as `training.early_stopping` has patience."""
    exported_step: int | None = None
    """Once finished: the step whose weights are the result."""


class QueueOut(Out):
    """Where a waiting job stands; all null once it doesn't wait."""

    position: int | None = None
    """1 is next."""
    reason: str | None = None
    """Why it isn't running yet."""
    estimated_start: int | None = None
    """When it will start, if what runs ends when it says or must, and nobody comes before it; null: nobody knows."""

    @classmethod
    def of(cls, prospect: Prospect | None, *, reason: str | None) -> Self:
        if prospect is None:
            return cls(reason=reason)
        return cls(position=prospect.position, reason=reason, estimated_start=whole(prospect.estimated_start))


class JobErrorOut(Out):
    """Why a job failed."""

    code: str
    message: str
    param: str | None = None
    rank: int | None = None
    hint: str | None = None
    """What to change."""


class ArtifactOut(Out):
    """One file of a result."""

    path: str
    bytes: int
    sha256: str
    kind: str
    """`model`, `adapter`, `gguf` or `manifest`."""

    @classmethod
    def of(cls, artifact: Artifact) -> Self:
        return cls(path=artifact.path, bytes=artifact.bytes, sha256=artifact.sha256, kind=artifact.kind)


class JobOut(Out):
    """A job: what was asked, what it became, where it stands."""

    id: str
    object: Literal["job"] = "job"
    kind: Literal["pretrain", "finetune"]
    name: str | None
    labels: dict[str, str]
    priority: int
    state: JobState
    created_at: int
    started_at: int | None
    finished_at: int | None
    spec: dict[str, Any]
    """What was asked, as a `JobSpec`."""
    run_config: dict[str, Any]
    """What we do: every number explicit."""
    attempt: int
    """How many times it was started."""
    slots: int
    """GPUs (or CPU slots) that it needs."""
    node: str | None
    """Where it runs."""
    plan: dict[str, Any]
    """What the run was expected to cost when it was submitted."""
    compared: dict[str, dict[str, float]]
    """`planned` beside `measured`, of `step_seconds`, `tokens_per_second` and `bytes_per_rank`, where there are both:
    on a CPU the bytes measured are the process's, program and libraries among them."""
    progress: ProgressOut
    queue: QueueOut
    error: JobErrorOut | None
    model: str | None
    """Name of the result, once there is one."""
    artifacts: list[ArtifactOut]

    @classmethod
    def of(cls, job: Job, *, artifacts: Sequence[Artifact] = (), prospect: Prospect | None = None) -> Self:
        return cls(
            id=job.id,
            kind=job.kind,
            name=job.name,
            labels=job.labels,
            priority=job.priority,
            state=job.state,
            created_at=int(job.created_at),
            started_at=whole(job.started_at),
            finished_at=whole(job.finished_at),
            spec=job.spec,
            run_config=job.run_config,
            attempt=job.attempt,
            slots=job.slots,
            node=job.node,
            plan=job.plan,
            compared=plans.compared(job.plan, job.progress),
            progress=ProgressOut.model_validate(job.progress),
            queue=QueueOut.of(prospect, reason=job.queue_reason),
            error=JobErrorOut.model_validate(job.error) if job.error else None,
            model=job.result_model,
            artifacts=[ArtifactOut.of(artifact) for artifact in artifacts],
        )


class PlannedFileOut(Out):
    """A file that the job would read."""

    id: str
    use: Literal["train", "validation", "evaluation", "tokenizer"]
    filename: str
    bytes: int
    report: dict[str, Any]
    """What validation found, as `GET /v1/files/{id}/report` shows it."""


class LayoutOut(Out):
    """How the job would be laid out over ranks, and a step over passes."""

    ranks: int
    parallel: dict[str, Any]
    """Ranks of each axis, as `run_config.parallel` has them."""
    global_batch: int
    """Rows of a step."""
    micro_batch: int
    """Rows of a pass."""
    micro_batches: int
    """Passes of each replica in a step."""
    seq_len: int
    """Tokens of a row."""
    precision: Literal["bf16", "fp32"]
    device: Literal["cpu", "cuda"]
    recomputed: list[str]
    """Operations whose results are computed again in the backward pass."""


class DiskOut(Out):
    """Bytes on disk, at most, of the run and in storage alike."""

    checkpoint_bytes: int
    """One checkpoint."""
    result_bytes: int
    """The result."""
    total_bytes: int
    """All that the job keeps, while the newest checkpoint is being written."""


class TimeOut(Out):
    """How long it would take. All null, but for `calibration`, where nobody knows how fast the nodes are."""

    step_seconds: float | None
    seconds_by_term: dict[str, float] | None
    """Of a step, by what for; they add up. docs/planner.md says what each is."""
    tokens_per_second: float | None
    """Over all ranks, padding among them."""
    eta_seconds: float | None
    """Of all steps, without what comes before, between and after: reading, validations, checkpoints, the result."""
    calibration: str
    """Whether the rates were measured on a node or are a data sheet's; or that there are none yet."""


class AlternativeOut(Out):
    """A layout that would do."""

    words: str
    """In short."""
    parallel: dict[str, Any]
    micro_batch: int
    recomputed: list[str]
    seconds: dict[str, float]
    """Of a step, by what for, and `total`."""
    bytes_per_rank: int


class PlanOut(Out):
    """What a job would be and need; nothing is queued."""

    object: Literal["plan"] = "plan"
    kind: Literal["pretrain", "finetune"]
    slots: int
    """GPUs (or CPU slots) that it needs at once."""
    parameters: int
    """Weights, adapters included."""
    trainable_parameters: int
    estimated_rows: int
    """Of the training files, once."""
    estimated_steps: int
    estimated_tokens: int
    """In all steps."""
    estimated_epochs: float
    """Passes over the rows."""
    flops_per_step: int
    """Forward and backward, by the model's arithmetic, of rows that are one document each."""
    layout: LayoutOut
    bytes_per_rank: dict[str, int]
    """Of the rank that needs most, in the phase in which it does, by what for, and `total`."""
    bytes_by_phase: dict[str, int]
    """What that rank holds at most, `steady` between steps, in `forward`, in `backward`, while the `optimizer` updates
    weights, and beside a `checkpoint` that is being written."""
    time: TimeOut
    alternatives: list[AlternativeOut]
    """The best five layouts over as many slots, fastest first; empty where nobody knows how fast the nodes are."""
    lost: list[str]
    """Why others that come to mind are not among them."""
    disk: DiskOut
    queue: QueueOut
    """Where it would stand now; without a reason it would start at once."""
    data: list[PlannedFileOut]
    run_config: dict[str, Any]
    """What a submit would run, every number explicit."""

    @classmethod
    def of(cls, kind: Literal["pretrain", "finetune"], planned: Planned) -> Self:
        plan, run = planned.resolution.plan, planned.resolution.run
        asked = run.model_dump(mode="json")
        return cls(
            kind=kind,
            slots=planned.resolution.slots,
            layout=LayoutOut(
                ranks=plan["ranks"],
                parallel=asked["parallel"],
                global_batch=run.training.global_batch,
                micro_batch=run.training.micro_batch,
                micro_batches=plans.micro_batches(asked),
                seq_len=run.data.seq_len,
                precision=run.training.precision,
                device=run.device,
                recomputed=plan["recomputed"],
            ),
            bytes_per_rank=plan["bytes_per_rank"],
            bytes_by_phase=plan["bytes_by_phase"],
            time=TimeOut(**{name: plan[name] for name in TimeOut.model_fields}),
            alternatives=[AlternativeOut(**vars(one)) for one in planned.alternatives.best],
            lost=planned.alternatives.lost,
            disk=DiskOut(
                checkpoint_bytes=plan["checkpoint_bytes"],
                result_bytes=plan["result_bytes"],
                total_bytes=plan["disk_bytes"],
            ),
            queue=QueueOut.of(planned.prospect, reason=planned.prospect.reason),
            data=[
                PlannedFileOut(id=file.id, use=use, filename=file.filename, bytes=file.bytes, report=file.report)
                for use, file in planned.files
            ],
            run_config=asked,
            **{name: plan[name] for name in _OF_A_PLAN},
        )


_OF_A_PLAN = (
    "parameters", "trainable_parameters", "estimated_rows", "estimated_steps", "estimated_tokens",
    "estimated_epochs", "flops_per_step",
)  # fmt: skip


class JobList(ListOut):
    data: list[JobOut]


class EventOut(Out):
    """One thing that happened to a job; also what each frame of its stream carries."""

    id: str
    object: Literal["job.event"] = "job.event"
    seq: int
    """1, 2, 3, … within the job, without holes."""
    type: str
    """`state`, `changed`, `step`, `evaluated`, `spike`, `rolled_back`, `outliers`, `samples`, `choices`, `checkpoint`,
    `log`, `progress`, `started`, `finished`, `stopped` or `failed`."""
    level: str
    message: str
    data: dict[str, Any]
    attempt: int
    created_at: int

    @classmethod
    def of(cls, event: JobEvent) -> Self:
        return cls(
            id=str(event.seq),
            seq=event.seq,
            type=event.type,
            level=event.level,
            message=event.message,
            data=event.data,
            attempt=event.attempt,
            created_at=int(event.created_at),
        )


class EventList(ListOut):
    data: list[EventOut]


class MetricsOut(Out):
    """Numbers over steps, thinned to `max_points` each; first, last and extremes stay."""

    object: Literal["job.metrics"] = "job.metrics"
    series: dict[str, list[tuple[int, float]]]
    """Name -> pairs of step and value, by step. docs/operations.md lists the names with their units."""


class CheckpointOut(Out):
    """A checkpoint that is whole. A job's next attempt goes on from the newest not `abandoned`, in whatever layout."""

    id: str
    """Also the name of its model, to sample from or to start a job with."""
    object: Literal["job.checkpoint"] = "job.checkpoint"
    job_id: str
    step: int
    attempt: int
    bytes: int
    metrics: dict[str, Any]
    abandoned: bool
    """The run has gone back beyond its step since: no attempt goes on from it. It stays for whoever started from it."""
    created_at: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        return cls(
            id=checkpoint.id,
            job_id=checkpoint.job_id,
            step=checkpoint.step,
            attempt=checkpoint.attempt,
            bytes=checkpoint.bytes,
            metrics=checkpoint.metrics,
            abandoned=checkpoint.abandoned,
            created_at=int(checkpoint.created_at),
        )


class CheckpointList(ListOut):
    data: list[CheckpointOut]


class ArtifactList(ListOut):
    """A result's files and its manifest."""

    data: list[ArtifactOut]
    manifest: dict[str, Any] | None
    """What made it (spec, run config, seed, versions, hashes of the data) and what its self-checks found. Null until
    the job has a result."""


# Models


class DownloadOut(Out):
    """A base that comes, or came, from a hub."""

    source: str
    """`hf://org/name@commit`: the commit that the revision was when it was registered."""
    bytes: int
    """So far."""
    total_bytes: int
    reason: str | None
    """Why it could not be fetched, or what was in the way last; one that is still `downloading` is tried again."""

    @classmethod
    def of(cls, download: HubDownload) -> Self:
        return cls(
            source=f"hf://{download.repo}@{download.commit_hash}",
            bytes=download.done_bytes,
            total_bytes=download.total_bytes,
            reason=download.reason,
        )


class ModelOut(Out):
    """OpenAI's model object, with what we know of it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    job_id: str | None
    """The job that made it."""
    shape: dict[str, Any]
    status: Literal["ready", "downloading", "failed"]
    """Whether jobs may start from it."""
    download: DownloadOut | None
    """Where it came from; null for what was here already."""

    @classmethod
    def of(cls, model: Model, *, seen_by: Account, download: HubDownload | None = None) -> Self:
        # A checkpoint that was shared with the caller's project doesn't say whose it is.
        told = model.project_id is None or model.project_id == seen_by.project_id
        return cls(
            id=model.id,
            created=int(model.created_at),
            owned_by=(model.project_id or "trainshed") if told else "another-project",
            job_id=model.job_id if told else None,
            shape=model.shape,
            status="ready" if download is None else download.status,
            download=None if download is None else DownloadOut.of(download),
        )


class ModelList(ListOut):
    data: list[ModelOut]


# Completions


FinishReason = Literal["stop", "length"]


class UsageOut(Out):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(Out):
    """For each token of the text, as OpenAI's older dialect has it."""

    tokens: list[str]
    """`bytes:` and hexadecimals where a token is no whole character."""
    token_logprobs: list[float | None]
    """Null where nothing stands before the token."""
    top_logprobs: list[dict[str, float] | None]
    """The likeliest tokens in its place, and itself."""
    text_offset: list[int]
    """Where it begins in the text, in characters."""


class CompletionChoice(Out):
    index: int
    text: str
    finish_reason: FinishReason | None
    """stop: the model ended, or a stop text came up. length: there was no more room. Null in a stream, before the end.
    """
    logprobs: CompletionLogprobs | None = None


class CompletionOut(Out):
    """OpenAI's completion object; in a stream each frame is one, and goes on where the one before it ended."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageOut | None = Field(None, exclude_if=lambda usage: usage is None)
    """In a stream only of the last frame, where `stream_options.include_usage` asks for it."""


class ChatMessageOut(Out):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class TopLogprob(Out):
    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Out):
    """For each token of the answer."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatChoice(Out):
    index: int
    message: ChatMessageOut
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None


class ChatCompletionOut(Out):
    """OpenAI's chat completion object."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageOut


class ChatDelta(Out):
    """What goes on a message."""

    role: Literal["assistant"] | None = Field(None, exclude_if=lambda role: role is None)
    content: str | None = Field(None, exclude_if=lambda content: content is None)


class ChatChunkChoice(Out):
    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(Out):
    """A frame of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageOut | None = Field(None, exclude_if=lambda usage: usage is None)
    """Only of the last frame, where `stream_options.include_usage` asks for it."""


# Keys


class KeyOut(Out):
    """A key, without its secret."""

    id: str
    object: Literal["key"] = "key"
    name: str
    project: str
    """Id of the project that it opens."""
    scopes: list[str]
    created_at: int
    expires_at: int | None
    revoked_at: int | None

    @classmethod
    def of(cls, key: ApiKey) -> Self:
        return cls(**_key(key))


class NewKeyOut(KeyOut):
    """A key just made, with the secret that is shown this once."""

    secret: str

    @classmethod
    def made(cls, key: ApiKey, secret: str) -> Self:
        return cls(**_key(key), secret=secret)


class KeyList(ListOut):
    data: list[KeyOut]


def _key(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "project": key.project_id,
        "scopes": key.scopes,
        "created_at": int(key.created_at),
        "expires_at": whole(key.expires_at),
        "revoked_at": whole(key.revoked_at),
    }


# Projects


class QuotasOut(Out):
    """What a project may use; null has no limit."""

    gpu_hours: float | None
    """Hours of GPUs (or CPU slots) in a calendar month, UTC."""
    concurrent_jobs: int | None
    """Jobs that hold GPUs at once."""
    storage_bytes: int | None
    """Of files, checkpoints and results."""


class ProjectUsageOut(Out):
    """What a project uses, in the units of its quotas."""

    gpu_hours: float
    """Held since this month began, those held at this moment among them."""
    concurrent_jobs: int
    storage_bytes: int


class ProjectOut(Out):
    """A project: files, jobs, models and keys that nobody else sees."""

    id: str
    object: Literal["project"] = "project"
    organization: str = ORGANIZATION
    """The one organisation that this server is."""
    name: str
    status: Literal["active", "archived"]
    created_at: int
    archived_at: int | None
    quotas: QuotasOut
    preemption: Preemption
    """Whose jobs of higher priority may stop its jobs: nobody's, those of its own, or those of any project."""
    usage: ProjectUsageOut

    @classmethod
    def of(cls, project: Project, usage: Usage) -> Self:
        return cls(
            id=project.id,
            name=project.name,
            status="active" if project.archived_at is None else "archived",
            created_at=int(project.created_at),
            archived_at=whole(project.archived_at),
            preemption=project.preemption,
            quotas=QuotasOut(**{name: getattr(project, name) for name in quotas.NAMES}),
            usage=ProjectUsageOut(**{name: getattr(usage, name) for name in quotas.NAMES}),
        )


class VisitOut(Out):
    """A browser that signed in. What lets it in is in a cookie."""

    id: str
    object: Literal["visit"] = "visit"
    created_at: int
    expires_at: int

    @classmethod
    def of(cls, visit: Visit) -> Self:
        return cls(id=visit.id, created_at=int(visit.created_at), expires_at=int(visit.expires_at))


class ProjectList(ListOut):
    data: list[ProjectOut]


# Audit log


class ActorOut(Out):
    """Whose key it was."""

    type: Literal["api_key", "organization"]
    """`organization` is an admin of the organisation, of whom a project is told no more."""
    key_id: str | None
    project: str | None
    address: str | None
    """Where the request came from."""


class AuditLogOut(Out):
    """One change, and who made it."""

    id: str
    object: Literal["audit_log"] = "audit_log"
    action: str
    """Such as `job.created`."""
    created_at: int
    project: str
    """Id of the project that the changed thing is in."""
    object_id: str
    """Id of the changed thing; a model's name."""
    actor: ActorOut
    request_id: str | None
    """The answer's `x-request-id`."""
    data: dict[str, Any]
    """What of it changed."""

    @classmethod
    def of(cls, entry: AuditLog, *, seen_by: Account) -> Self:
        told = seen_by.manages_organization or entry.actor_project_id == seen_by.project_id
        return cls(
            id=entry.id,
            action=entry.action,
            created_at=int(entry.created_at),
            project=entry.project_id,
            object_id=entry.object_id,
            actor=ActorOut(
                type="api_key" if told else "organization",
                key_id=entry.actor_key_id if told else None,
                project=entry.actor_project_id if told else None,
                address=entry.address if told else None,
            ),
            request_id=entry.request_id if told else None,
            data={
                name: value
                for name, value in entry.data.items()
                if name != audit.OTHER_PROJECT or seen_by.manages_organization
            },
        )


class AuditLogList(ListOut):
    data: list[AuditLogOut]


# Nodes


class SlotOut(Out):
    """One GPU (or CPU slot)."""

    index: int
    job_id: str | None
    """The job of your project that holds it."""
    held: bool


class NodeOut(Out):
    """A host that runs jobs."""

    id: str
    """Its name."""
    object: Literal["node"] = "node"
    device: str
    alive: bool
    """Whether it was heard of lately."""
    draining: bool
    resting_until: int | None
    """It is given no job before then, as it did not start the last ones; null where it does."""
    heartbeat_at: int
    slots: list[SlotOut]

    @classmethod
    def of(cls, status: NodeStatus, *, mine: Collection[str]) -> Self:
        """`mine` are the jobs that the caller may know of."""
        return cls(
            id=status.node.name,
            device=status.node.device,
            alive=status.is_alive,
            draining=status.node.draining,
            resting_until=None if status.node.rests_until is None else int(status.node.rests_until),
            heartbeat_at=int(status.node.heartbeat_at),
            slots=[
                SlotOut(
                    index=slot.index,
                    job_id=slot.job_id if slot.job_id in mine else None,
                    held=slot.job_id is not None,
                )
                for slot in status.slots
            ],
        )


class NodeList(ListOut):
    data: list[NodeOut]


# Health


class AliveOut(Out):
    status: Literal["ok"] = "ok"


class ReadyOut(Out):
    """Whether jobs can be taken and run, and what is missing if not."""

    status: Literal["ready", "not ready"]
    checks: dict[str, str]
    """`ok`, or what is wrong, for `database`, `broker` and `worker`."""


def whole(seconds: float | None) -> int | None:
    """Unix seconds as the API shows them."""
    return None if seconds is None else int(seconds)


# Webhooks


class WebhookEndpointOut(Out):
    """OpenAI's webhook endpoint."""

    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str
    """The end of the secret."""
    created_at: int
    updated_at: int

    @classmethod
    def of(cls, endpoint: WebhookEndpoint) -> Self:
        return cls(**_endpoint(endpoint))


class WebhookEndpointWithSecretOut(WebhookEndpointOut):
    """An endpoint whose secret was just made."""

    signing_secret: str
    """What its messages are signed with; keep it, for it is not shown again."""

    @classmethod
    def made(cls, endpoint: WebhookEndpoint) -> Self:
        return cls(**_endpoint(endpoint), signing_secret=endpoint.secret)


def _endpoint(endpoint: WebhookEndpoint) -> dict[str, Any]:
    return {
        "id": endpoint.id,
        "name": endpoint.name,
        "url": endpoint.url,
        "event_types": endpoint.event_types,
        "signing_secret_hint": webhooks.hint(endpoint),
        "created_at": int(endpoint.created_at),
        "updated_at": int(endpoint.updated_at),
    }


class WebhookEndpointList(ListOut):
    data: list[WebhookEndpointOut]


class EventTypeList(ListOut):
    data: list[str]


class WebhookTestOut(Out):
    """What came of a sample."""

    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    event_type: str
    status_code: int
    """What the endpoint answered."""
    success: Literal[True] = True
    """There was an answer, whatever its status."""
    webhook_endpoint_id: str


class WebhookDeliveryOut(Out):
    """A message to an endpoint."""

    id: str
    """The `webhook-id`."""
    object: Literal["webhook_delivery"] = "webhook_delivery"
    event_type: str
    status: Literal["waiting", "delivered", "given_up"]
    attempts: int
    next_attempt_at: int | None
    delivered_at: int | None
    last_error: str | None
    """Why the last attempt failed."""
    created_at: int

    @classmethod
    def of(cls, message: WebhookDelivery) -> Self:
        ended: Literal["delivered", "given_up"] = "given_up" if message.delivered_at is None else "delivered"
        return cls(
            id=message.id,
            event_type=message.type,
            status=ended if message.due_at is None else "waiting",
            attempts=message.attempts,
            next_attempt_at=whole(message.due_at),
            delivered_at=whole(message.delivered_at),
            last_error=message.last_error,
            created_at=int(message.created_at),
        )


class WebhookDeliveryList(ListOut):
    data: list[WebhookDeliveryOut]
