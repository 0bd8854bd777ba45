"""What a run tells the world: one JSON object a line in `events.jsonl`, written by rank 0, in order.

A line is whole only with its newline. `seq` counts from 1 within one attempt. The last line of a run that
ended by itself is `finished`, `stopped` or `failed`; a file without one was cut short.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

ErrorCode = Literal[
    "invalid_data",
    "invalid_model",
    "out_of_memory",
    "non_finite_loss",
    "rank_lost",
    "stalled",
    "disk_full",
    "max_runtime",
    "lease_lost",
    "internal",
]
"""Every reason a job can fail for; the service documents a hint for each."""


class EventBase(BaseModel):
    """The fields that each event has."""

    # A newer engine may say more than an older service knows; unknown fields are ignored, unknown types are not read.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    seq: int = Field(0, ge=0)
    """Position in the file, from 1; the writer sets it."""
    time: float = 0.0
    """Unix seconds; the writer sets it."""


class Started(EventBase):
    """Data and model are ready and the first step is next."""

    type: Literal["started"] = "started"
    total_steps: int
    start_step: int
    """Steps already done before this attempt; 0 when fresh."""
    ranks: int
    parameters: int
    """Weights of the model, each counted once."""
    trainable_parameters: int
    train_rows: int
    train_tokens: int
    """Tokens in the training rows, padding left out."""
    validation_rows: int = 0
    vocab_size: int
    device: str


class Step(EventBase):
    """One optimizer step is done.

    Its time runs from the moment when the loss of the step before was known, or when training began, until its own is.
    So what follows a loss (the update, and a validation or a checkpoint after that step) counts in the step after it.
    The seconds are means over ranks; those of the parts add up to `step_seconds`.
    """

    type: Literal["step"] = "step"
    step: int
    """Counts from 1 over the whole job, across attempts."""
    loss: float
    """Mean over the step's label tokens, in nats; under dpo over its pairs."""
    token_accuracy: float | None = None
    """Share of the label tokens that the model held likeliest, in 0..1; under dpo of the better answers'."""
    rewards_chosen: float | None = None
    """Under dpo, mean over the pairs of beta times what the better answer has gained in log-probability since before
    training; the next of the worse one."""
    rewards_rejected: float | None = None
    reward_margin: float | None = None
    """Of the two the difference."""
    reward_accuracy: float | None = None
    """Share of the pairs whose better answer has gained more."""
    lr: float
    grad_norm: float
    """Global L2 norm before clipping."""
    tokens: int
    """Trained on since the job began, padding left out."""
    tokens_per_second: float
    """Over all ranks; validation and checkpoints left out of the time, here and in the next two."""
    step_seconds: float
    mfu: float | None = None
    """Model FLOPs utilisation in 0..1; None where the device's peak isn't known."""
    hfu: float | None = None
    """Hardware FLOPs utilisation in 0..1: what is computed again in the backward pass counts too."""
    compute_seconds: float | None = None
    """What is left of the time: forward, backward and the update."""
    communication_seconds: float | None = None
    """Waiting for other ranks in collectives; what is hidden behind compute does not count."""
    bubble_seconds: float | None = None
    """Waiting for a neighbour in the pipeline."""
    data_seconds: float | None = None
    """Making batches."""
    evaluation_seconds: float | None = None
    """In validation, all of it."""
    checkpoint_seconds: float | None = None
    """Held up by saving a checkpoint."""
    memory_bytes: int | None = None
    """Largest device memory held by one rank so far; resident memory on a CPU."""


class Evaluated(EventBase):
    """A validation pass."""

    type: Literal["evaluated"] = "evaluated"
    step: int
    loss: float
    """Mean over all validation label tokens, in nats; under dpo over all pairs."""
    token_accuracy: float
    """Share of the label tokens that the model held likeliest, in 0..1; under dpo of the better answers'."""
    tokens: int
    """Label tokens that the accuracy is of."""
    is_best: bool = False
    """No validation of this run had a lower loss so far."""
    rewards_chosen: float | None = None
    """Under dpo, mean over the pairs of beta times what the better answer has gained in log-probability since before
    training; the next of the worse one."""
    rewards_rejected: float | None = None
    reward_margin: float | None = None
    """Of the two the difference."""
    reward_accuracy: float | None = None
    """Share of the pairs whose better answer has gained more."""


class Spike(EventBase):
    """A step's loss lies far above those of the steps before it."""

    type: Literal["spike"] = "spike"
    step: int
    loss: float
    usual: float
    """Median loss of the steps before, 64 of them at most."""


class RolledBack(EventBase):
    """The run went back: checkpoints of steps beyond this one that were saved before are not on its way any more."""

    type: Literal["rolled_back"] = "rolled_back"
    step: int
    """The step that it goes on from; 0 is the beginning."""
    from_step: int
    """The last that it had taken."""
    rows: int
    """Rows of the training data that lie behind it: the next step takes those that follow."""


class Outlier(BaseModel):
    """A training document that is learned worse than others."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    file: str
    """Relative to the run directory."""
    line: int
    loss: float
    """Mean over its label tokens, in nats, before the update of the last step that trained on it."""
    step: int
    """That step."""
    step_loss: float
    """The loss of that whole step."""


class Outliers(EventBase):
    """Training is over, or told to stop: where its data may be wrong."""

    type: Literal["outliers"] = "outliers"
    step: int
    since_step: int
    """Documents are judged by what this and later steps found, before which this attempt took none."""
    documents: tuple[Outlier, ...]
    """Those whose loss lies furthest above their step's, the furthest first. A row may hold several, a long text be
    several."""


class Sample(BaseModel):
    """What the model says to a validation prompt, taking the likeliest token each time."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    file: str
    """Relative to the run directory."""
    line: int
    prompt: str
    """As the model reads it, control tokens among it."""
    text: str
    finish_reason: Literal["stop", "length"]
    """stop: the model ended; length: it was cut."""
    expected: str
    """What the data has there, cut to as many tokens as `text` may have."""


class Samples(EventBase):
    """What the model says after a validation."""

    type: Literal["samples"] = "samples"
    step: int
    samples: tuple[Sample, ...]


class Choices(EventBase):
    """Multiple-choice questions were asked: which choice the model holds likeliest behind each question.

    How likely is the sum of the log-probabilities of the choice's tokens. Of equals the first counts.
    """

    type: Literal["choices"] = "choices"
    step: int
    questions: int
    """Asked."""
    correct: int
    """Of them, those whose right choice is the likeliest."""
    correct_normalized: int
    """Of them, those whose right choice is the likeliest for its length: by the log-probability of a character."""
    accuracy: float
    """`correct` over `questions`; what others call acc."""
    accuracy_normalized: float
    """`correct_normalized` over `questions`; what others call acc_norm."""
    left_out: int = 0
    """Questions that are longer than a row, and were not asked."""


class CheckpointSaved(EventBase):
    """A checkpoint is whole on disk."""

    type: Literal["checkpoint"] = "checkpoint"
    step: int
    path: str
    """Relative to the run directory."""
    bytes: int
    seconds: float
    """From the end of its step until it was published; training went on meanwhile."""
    blocked_seconds: float | None = None
    """Of them, those that training stood still; None from an engine that did not say."""
    best_step: int | None = None
    """Step of the checkpoint to keep besides the newest, which may be this one; None where none is to be kept."""


class Log(EventBase):
    """Something worth reading."""

    type: Literal["log"] = "log"
    level: Literal["info", "warning", "error"] = "info"
    message: str
    rank: int = 0


class Progress(EventBase):
    """Long work outside the training steps: tokenising, loading, exporting."""

    type: Literal["progress"] = "progress"
    phase: Literal["tokenizer", "data", "packing", "model", "reference", "export"]
    done: int
    total: int
    unit: str


class Finished(EventBase):
    """All steps are done, or the run has stopped early, and `export/` is whole."""

    type: Literal["finished"] = "finished"
    step: int
    """The last one taken."""
    tokens: int
    stopped_early: bool = False
    """The validation loss had not become lower for so long that no more steps were taken."""
    exported_step: int | None = None
    """Whose weights were exported; None from an engine that did not say."""
    export: str = "export"
    """Relative to the run directory."""


class Stopped(EventBase):
    """Told to stop (SIGTERM): the step was finished and a checkpoint saved, if there was a step to save."""

    type: Literal["stopped"] = "stopped"
    step: int


class Failed(EventBase):
    """The run can't go on, and says why."""

    type: Literal["failed"] = "failed"
    code: ErrorCode
    message: str
    """In the user's words."""
    hint: str | None = None
    """What to change."""
    param: str | None = None
    """The field of the spec that is to blame, if one is."""
    rank: int | None = None


Event = Annotated[
    Started
    | Step
    | Evaluated
    | Spike
    | RolledBack
    | Outliers
    | Samples
    | Choices
    | CheckpointSaved
    | Log
    | Progress
    | Finished
    | Stopped
    | Failed,
    Field(discriminator="type"),
]

LAST = (Finished, Stopped, Failed)
"""Events after which nothing follows."""

NO_ROOM = 28
"""Exit code of a rank or a launch that ended without a last event since a full disk had no room for it: ENOSPC."""

adapter: TypeAdapter[Event] = TypeAdapter(Event)
"""`adapter.validate_json(line)` reads one line."""
