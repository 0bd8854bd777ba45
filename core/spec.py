"""What a user asks for: `JobSpec`, the body of `POST /v1/jobs`. It may say "auto"; `core.resolve` makes it numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator

from engine import config

_DURATION = re.compile(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?")
Target = Literal["q", "k", "v", "o", "gate", "up", "down"]
Whole = Annotated[int, Strict(), Field(le=2**31 - 1)]
"""An integer, and no text or truth value that could pass for one.

Narrow it as `Annotated[Whole, Field(le=…)]`: a bound in the field's default is overruled by the one in here.
"""
Size = Annotated[config.Size, Strict()]
Real = Annotated[float, Strict()]
"""A number, and no text or truth value that could pass for one."""
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Field(max_length=512, pattern=r"^[^\x00]*$")]
"""Short, and without the one character that PostgreSQL has no place for."""
FileId = Annotated[str, Field(pattern=r"^file-[A-Za-z0-9]{1,58}$")]


def _duration(value: object) -> object:
    """Seconds from `12h`, `1d6h`, `90m`; a number stays, and anything else has no meaning."""
    if isinstance(value, str) and value and (match := _DURATION.fullmatch(value)):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        # As a number: a sum beyond what a timedelta holds is then refused like any other that is too large.
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    # pydantic's own durations, as a row holds them, begin with a P.
    if isinstance(value, bool) or not (isinstance(value, int | float | timedelta) or str(value).startswith("P")):
        raise ValueError("say a duration such as 12h, 1d6h or 90m, or seconds as a number")
    return value


class Ask(BaseModel):
    """A piece of a request that refuses keys it does not know and never guesses a type."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelAsk(Ask):
    """Exactly one of a base, a preset, or a shape spelled out."""

    base: Text | None = Field(None, min_length=1, max_length=255)
    """Name of a model to continue from."""
    preset: Text | None = None
    """Name of a shape, such as `llama-15m`."""
    architecture: Literal["llama"] | None = None
    num_layers: Annotated[config.Layers, Strict()] | None = None
    hidden_size: Size | None = None
    num_heads: Size | None = None
    num_kv_heads: Size | None = None
    """Default: `num_heads`."""
    head_dim: Size | None = Field(None, ge=2)
    """Default: `hidden_size / num_heads`."""
    ffn_hidden_size: Size | None = None
    max_seq_len: Size | None = None
    vocab_size: Size | None = Field(None, ge=2)
    """Default: the tokenizer's."""
    tie_embeddings: Flag | None = None
    norm_eps: Real | None = Field(None, gt=0, le=1)
    rope_theta: Real | None = Field(None, gt=1, le=1e12)
    rope_scaling: dict[Text, Text | Whole | Real | Flag | list[Real]] | None = Field(None, max_length=16)
    init_std: Real | None = Field(None, gt=0, le=10)

    @model_validator(mode="after")
    def one_way_to_say_it(self) -> Self:
        said = [name for name in ("base", "preset", "architecture") if getattr(self, name) is not None]
        if len(said) != 1:
            raise ValueError('say exactly one of "base", "preset" or "architecture" with its sizes')
        if said == ["base"] and self.model_fields_set - {"base"}:
            raise ValueError(f"a base brings its own shape; leave out {sorted(self.model_fields_set - {'base'})}")
        return self


class TokenizerTraining(Ask):
    vocab_size: Annotated[Whole, Field(ge=260, le=1_000_000)]
    """Entries wanted, the 256 bytes and the special tokens among them."""


class TokenizerAsk(Ask):
    """Exactly one of `from`, `train`, `file` and `type`."""

    from_: Literal["base"] | None = Field(None, alias="from")
    train: TokenizerTraining | None = None
    file: FileId | None = None
    type: Literal["bytes"] | None = None

    @model_validator(mode="after")
    def one_source(self) -> Self:
        if sum(value is not None for value in (self.from_, self.train, self.file, self.type)) != 1:
            raise ValueError('say exactly one of "from", "train", "file" and "type"')
        return self


class DataAsk(Ask):
    train: tuple[FileId, ...] = Field(min_length=1, max_length=64)
    """Ids of uploaded files."""
    validation: FileId | Annotated[Real, Field(gt=0, lt=1)] | None = None
    """A file, or the share of the training rows held out."""
    seq_len: Whole | None = Field(None, ge=2)
    """Tokens in a row. Default: the model's `max_seq_len`, at most 1024."""
    packing: Flag = True
    format: Literal["auto", "text", "chat", "completion"] = "auto"
    overlong: Literal["error", "drop", "truncate"] = "error"


class FullMethod(Ask):
    type: Literal["full"] = "full"


class LoraMethod(Ask):
    type: Literal["lora"] = "lora"
    rank: Annotated[Whole, Field(ge=1, le=1024)] = 16
    alpha: Real = Field(32.0, gt=0, le=1e6)
    dropout: Real = Field(0.0, ge=0, lt=1)
    targets: Literal["all-linear"] | Annotated[tuple[Target, ...], Field(min_length=1)] = "all-linear"


class TrainingAsk(Ask):
    steps: Whole | None = Field(None, ge=1)
    epochs: Real | None = Field(None, gt=0, le=1e6)
    tokens: Real | None = Field(None, ge=1, le=1e15)
    """At most one of steps, epochs and tokens. Default: 3 epochs."""
    global_batch: Whole | None = Field(None, ge=1)
    """Rows per step. Default: 16, or what `parallel.data` needs."""
    micro_batch: Literal["auto"] | Annotated[Whole, Field(ge=1)] = "auto"
    lr: Real | None = Field(None, gt=0, le=10)
    """Default: 3e-4 from scratch, 2e-4 for LoRA, 2e-5 for a full fine-tune."""
    min_lr_ratio: Real = Field(0.1, ge=0, le=1)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: Real = Field(0.05, ge=0, lt=1)
    weight_decay: Real = Field(0.1, ge=0, le=100)
    betas: tuple[Annotated[Real, Field(ge=0, lt=1)], Annotated[Real, Field(ge=0, lt=1)]] = (0.9, 0.95)
    clip: Real | None = Field(1.0, gt=0)
    precision: Literal["bf16", "fp32"] | None = None
    """Default: bf16 on GPUs, fp32 on CPUs."""
    seed: Annotated[int, Strict()] = Field(1, ge=0, lt=2**63)
    eval_every: Whole | None = Field(None, ge=1)
    checkpoint_every: Whole | None = Field(None, ge=1)
    """Default: a tenth of the run, at most 500 steps."""
    keep_checkpoints: Whole = Field(3, ge=1)

    @model_validator(mode="after")
    def one_length(self) -> Self:
        if sum(value is not None for value in (self.steps, self.epochs, self.tokens)) > 1:
            raise ValueError('say at most one of "steps", "epochs" and "tokens"')
        return self


class ParallelAsk(Ask):
    tensor: Whole = Field(1, ge=1)
    sequence: Flag = False
    pipeline: Whole = Field(1, ge=1)
    virtual: Whole = Field(1, ge=1)
    context: Whole = Field(1, ge=1)
    data: Whole | None = Field(None, ge=1)
    """Default: `resources.gpus` divided by the other axes."""
    shard_optimizer: Flag = True


class RecomputeAsk(Ask):
    mode: Literal["none", "selective", "full"] = "selective"


class ResourcesAsk(Ask):
    gpus: Annotated[Whole, Field(ge=1, le=100_000)] | None = None
    """GPUs, or CPU slots on hosts without any. Default: what `parallel` needs, or 1."""
    nodes: Whole = Field(1, ge=1)
    """Hosts. Only one in this version."""


class ArtifactsAsk(Ask):
    merged: Flag = True
    """Under LoRA, also make the base with the adapter merged in."""
    dtype: Literal["keep", "bf16", "fp32"] = "keep"


class JobSpec(Ask):
    """A training job. `{"kind": "finetune", "model": {"base": …}, "data": {"train": […]}}` is a whole one."""

    kind: Literal["pretrain", "finetune"]
    name: str | None = Field(None, min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Becomes part of the resulting model's name."""
    labels: dict[
        Annotated[Text, Field(min_length=1, max_length=64)], Text
    ] = Field(default_factory=dict, max_length=16)  # fmt: skip
    priority: Annotated[Whole, Field(ge=-100, le=100)] = 0
    """Higher goes first."""
    max_runtime: (
        Annotated[timedelta, BeforeValidator(_duration), Field(gt=timedelta(0), le=timedelta(days=3650))] | None
    ) = None
    """Such as `12h`, `1d6h`, `90m`, or seconds as a number."""
    model: ModelAsk
    tokenizer: TokenizerAsk | None = None
    """Default: the base's, or bytes where there is no base."""
    data: DataAsk
    method: Annotated[FullMethod | LoraMethod, Field(discriminator="type")] | None = None
    """Default: LoRA for a fine-tune, full for a pretrain."""
    training: TrainingAsk = TrainingAsk()
    parallel: Literal["auto"] | ParallelAsk = "auto"
    recompute: Literal["auto"] | RecomputeAsk = "auto"
    resources: ResourcesAsk = ResourcesAsk()
    artifacts: ArtifactsAsk = ArtifactsAsk()

    def files(self) -> Iterator[tuple[str, str]]:
        """Each uploaded file it names: the path of the field, and the id."""
        for index, id_ in enumerate(self.data.train):
            yield f"data.train.{index}", id_
        if isinstance(self.data.validation, str):
            yield "data.validation", self.data.validation
        if self.tokenizer is not None and self.tokenizer.file is not None:
            yield "tokenizer.file", self.tokenizer.file
