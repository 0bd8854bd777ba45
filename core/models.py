"""The tables. A row is the truth. Times are unix seconds, by the database's clock where rows are compared."""

from __future__ import annotations

import secrets
from typing import Any, ClassVar, Literal

from sqlalchemy import (
    JSON,
    BigInteger,
    Enum,
    Float,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.sql.expression import FunctionElement

from core.states import JobState

JsonColumn = JSON().with_variant(JSONB(), "postgresql")
Id = String(64)
Name = String(255)


class database_now(FunctionElement[float]):
    """Unix seconds by the database's clock, so that hosts whose clocks differ agree on a lease."""

    type = Float()
    inherit_cache = True


@compiles(database_now, "sqlite")
def _sqlite_now(element: Any, compiler: Any, **options: Any) -> str:
    # unixepoch('subsec') reads better, but needs SQLite 3.42.
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(database_now, "postgresql")
def _postgresql_now(element: Any, compiler: Any, **options: Any) -> str:
    # clock_timestamp moves within a transaction; now() would stand still.
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


def new_id(prefix: str) -> str:
    """An id such as `job-4f1c…`: a prefix that tells the kind and 96 random bits."""
    return f"{prefix}-{secrets.token_hex(12)}"


State = Enum(JobState, native_enum=False, length=16, values_callable=lambda states: [state.value for state in states])
"""A word in the table, not a database enum: a new state needs no migration of the column."""


def _where(condition: str) -> dict[str, Any]:
    """Arguments of an index over some rows only."""
    return {"sqlite_where": text(condition), "postgresql_where": text(condition)}


class Base(DeclarativeBase):
    # Named alike on both databases, so that a migration can say which constraint it means.
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        dict[str, Any]: JsonColumn,
        list[Any]: JsonColumn,
        float: Float,
        int: BigInteger,
    }


class Project(Base):
    """Who owns things. Nobody sees another project's."""

    __tablename__ = "projects"

    id: Mapped[str] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(Name)
    created_at: Mapped[float] = mapped_column(default=database_now())
    archived_at: Mapped[float | None]
    """Since when its keys open nothing; None while it lives."""
    gpu_hours: Mapped[float | None]
    """Hours of slots in a calendar month (UTC); None has no limit, here and below."""
    concurrent_jobs: Mapped[int | None]
    """Jobs that hold slots at once."""
    storage_bytes: Mapped[int | None]
    """Of files, uploads, checkpoints and results."""
    preemption: Mapped[Literal["never", "own", "any"]] = mapped_column(
        String(8), default="never", server_default="never"
    )
    """Whose jobs of higher priority may stop its jobs, with a checkpoint: `never`, its `own`, or `any`."""


OF_ARCHIVING = "action = 'project.archived'"
"""Condition of an index, to be asked in these words."""


class AuditLog(Base):
    """Who changed what, written in the transaction of the change. Never changed once written."""

    __tablename__ = "audit_logs"
    __table_args__ = (
        Index("audit_logs_by_project", "project_id", "created_at", "id"),
        Index("audit_logs_of_archiving", "project_id", "created_at", "id", **_where(OF_ARCHIVING)),
    )

    id: Mapped[str] = mapped_column(Id, primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    """Where the changed thing is."""
    actor_project_id: Mapped[str] = mapped_column(Id)
    """Whose key it was; another project than `project_id` where an admin of the organisation came in."""
    actor_key_id: Mapped[str] = mapped_column(Id)
    action: Mapped[str] = mapped_column(String(64))
    """Such as `job.created`: a kind of thing, and what became of it."""
    object_id: Mapped[str] = mapped_column(Name)
    data: Mapped[dict[str, Any]]
    """What of it changed; never a secret."""
    request_id: Mapped[str | None] = mapped_column(Id)
    address: Mapped[str | None] = mapped_column(Id)
    """Where the request came from; behind a proxy, where that says it did."""
    created_at: Mapped[float] = mapped_column(default=database_now(), index=True)


class ApiKey(Base):
    """A key's digest and what it may do. The key itself is shown once and not kept."""

    __tablename__ = "api_keys"
    __table_args__ = (Index("api_keys_by_project", "project_id", "created_at", "id"),)

    id: Mapped[str] = mapped_column(Id, primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(Name)
    digest: Mapped[str] = mapped_column(String(64))
    """SHA-256 in hex. The key is random, so a slow hash would add nothing."""
    scopes: Mapped[list[Any]]
    """Of `read`, `submit`, `admin`."""
    created_at: Mapped[float] = mapped_column(default=database_now())
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]


class Visit(Base):
    """A browser that signed in with a key. Its token is in a cookie there; here is the digest."""

    __tablename__ = "visits"

    id: Mapped[str] = mapped_column(Id, primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id", ondelete="CASCADE"), index=True)
    digest: Mapped[str] = mapped_column(String(64))
    """SHA-256 in hex."""
    created_at: Mapped[float] = mapped_column(default=database_now())
    expires_at: Mapped[float] = mapped_column(index=True)


class File(Base):
    """An upload that passed validation; its bytes lie in storage under `storage_key`."""

    __tablename__ = "files"
    __table_args__ = (
        Index("files_by_project", "project_id", "created_at", "id"),
        Index("files_by_project_and_purpose", "project_id", "purpose", "created_at", "id"),
    )

    id: Mapped[str] = mapped_column(Id, primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    filename: Mapped[str] = mapped_column(Name)
    """A label from the client; never a path."""
    purpose: Mapped[str] = mapped_column(String(32))
    bytes: Mapped[int]
    sha256: Mapped[str] = mapped_column(String(64))
    storage_key: Mapped[str] = mapped_column(Text)
    report: Mapped[dict[str, Any]]
    """What validation found, as `GET /v1/files/{id}/report` shows it."""
    created_at: Mapped[float] = mapped_column(default=database_now())
    expires_at: Mapped[float | None] = mapped_column(index=True)
    """When upkeep removes it, or as soon afterwards as no job needs it; None stays until it is deleted."""


class Upload(Base):
    """A file that comes in parts. The parts lie in storage beneath `uploads/<id>/` until it has ended."""

    __tablename__ = "uploads"
    __table_args__ = (
        Index("uploads_by_project", "project_id", "created_at", "id"),
        Index("uploads_by_end", "status", "expires_at"),
    )

    id: Mapped[str] = mapped_column(Id, primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    filename: Mapped[str] = mapped_column(Name)
    purpose: Mapped[str] = mapped_column(String(32))
    bytes: Mapped[int]
    """As many as its creator said; the completed file has exactly these."""
    status: Mapped[str] = mapped_column(String(16), default="pending")
    """`pending`, `completed`, `cancelled` or `expired`; changed once, by a statement that asks for `pending`."""
    received: Mapped[int] = mapped_column(default=0)
    """Bytes of all parts that were ever taken, those that were sent twice among them."""
    num_parts: Mapped[int] = mapped_column(default=0)
    part_ids: Mapped[list[Any] | None] = mapped_column(JsonColumn)
    """What it was completed from, in order."""
    file_expires_after: Mapped[int | None]
    """Seconds that the file will stay; None until it is deleted."""
    file_id: Mapped[str | None] = mapped_column(Id)
    """The file that it became, which may be gone again."""
    created_at: Mapped[float] = mapped_column(default=database_now())
    expires_at: Mapped[float]


class UploadPart(Base):
    """One part that is whole in storage."""

    __tablename__ = "upload_parts"
    __table_args__ = (Index("upload_parts_by_upload", "upload_id", "created_at", "id"),)

    id: Mapped[str] = mapped_column(Id, primary_key=True)
    upload_id: Mapped[str] = mapped_column(ForeignKey("uploads.id", ondelete="CASCADE"))
    bytes: Mapped[int]
    md5: Mapped[str] = mapped_column(String(32))
    created_at: Mapped[float] = mapped_column(default=database_now())


OWES_A_TRY = "made_by_retry > 0"
"""Condition of an index, to be asked in these words: a retry made the job, and its first try has not been here."""


class Job(Base):
    """A job: what was asked, what it became, where it stands, who holds it."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("jobs_by_project", "project_id", "created_at", "id"),
        Index("jobs_by_project_and_state", "project_id", "state", "created_at", "id"),
        Index("jobs_by_project_and_kind", "project_id", "kind", "created_at", "id"),
        Index("jobs_by_project_state_and_kind", "project_id", "state", "kind", "created_at", "id"),
        Index("jobs_by_project_and_name", "project_id", "name", "created_at", "id", **_where("name IS NOT NULL")),
        Index("jobs_without_labels", "project_id", "created_at", "id", **_where("labels = '{}'")),
        Index("jobs_from_a_base", "project_id", "created_at", "id", **_where("base_model IS NOT NULL")),
        Index("jobs_by_base", "base_model", **_where("base_model IS NOT NULL")),
        Index("jobs_in_line", "state", "priority", "created_at", "id", "queued_at"),
        Index("jobs_by_request", "project_id", "request_digest", "created_at"),
        Index("jobs_that_owe_a_try", "project_id", "request_digest", "created_at", **_where(OWES_A_TRY)),
        UniqueConstraint("project_id", "idempotency_key"),
    )

    id: Mapped[str] = mapped_column(Id, primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    kind: Mapped[str] = mapped_column(String(16))
    name: Mapped[str | None] = mapped_column(Name)
    labels: Mapped[dict[str, Any]] = mapped_column(default=dict)
    priority: Mapped[int] = mapped_column(default=0)
    max_runtime: Mapped[float | None]
    """Seconds one attempt may run; None has no limit."""
    spec: Mapped[dict[str, Any]]
    """What they wanted: `core.spec.JobSpec`."""
    run_config: Mapped[dict[str, Any]]
    """What we do: `engine.config.RunConfig`."""
    plan: Mapped[dict[str, Any]]
    """What the run was expected to cost when it was submitted."""
    base_model: Mapped[str | None] = mapped_column(Name)
    """Name of the model that it starts from; None starts from scratch."""
    slots: Mapped[int]
    """Ranks, and so GPUs (or CPU slots), that it needs at once."""

    state: Mapped[JobState] = mapped_column(State, default=JobState.QUEUED)
    attempt: Mapped[int] = mapped_column(default=0)
    """Fencing token: writes of an older attempt are refused. Raised by each claim."""
    node: Mapped[str | None] = mapped_column(Name)
    """Where it is placed while it holds slots."""
    holder: Mapped[str | None] = mapped_column(Name)
    """The supervisor that claimed this attempt; None before the claim and after the end."""
    lease_expires_at: Mapped[float | None]
    losses: Mapped[int] = mapped_column(default=0)
    """Attempts lost in a row, to a crash or a dead host, without a checkpoint between that came beyond `saved_step`."""
    retry_at: Mapped[float | None]
    """Not scheduled before this time, after a loss."""
    queued_at: Mapped[float | None]
    """Since when it waits, where it gave an earlier place in line up; None: since it was made."""
    makes_way: Mapped[bool] = mapped_column(default=False, server_default=false())
    """It holds slots and is to save its state and go back to the queue, for a job of higher priority."""
    queue_reason: Mapped[str | None] = mapped_column(Text)
    """Why it is not running yet, in words."""
    error: Mapped[dict[str, Any] | None] = mapped_column(JsonColumn)
    """`{code, message, param, rank, hint}` once failed."""

    progress: Mapped[dict[str, Any]] = mapped_column(default=dict)
    last_step: Mapped[int] = mapped_column(default=0)
    """Highest step recorded; a resumed attempt's repetitions below it are dropped."""
    saved_step: Mapped[int] = mapped_column(default=0, server_default="0")
    """Highest step that a checkpoint was published of, also where that is damaged, gone, or was gone back from."""
    engine_seq: Mapped[int] = mapped_column(default=0)
    """`seq` of the newest engine event recorded of this attempt; a repeated delivery is dropped."""
    last_event: Mapped[int] = mapped_column(default=0)
    """`seq` of the newest event; raised under the row's lock, so event order is commit order."""
    result_model: Mapped[str | None] = mapped_column(Name)

    idempotency_key: Mapped[str | None] = mapped_column(Name)
    """What the client named this create; the same name again is the same job."""
    request_digest: Mapped[str | None] = mapped_column(String(64))
    """SHA-256 of the body, and of the key holder where the create has no name, by which another try of it is known."""
    made_by_retry: Mapped[int] = mapped_column(default=0)
    """How many tries of the same create its client had made before this one; 0 once the first has come, too."""
    created_at: Mapped[float] = mapped_column(default=database_now())
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]


class JobLabel(Base):
    """One label of a job, as its column has it too, in an order in which jobs are found by it."""

    __tablename__ = "job_labels"
    __table_args__ = (Index("job_labels_by_project", "project_id", "name", "value", "created_at", "job_id"),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(String(512))
    project_id: Mapped[str] = mapped_column(Id)
    """The job's, as is the next."""
    created_at: Mapped[float]


class Removal(Base):
    """A job that was deleted, and of which rows or objects are left for `core.removal` to remove."""

    __tablename__ = "removals"

    job_id: Mapped[str] = mapped_column(Id, primary_key=True)
    created_at: Mapped[float] = mapped_column(default=database_now())


class JobEvent(Base):
    """One thing that happened to a job. Never changed once written."""

    __tablename__ = "job_events"

    job_id: Mapped[str] = mapped_column(Id, primary_key=True)
    """No foreign key, here and in `metrics` and `metric_chunks`: millions of rows can't go with their job at once."""
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """1, 2, 3, … within the job, across attempts, without holes."""
    attempt: Mapped[int]
    type: Mapped[str] = mapped_column(String(32))
    """`state`, `changed`, or the type of an engine event."""
    level: Mapped[str] = mapped_column(String(8), default="info")
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any]]
    created_at: Mapped[float] = mapped_column(default=database_now())


class Metric(Base):
    """One number of one step, of the newest; older ones are in `metric_chunks`."""

    __tablename__ = "metrics"

    job_id: Mapped[str] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[float]


class MetricChunk(Base):
    """Points of a metric that follow one another, packed, and what is known of them without unpacking.

    A metric's chunks do not overlap, and its rows in `metrics` come after them.
    """

    __tablename__ = "metric_chunks"

    job_id: Mapped[str] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    first_step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    last_step: Mapped[int]
    size: Mapped[int]
    """Points."""
    low: Mapped[float]
    """The lowest value, at `low_step`."""
    low_step: Mapped[int]
    high: Mapped[float]
    """The highest value, at `high_step`."""
    high_step: Mapped[int]
    points: Mapped[bytes] = mapped_column(LargeBinary)
    """As `core.points` packs them. The last column: who reads the others then passes over it."""


class Checkpoint(Base):
    """A checkpoint that is whole in storage, published by the attempt that held the job."""

    __tablename__ = "checkpoints"
    # A step that was gone back from may come again, and whoever starts from the earlier one keeps its weights.
    __table_args__ = (
        Index("checkpoints_by_step", "job_id", "step", unique=True, **_where("NOT abandoned")),
        Index("checkpoints_by_job", "job_id", "created_at", "id"),
    )

    id: Mapped[str] = mapped_column(Id, primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    step: Mapped[int]
    attempt: Mapped[int]
    storage_prefix: Mapped[str] = mapped_column(Text)
    bytes: Mapped[int]
    metrics: Mapped[dict[str, Any]]
    abandoned: Mapped[bool] = mapped_column(default=False, server_default=false())
    """The run has gone back beyond its step since, and no attempt goes on from it."""
    created_at: Mapped[float] = mapped_column(default=database_now())


class Artifact(Base):
    """One file of a finished job's result."""

    __tablename__ = "artifacts"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    path: Mapped[str] = mapped_column(String(512), primary_key=True)
    """Relative, with forward slashes, such as `model/config.json`."""
    kind: Mapped[str] = mapped_column(String(16))
    """`model`, `adapter`, `gguf` or `manifest`."""
    bytes: Mapped[int]
    sha256: Mapped[str] = mapped_column(String(64))
    storage_key: Mapped[str] = mapped_column(Text)


class Model(Base):
    """A named model that can be trained further or sampled from. A name is one model's within its project."""

    __tablename__ = "models"
    __table_args__ = (
        UniqueConstraint("project_id", "id"),
        # To a database two NULLs are two projects.
        Index("models_of_everyone", "id", unique=True, **_where("project_id IS NULL")),
    )

    key: Mapped[str] = mapped_column(Name, primary_key=True, default=lambda: new_id("model"))
    """What it is called between the service's own parts: a name is not enough, as two projects may both use it."""
    id: Mapped[str] = mapped_column(Name)
    """Its name, as the API shows and takes it."""
    project_id: Mapped[str | None] = mapped_column(ForeignKey("projects.id"), index=True)
    """None is a base that everyone may use."""
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))
    """The job that made it."""
    source: Mapped[str] = mapped_column(Text)
    """`dir:<folder>` beneath the models directory, `storage:<prefix>`, or `adapter:<job>:<prefix>` on its base.

    `hf://<org>/<name>@<commit>` as long as it is not in storage.
    """
    shape: Mapped[dict[str, Any]]
    """`engine.config.ModelShape`."""
    created_at: Mapped[float] = mapped_column(default=database_now())


class HubDownload(Base):
    """A base that comes, or came, from a hub."""

    __tablename__ = "hub_downloads"

    model_key: Mapped[str] = mapped_column(ForeignKey("models.key", ondelete="CASCADE"), primary_key=True)
    repo: Mapped[str] = mapped_column(Name)
    """Such as `org/name`."""
    commit_hash: Mapped[str] = mapped_column(String(64))
    """What the revision was when it was registered."""
    files: Mapped[list[Any]]
    """What is fetched of it: `core.hub.HubFile`."""
    total_bytes: Mapped[int]
    done_bytes: Mapped[int] = mapped_column(default=0)
    """On the disk of whoever fetches it."""
    status: Mapped[Literal["downloading", "ready", "failed"]] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(Text)
    """Why it failed, or what was in the way last."""
    attempts: Mapped[int] = mapped_column(default=0)
    """Also the fence: what an earlier attempt has to say is dropped."""
    failures: Mapped[int] = mapped_column(default=0)
    """In a row, without a byte more between."""
    damages: Mapped[int] = mapped_column(default=0)
    """How often in a row other bytes came than the hub described, without a whole file more between."""
    due_at: Mapped[float | None] = mapped_column(index=True)
    """When somebody fetches it, or goes on where another has died; None once it is ready or given up."""


class CheckpointPermission(Base):
    """Word that another project may use a checkpoint."""

    __tablename__ = "checkpoint_permissions"
    __table_args__ = (UniqueConstraint("checkpoint_id", "project_id"),)

    id: Mapped[str] = mapped_column(Id, primary_key=True)
    checkpoint_id: Mapped[str] = mapped_column(ForeignKey("checkpoints.id", ondelete="CASCADE"))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id", ondelete="CASCADE"), index=True)
    """Who may use it."""
    created_at: Mapped[float] = mapped_column(default=database_now())


class Node(Base):
    """A host that runs jobs."""

    __tablename__ = "nodes"

    name: Mapped[str] = mapped_column(Name, primary_key=True)
    device: Mapped[str] = mapped_column(String(16))
    """`cpu` or `cuda`."""
    num_slots: Mapped[int]
    slot_memory_bytes: Mapped[int | None]
    """Memory that one slot may use; None where the host didn't say."""
    slot_peak_flops: Mapped[float | None]
    """FLOP/s of one slot in bf16, for MFU; None where it isn't known."""
    rates: Mapped[dict[str, Any] | None] = mapped_column(JsonColumn)
    """What a slot does in a second, measured or by a data sheet, see `engine.plan.cluster.as_facts`; None: unknown."""
    starts_at_once: Mapped[int | None]
    """Ranks that it starts at once; None: as many as it has slots for."""
    heartbeat_at: Mapped[float] = mapped_column(default=database_now())
    draining: Mapped[bool] = mapped_column(default=False)
    """Takes nothing new."""
    bounces: Mapped[int] = mapped_column(default=0, server_default="0")
    """Jobs in a row that it was given and did not start in time."""
    rests_until: Mapped[float | None]
    """Given nothing before this time, after several of them."""
    holder: Mapped[str | None] = mapped_column(String(32))
    """Which of those that might have this name has it, see `workers.nodename`; None: nobody said."""


class Slot(Base):
    """One GPU (or CPU slot) of a node and the job that holds it."""

    __tablename__ = "slots"

    node: Mapped[str] = mapped_column(ForeignKey("nodes.name", ondelete="CASCADE"), primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id", ondelete="SET NULL"), index=True)


class QueuePlace(Base):
    """Where a queued job stands in line, as of the scheduler's last look. Gone once it waits no more."""

    __tablename__ = "queue_places"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[float] = mapped_column(index=True)
    """Rises along the line; nothing else of it means anything."""
    estimated_start: Mapped[float | None]
    """None where nobody knows."""


UNCOUNTED = "NOT counted"
"""Condition of an index, to be asked in these words: those of `Holding` that no `Share` has yet."""


class Holding(Base):
    """Slots that a job held, from when it was placed until it gave them back: what GPU-hours are counted from."""

    __tablename__ = "holdings"
    __table_args__ = (
        Index("holdings_by_project", "project_id", "ended_at"),
        Index("holdings_uncounted", "id", **_where(UNCOUNTED)),
    )

    id: Mapped[str] = mapped_column(Id, primary_key=True, default=lambda: new_id("hold"))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id", ondelete="SET NULL"), index=True)
    slots: Mapped[int]
    started_at: Mapped[float]
    ended_at: Mapped[float | None]
    """None while they are held."""
    counted: Mapped[bool] = mapped_column(default=False)
    """Whether it has ended and is in its project's `Share`."""


class Share(Base):
    """What a project had of the slots, faded by its age: the order of the line goes by it. The scheduler's alone."""

    __tablename__ = "shares"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id", ondelete="CASCADE"), primary_key=True)
    usage: Mapped[float]
    """Slot-seconds of holdings that were counted."""
    as_of: Mapped[float]


class WebhookEndpoint(Base):
    """Where a project wants to be told what became of its jobs."""

    __tablename__ = "webhook_endpoints"
    __table_args__ = (Index("webhook_endpoints_by_project", "project_id", "created_at", "id"),)

    id: Mapped[str] = mapped_column(Id, primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(Name)
    url: Mapped[str] = mapped_column(Text)
    event_types: Mapped[list[Any]]
    secret: Mapped[str] = mapped_column(String(128))
    """What messages are signed with. It must be kept as it is: a digest signs nothing."""
    old_secret: Mapped[str | None] = mapped_column(String(128))
    """The one before, which signs too until `old_secret_until`."""
    old_secret_until: Mapped[float | None]
    held_until: Mapped[float | None]
    """Until when one sender takes a message there, and no other another; None while nothing is on its way."""
    created_at: Mapped[float] = mapped_column(default=database_now())
    updated_at: Mapped[float] = mapped_column(default=database_now())


class WebhookDelivery(Base):
    """A message to one endpoint, written in the transaction of what it tells."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (Index("webhook_deliveries_by_endpoint", "endpoint_id", "created_at", "id"),)

    id: Mapped[str] = mapped_column(Id, primary_key=True)
    """The `webhook-id`, the same however often it is sent."""
    endpoint_id: Mapped[str] = mapped_column(ForeignKey("webhook_endpoints.id", ondelete="CASCADE"))
    type: Mapped[str] = mapped_column(String(64))
    body: Mapped[str] = mapped_column(Text)
    attempts: Mapped[int] = mapped_column(default=0)
    """Also the fence: what an earlier attempt has to say is dropped."""
    due_at: Mapped[float | None] = mapped_column(index=True)
    """When it is sent, or sent again where that process has died; None once it was delivered or given up."""
    delivered_at: Mapped[float | None]
    last_error: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(default=database_now())
