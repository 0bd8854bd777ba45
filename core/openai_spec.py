"""What a user asks for in OpenAI's words: `FineTuneAsk`, the body of `POST /v1/fine_tuning/jobs`.

Beside its own fields it takes those of `JobSpec` that OpenAI has none for. `core.openai_jobs` makes one of the other.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from core.spec import (
    MOST_LABELS,
    ArtifactsAsk,
    Ask,
    DataAsk,
    FileId,
    Flag,
    FullMethod,
    IntegrationAsk,
    JobName,
    JobSpec,
    LabelName,
    LoraAsk,
    LoraMethod,
    ParallelAsk,
    Priority,
    Real,
    RecomputeAsk,
    ResourcesAsk,
    Text,
    TokenizerAsk,
    TrainingAsk,
    Whole,
    duration,
)

Auto = Literal["auto"]


def _number_or_auto(value: object) -> object:
    """Where it is neither, a union would say so of each of its branches."""
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError('say a number, without quotes, or "auto"')
    if not isinstance(value, str) and value <= 0:
        raise ValueError('this must be greater than 0, or "auto"')
    return value


_OrAuto = BeforeValidator(_number_or_auto)


class HyperparametersAsk(Ask):
    """Numbers, or "auto", which leaves them to us."""

    n_epochs: Annotated[Annotated[Real, Field(le=1e6)] | Auto, _OrAuto] | None = None
    """Passes over the training rows. auto: 3, and 1 for DPO."""
    batch_size: Annotated[Whole | Auto, _OrAuto] | None = None
    """Rows per step. auto: 16."""
    learning_rate_multiplier: Annotated[Annotated[Real, Field(le=1e6)] | Auto, _OrAuto] | None = None
    """Times our default rate: 2e-4 for LoRA, 2e-5 for all weights; for DPO 1e-5 with adapters and 1e-6 without."""
    sequence_length: Annotated[Whole | Auto, _OrAuto] | None = None
    """Ours: tokens in a row, as `data.seq_len`."""


class DpoHyperparametersAsk(HyperparametersAsk):
    beta: Annotated[Annotated[Real, Field(le=1e3)] | Auto, _OrAuto] | None = None
    """The larger, the closer to the base the model stays. auto: 0.1."""


class SupervisedAsk(Ask):
    hyperparameters: HyperparametersAsk | None = None
    """How it trains."""
    lora: LoraAsk | None = LoraAsk()
    """Ours: the adapters that are trained; null trains every weight."""


class PreferenceAsk(Ask):
    hyperparameters: DpoHyperparametersAsk | None = None
    """How it trains."""
    lora: LoraAsk | None = LoraAsk()
    """Ours: the adapters that are trained; null trains every weight."""
    label_smoothing: Real = Field(0.0, ge=0, lt=0.5)
    """Ours: chance that the answers of a pair stand the wrong way round."""
    sft_coefficient: Real = Field(0.0, ge=0, le=1e3)
    """Ours: weight of the better answer's own loss beside."""


class SupervisedMethod(Ask):
    """Learn the answers of the training file."""

    type: Literal["supervised"]
    supervised: SupervisedAsk | None = None
    """Its settings."""


class PreferenceMethod(Ask):
    """Learn which of two answers is better."""

    type: Literal["dpo"]
    dpo: PreferenceAsk | None = None
    """Its settings."""


class PretrainMethod(Ask):
    """Ours: go on learning plain text, with every weight."""

    type: Literal["pretrain"]


class ReinforcementMethod(Ask):
    """Known, so that it can be refused in words."""

    type: Literal["reinforcement"]
    reinforcement: Any = None
    """Nothing here is read."""


Method = Annotated[
    SupervisedMethod | PreferenceMethod | PretrainMethod | FullMethod | LoraMethod | ReinforcementMethod,
    Field(discriminator="type"),
]


class MoreDataAsk(DataAsk):
    """`data` of a `JobSpec`, in which the training file need not be said again."""

    train: tuple[FileId, ...] = Field((), max_length=63)
    """Ids of more files to train on, beside `training_file`."""


class FineTuneAsk(Ask):
    """A fine-tune. `{"model": …, "training_file": "file-…"}` is a whole one."""

    model: Text = Field(min_length=1, max_length=255)
    """Name of the model to start from, as `GET /v1/models` lists it; a checkpoint is one, too."""
    training_file: FileId
    """Id of an uploaded file."""
    validation_file: FileId | None = None
    """Id of the file that the validation loss is of. Default: none."""
    suffix: JobName | None = None
    """Becomes part of the resulting model's name; a `JobSpec` calls it `name`."""
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] | None = None
    """Of the initial weights, and of the order of rows. Default: 1."""
    metadata: Annotated[dict[LabelName, Text], Field(max_length=MOST_LABELS)] | None = None
    """Of your own, to find jobs by: at most 16 pairs, keys of 64 characters, values of 512; `labels` of a `JobSpec`."""
    method: Method | None = None
    """What is learned. Default: `supervised` with LoRA, or `dpo` where the file holds preference pairs."""
    hyperparameters: HyperparametersAsk | None = None
    """Deprecated by OpenAI: those of `method.supervised`."""
    integrations: tuple[IntegrationAsk, ...] | None = Field(None, max_length=4)
    """Services that are to be told of the job."""

    packing: Flag | None = None
    """Ours: fill rows with several examples, as `data.packing`."""
    priority: Priority = 0
    """Ours: higher goes first."""
    max_runtime: (
        Annotated[timedelta, BeforeValidator(duration), Field(gt=timedelta(0), le=timedelta(days=3650))] | None
    ) = None
    """Ours: how long it may run, such as `12h`. Default: as long as it takes."""
    at_max_runtime: Literal["fail", "requeue"] = "fail"
    """Ours: whether it fails then, or lines up again to go on; its state is saved."""
    tokenizer: TokenizerAsk | None = None
    """Ours, as in a `JobSpec`. A base keeps its own."""
    data: MoreDataAsk = MoreDataAsk()
    """Ours: how the files are read."""
    training: TrainingAsk = TrainingAsk()
    """Ours: what `hyperparameters` have no name for."""
    parallel: Auto | ParallelAsk = "auto"
    """Ours: ranks of each axis."""
    recompute: Auto | RecomputeAsk = "auto"
    """Ours: activations that are computed again in the backward pass."""
    resources: ResourcesAsk = ResourcesAsk()
    """Ours: slots and hosts."""
    artifacts: ArtifactsAsk = ArtifactsAsk()
    """Ours: what the job leaves behind."""


OURS = frozenset(FineTuneAsk.model_fields) & frozenset(JobSpec.model_fields) - {"model", "method", "integrations"}
"""Fields that are a `JobSpec`'s own, and mean the same here."""
