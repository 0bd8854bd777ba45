"""What a user asks for: `JobSpec`, the body of `POST /v1/jobs`. It may say "auto"; `core.resolve` makes it numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, Strict, field_validator, model_validator

from core.described import Described
from core.presets import PRESETS
from engine import config

_DURATION = re.compile(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?")
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

_FILE = "file-0123456789abcdef01234567"
"""What an id looks like, in examples."""


def duration(value: object) -> object:
    """Seconds from `12h`, `1d6h`, `90m`; a number stays, and anything else has no meaning."""
    if isinstance(value, str) and value and (match := _DURATION.fullmatch(value)):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        # As a number: a sum beyond what a timedelta holds is then refused like any other that is too large.
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    # pydantic's own durations, as a row holds them, begin with a P.
    if isinstance(value, bool) or not (isinstance(value, int | float | timedelta) or str(value).startswith("P")):
        raise ValueError("say a duration such as 12h, 1d6h or 90m, or seconds as a number")
    return value


def _share(value: object) -> object:
    """A number that is no share has an answer of its own: it is not a file's id that was meant."""
    if isinstance(value, int | float) and not 0 < value < 1:
        raise ValueError("say the id of a file, or a share between 0 and 1, such as 0.05; without any, leave it out")
    return value


class Ask(Described):
    """A piece of a request that refuses keys it does not know and never guesses a type."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelAsk(Ask):
    """Exactly one of a base, a preset, or a shape spelled out."""

    base: Text | None = Field(None, min_length=1, max_length=255)
    """Name of a model to continue from, as `GET /v1/models` lists it."""
    preset: Text | None = Field(
        None,
        description=f"Name of a shape: {', '.join(PRESETS)}. Sizes beside it replace its own, and what "
        "usually follows from them follows.",
    )
    architecture: config.Architecture | None = None
    """Spells a shape out, with the sizes beside it: the family whose layers it has, and as which it is exported."""
    num_layers: Annotated[config.Layers, Strict()] | None = None
    """Decoder layers."""
    hidden_size: Size | None = None
    """Width of a token."""
    num_heads: Size | None = None
    """Attention heads."""
    num_kv_heads: Size | None = None
    """Default: `num_heads`."""
    head_dim: Size | None = Field(None, ge=2)
    """Default: `hidden_size / num_heads`."""
    sliding_window: Size | None = None
    """Tokens that a token sees in each layer, itself among them. Default: all before it. In mistral and the qwens."""
    ffn_hidden_size: Size | None = None
    """Width of the feed-forward part. Default: 8/3 of `hidden_size`, rounded up to 64; 4 times it without a gate."""
    max_seq_len: Size | None = None
    """Longest sequence the model is meant for, in tokens. Default: `data.seq_len`, or 1024."""
    vocab_size: Size | None = Field(None, ge=2)
    """Default: the tokenizer's."""
    tie_embeddings: Flag | None = None
    """Whether the output reuses the input's embeddings. Default: true."""
    norm_eps: Real | None = Field(None, gt=0, le=1)
    """Default: 1e-5."""
    rope_theta: Real | None = Field(None, gt=1, le=1e12)
    """Base of the rotary frequencies. Default: 10000. Not in gpt2 and bloom, nor the next."""
    rope_scaling: dict[Text, Text | Whole | Real | Flag | list[Real]] | None = Field(None, max_length=16)
    """As in Hugging Face's `config.json`. Default: none."""
    hidden_dropout: Real | None = Field(None, ge=0, lt=1)
    """Share of features dropped in training, of what is added to the residual. Default: 0. In gpt2 and bloom."""
    attention_dropout: Real | None = Field(None, ge=0, lt=1)
    """Share of attention's probabilities dropped in training; whole score matrices are then computed. Default: 0."""
    init_std: Real | None = Field(None, gt=0, le=10)
    """Standard deviation of the initial weights. Default: 0.02."""

    @field_validator("preset")
    @classmethod
    def known(cls, preset: str | None) -> str | None:
        if preset is not None and preset not in PRESETS:
            raise ValueError(f"there is no preset {preset!r}; there are {', '.join(PRESETS)}")
        return preset

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
    """The base's own."""
    train: TokenizerTraining | None = None
    """A byte-level BPE, learned from the training files first."""
    file: FileId | None = None
    """A `tokenizer.json`, uploaded with the purpose tokenizer."""
    type: Literal["bytes"] | None = None
    """Bytes as they are: nothing to learn."""

    @model_validator(mode="after")
    def one_source(self) -> Self:
        if sum(value is not None for value in (self.from_, self.train, self.file, self.type)) != 1:
            raise ValueError('say exactly one of "from", "train", "file" and "type"')
        return self


class DataAsk(Ask):
    train: tuple[FileId, ...] = Field(min_length=1, max_length=64)
    """Ids of uploaded files."""
    validation: Annotated[FileId | Annotated[Real, Field(gt=0, lt=1)] | None, BeforeValidator(_share)] = None
    """A file, or the share of the training rows held out. Default: none."""
    evaluation: FileId | None = None
    """A file of multiple-choice questions, which the model is asked whenever it is validated (`training.eval_every`),
    and at the end. Nothing is learned from them. Default: none."""
    seq_len: Whole | None = Field(None, ge=2)
    """Tokens in a row. Default: the model's `max_seq_len`, at most 1024; at most 2048 for preference pairs, whose two
    answers share a row."""
    packing: Flag = True
    """Fill rows with several examples, isolated from one another."""
    format: Literal["auto", "text", "chat", "completion", "preference", "tokens"] = "auto"
    """What a line means; anything but auto refuses files of another format."""
    template: Literal["base"] | config.NamedTemplate = "base"
    """The chat template, which the result is given. base: the base's own, or the one below that fits where it has none;
    chatml, which needs its two control tokens in the vocabulary; plain, which writes roles in words."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """What happens to an example longer than a row. Plain text is cut into rows and is never overlong."""


class FullMethod(Ask):
    """Train every weight."""

    type: Literal["full"] = "full"


class LoraAsk(Ask):
    """Low-rank adapters beside frozen weights (Hu et al. 2021)."""

    rank: Annotated[Whole, Field(ge=1, le=1024)] = 16
    """Inner width of an adapter."""
    alpha: Real = Field(32.0, gt=0, le=1e6)
    """Adapters are scaled by `alpha / rank`."""
    rslora: Flag = False
    """Scale by `alpha / sqrt(rank)` instead, so that a larger rank learns as much (Kalajdzievski 2023)."""
    dropout: Real = Field(0.0, ge=0, lt=1)
    """Share of the adapter's inputs dropped in training."""
    targets: Annotated[tuple[config.Target, ...], Field(min_length=1)] | Literal["all-linear"] = "all-linear"
    """Which matrices are adapted: all that the model's family has, or those named. gpt2 and bloom have no gate."""


class LoraMethod(LoraAsk):
    """Train low-rank adapters beside frozen weights."""

    type: Literal["lora"] = "lora"


class DpoMethod(Ask):
    """Train on pairs of answers, the better of which is to gain on the worse (Rafailov et al. 2023)."""

    type: Literal["dpo"] = "dpo"
    beta: Real = Field(0.1, gt=0, le=1e3)
    """The larger, the closer to the base the model stays."""
    label_smoothing: Real = Field(0.0, ge=0, lt=0.5)
    """Chance that the answers of a pair stand the wrong way round (conservative DPO)."""
    sft_coefficient: Real = Field(0.0, ge=0, le=1e3)
    """Weight of the better answer's own loss beside, a mean over its tokens: it keeps that answer likely."""
    lora: LoraAsk | None = LoraAsk()
    """The adapters that are trained; null trains every weight."""


class EarlyStoppingAsk(Ask):
    """End a job whose validation loss has not become lower for so long."""

    patience: Whole = Field(ge=1)
    """Validations in a row that may pass without a lower loss."""
    min_delta: Real = Field(0.0, ge=0, le=1e6)
    """By how much a loss must be lower to count, in nats."""


class TrainingAsk(Ask):
    steps: Whole | None = Field(None, ge=1)
    """Optimizer steps. At most one of steps, epochs and tokens is said; default: 3 epochs, and one for DPO."""
    epochs: Real | None = Field(None, gt=0, le=1e6)
    """Passes over the training rows."""
    tokens: Real | None = Field(None, ge=1, le=1e15)
    """Tokens to train on, padding among them."""
    global_batch: Whole | None = Field(None, ge=1)
    """Rows per step. Default: 16, or what `parallel.data` needs."""
    micro_batch: Annotated[Whole, Field(ge=1)] | Literal["auto"] = "auto"
    """Rows per forward pass on one rank; auto takes what fits the memory, and keeps each rank of a pipeline busy."""
    lr: Real | None = Field(None, gt=0, le=10)
    """Default: 3e-4 from scratch, 2e-4 for LoRA, 2e-5 for a full fine-tune; for DPO 1e-5 with adapters and 1e-6
    without."""
    lr_multiplier: Real | None = Field(None, gt=0, le=1e6)
    """Times the default of `lr`, where that is not said."""
    min_lr_ratio: Real = Field(0.1, ge=0, le=1)
    """The schedule ends at this share of `lr`."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the rate falls after the warmup. wsd (warmup, stable, decay): it stays at `lr` and falls, linearly, only at
    the end, so that a longer run begins as a shorter one did."""
    warmup: Real = Field(0.05, ge=0, lt=1)
    """Share of all steps over which the rate rises from zero."""
    decay: Real | None = Field(None, gt=0, le=1)
    """Under wsd, the share of all steps, at the end, over which the rate falls. Default: 0.2."""
    weight_decay: Real = Field(0.1, ge=0, le=100)
    """Decoupled; matrices only, never norms or biases."""
    betas: tuple[Annotated[Real, Field(ge=0, lt=1)], Annotated[Real, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Adam's."""
    clip: Real | None = Field(1.0, gt=0)
    """Largest global gradient norm; null does not clip."""
    precision: Literal["bf16", "fp32"] | None = None
    """Default: bf16 on GPUs, fp32 on CPUs."""
    seed: Annotated[int, Strict()] = Field(1, ge=0, lt=2**63)
    """Of the initial weights, and of the order of rows."""
    eval_every: Whole | None = Field(None, ge=1)
    """Steps between validations. Default: at the end only; where `keep_best` or `early_stopping` goes by them, as
    often as checkpoints."""
    checkpoint_every: Whole | None = Field(None, ge=1)
    """Default: a tenth of the run, at most 500 steps."""
    keep_checkpoints: Whole = Field(3, ge=1)
    """Newest checkpoints kept."""
    keep_best: Flag = False
    """Save at each validation whose loss is the lowest so far, and keep that checkpoint besides the newest, until there
    is a better one."""
    early_stopping: EarlyStoppingAsk | None = None
    """Default: all steps are taken."""
    outliers: Annotated[Whole, Field(ge=0, le=1000)] = 10
    """Training examples named at the end, in the event `outliers`, with file and line: those whose loss lies furthest
    above that of the step they were last trained in. It costs nothing; 0 names none. Under dpo there are none."""
    samples: Annotated[Whole, Field(ge=0, le=20)] = 0
    """Validation prompts that the model answers after each validation, in the event `samples`: at most 64 tokens each,
    the likeliest ones. Not with `parallel.pipeline`."""
    non_finite: Literal["stop", "skip", "roll_back"] = "stop"
    """What follows a loss or a gradient that is not finite. stop: the job fails, naming the lines of data; skip: the
    step makes no update; roll_back: training goes back to the last checkpoint and leaves out the rows since. Of a
    validation that comes out so, skip and roll_back name the lines in a warning and go on without its loss; where all
    of its rows do, the weights are to blame: then skip stops too, and roll_back goes back."""
    max_recoveries: Whole = Field(3, ge=1)
    """Times that it may skip or roll back before it stops."""
    roll_back_checkpoints: Whole = Field(1, ge=1)
    """Checkpoints that roll_back goes back by: 1 is to the newest; to the oldest that is kept where there are fewer."""
    stall_seconds: Real | None = Field(600.0, ge=1, le=7 * 24 * 3600)
    """Training in which nothing goes on for so long begins again from its checkpoint, the stacks of all ranks in its
    logs. A step may be found to stand still sooner, by what steps of this job usually take; null waits for ever."""
    check_replicas_every: Whole | None = Field(100, ge=1)
    """Steps between comparisons of what several ranks must hold alike, bit for bit; null compares before checkpoints
    only."""

    @model_validator(mode="after")
    def one_length(self) -> Self:
        if sum(value is not None for value in (self.steps, self.epochs, self.tokens)) > 1:
            raise ValueError('say at most one of "steps", "epochs" and "tokens"')
        return self

    @model_validator(mode="after")
    def one_rate(self) -> Self:
        if self.lr is not None and self.lr_multiplier is not None:
            raise ValueError('say at most one of "lr" and "lr_multiplier"')
        return self


class ParallelAsk(Ask):
    tensor: Whole = Field(1, ge=1)
    """Ranks that share each matrix; keep within one host."""
    sequence: Flag = False
    """Shard norms and residuals along the sequence over the tensor axis (Korthikanti et al. 2022)."""
    pipeline: Whole = Field(1, ge=1)
    """Ranks that a token goes through one after another, each with its stages of the layers (1F1B)."""
    virtual: Whole = Field(1, ge=1)
    """Stages on each pipeline rank: more of them idle less and say more to one another (Narayanan et al. 2021)."""
    stages: Annotated[tuple[Annotated[Whole, Field(ge=0)], ...], Field(min_length=1)] | None = None
    """Layers of each of the `pipeline` x `virtual` stages, in order. Default: such that each has as equal work as can
    be, the output among it."""
    context: Whole = Field(1, ge=1)
    """Ranks that share each row's tokens; `data.seq_len` must be a multiple of twice as many."""
    data: Whole | None = Field(None, ge=1)
    """Default: `resources.gpus` divided by the other axes."""
    shard_optimizer: Flag = True
    """Give each replica its share of the optimizer state only (ZeRO-1)."""
    shard_gradients: Flag = False
    """And of the gradients (ZeRO-2)."""
    shard_weights: Flag = False
    """And of the weights (ZeRO-3): each layer's are gathered for its use. Least memory, most exchange."""

    @model_validator(mode="before")
    @classmethod
    def shares_what_comes_before(cls, given: Any) -> Any:
        return config.with_weaker_sharing(given)

    @model_validator(mode="after")
    def shares_in_order(self) -> Self:
        config.check_sharing(self)
        return self


Operation = Annotated[config.Operation, BeforeValidator(lambda name: "activation" if name == "gelu" else name)]
"""GELU is what the papers call the activation, whatever the family has in its place."""


class RecomputeAsk(Ask):
    mode: Literal["none", "selective", "full", "budget"] = "selective"
    """selective: what `operations` names; full: each whole layer; budget: what costs least and fits `budget_gib`."""
    operations: Annotated[tuple[Operation, ...], Field(min_length=1)] | None = None
    """Under selective, all that is computed again. Default: the attention core alone (Korthikanti et al. 2022). For a
    norm, the activation (`gelu` asks for it as well) or dropout no matrix product is done again; for the up-projection
    (and the gate), the projections before the core (qkv) or the layer theirs are."""
    budget_gib: Annotated[Real, Field(gt=0)] | None = None
    """Under budget, GiB of a rank for what its layers keep; the plan says what is computed again for that."""


class ResourcesAsk(Ask):
    gpus: Annotated[Whole, Field(ge=1, le=100_000)] | None = None
    """GPUs, or CPU slots on hosts without any. Default: what `parallel` needs, or 1."""
    nodes: Whole = Field(1, ge=1)
    """Hosts. Only one in this version."""


class ArtifactsAsk(Ask):
    merged: Flag = True
    """Under LoRA, also make the base with the adapter merged in."""
    dtype: Literal["keep", "bf16", "fp32"] = "keep"
    """Of the weights. keep: the base's when fine-tuning, the training precision otherwise."""
    gguf: Flag = False
    """Also make one GGUF file of the model, as `gguf/model.gguf`, for llama.cpp and its like; nothing is quantised. For
    llama, mistral, qwen2 and qwen3 models."""
    checkpoint: Literal["last", "best"] = "last"
    """Which weights: after the last step, or where the validation loss was lowest; that checkpoint is then kept."""

    @model_validator(mode="after")
    def has_a_model_to_write(self) -> Self:
        if self.gguf and not self.merged:
            raise ValueError("gguf needs the merged model; set merged to true, or leave gguf out")
        return self


class WandbAsk(Ask):
    """A project of Weights & Biases."""

    project: Text = Field(min_length=1, max_length=128)
    """Name of the project there."""
    name: Text | None = Field(None, min_length=1, max_length=128)
    """What the run is called. Default: the job's id."""
    entity: Text | None = Field(None, min_length=1, max_length=128)
    """Team or user that the run belongs to. Default: that of the service's key."""
    tags: tuple[Annotated[Text, Field(min_length=1, max_length=64)], ...] = Field((), max_length=16)
    """Tags of the run."""


class IntegrationAsk(Ask):
    """Somebody else's service that is told of a job."""

    type: Literal["wandb"]
    """Which one."""
    wandb: WandbAsk
    """Where in it."""


JobName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
LabelName = Annotated[Text, Field(min_length=1, max_length=64)]
Priority = Annotated[Whole, Field(ge=-100, le=100)]
MOST_LABELS = 16


class JobSpec(Ask):
    """A training job. `{"kind": "finetune", "model": {"base": …}, "data": {"train": […]}}` is a whole one."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"kind": "finetune", "model": {"base": "smollm2-135m"}, "data": {"train": [_FILE]}},
                {
                    "kind": "pretrain",
                    "model": {"preset": "llama-15m"},
                    "tokenizer": {"train": {"vocab_size": 4096}},
                    "data": {"train": [_FILE], "validation": 0.02},
                    "training": {"steps": 1000, "lr": 1e-3},
                },
            ]
        }
    )

    kind: Literal["pretrain", "finetune"]
    """pretrain reads text, from random weights or a base; finetune reads any format, from a base."""
    name: JobName | None = None
    """Becomes part of the resulting model's name."""
    labels: dict[LabelName, Text] = Field(default_factory=dict, max_length=MOST_LABELS)
    """Of your own, to find jobs by."""
    priority: Priority = 0
    """Higher goes first."""
    max_runtime: (
        Annotated[timedelta, BeforeValidator(duration), Field(gt=timedelta(0), le=timedelta(days=3650))] | None
    ) = None
    """How long it may run, such as `12h`, `1d6h`, `90m`, or seconds as a number. Default: as long as it takes. A job
    that will be over in time may start before a larger one that waits."""
    at_max_runtime: Literal["fail", "requeue"] = "fail"
    """What becomes of it then, its state saved: it fails, and may be retried; or it lines up again, behind those that
    wait, and goes on for as long once it is its turn."""
    model: ModelAsk
    tokenizer: TokenizerAsk | None = None
    """Default: the base's, or bytes where there is no base."""
    data: DataAsk
    method: Annotated[FullMethod | LoraMethod | DpoMethod, Field(discriminator="type")] | None = None
    """Default: LoRA for a fine-tune, DPO with adapters where the files hold preference pairs, full for a pretrain."""
    training: TrainingAsk = TrainingAsk()
    parallel: Literal["auto"] | ParallelAsk = "auto"
    """Ranks of each axis. auto: the fastest layout that fits, by how fast the nodes were measured to be; where that is
    not known, as little tensor parallelism as memory allows, the rest as replicas."""
    recompute: Literal["auto"] | RecomputeAsk = "auto"
    """Activations that are dropped after the forward pass and computed again for the backward pass. auto: as
    little as memory requires, what costs no matrix product first: norms, the activation and dropout; the attention core
    where its probabilities are dropped, for then it would keep all scores."""
    resources: ResourcesAsk = ResourcesAsk()
    artifacts: ArtifactsAsk = ArtifactsAsk()
    integrations: tuple[IntegrationAsk, ...] = Field((), max_length=4)
    """Services that are told of the job while it runs, where whoever runs the workers has given these a key."""

    @model_validator(mode="after")
    def lines_up_at_some_time(self) -> Self:
        if self.at_max_runtime == "requeue" and self.max_runtime is None:
            raise ValueError('at_max_runtime "requeue" needs a max_runtime, such as "4h"')
        return self

    def files(self) -> Iterator[tuple[str, str]]:
        """Each uploaded file it names: the path of the field, and the id."""
        yield from self.examples()
        if self.data.evaluation is not None:
            yield "data.evaluation", self.data.evaluation
        if self.tokenizer is not None and self.tokenizer.file is not None:
            yield "tokenizer.file", self.tokenizer.file

    def examples(self) -> Iterator[tuple[str, str]]:
        """Of these the ones that are learned from, or held out of the same kind."""
        for index, id_ in enumerate(self.data.train):
            yield f"data.train.{index}", id_
        if isinstance(self.data.validation, str):
            yield "data.validation", self.data.validation


class LayoutAsk(Ask):
    """How a job goes on: what is left out stays. Its numbers are the same in every layout, but for rounding."""

    parallel: Literal["auto"] | ParallelAsk | None = None
    """Ranks of each axis, as in the spec."""
    recompute: Literal["auto"] | RecomputeAsk | None = None
    """Activations that are computed again, as in the spec."""
    resources: ResourcesAsk | None = None
    """GPUs, as in the spec. Default: what `parallel` needs."""

    def on(self, spec: JobSpec) -> JobSpec:
        """The spec with this layout."""
        said = self.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        if not said:
            return spec
        asked = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
        if "parallel" in said:
            # As many as the layout before needed would contradict another one.
            asked.pop("resources", None)
        return JobSpec.model_validate(asked | said)


class JobChange(Ask):
    """What of a job may change at any time, as a JSON merge patch (RFC 7396): what is left out stays."""

    name: JobName | None = None
    """Becomes part of the resulting model's name, unless that is there already. null: none."""
    labels: dict[LabelName, Text | None] | None = Field(None, max_length=2 * MOST_LABELS)
    """Those named are set, or with null taken away; the others stay. null: takes all away."""
    priority: Priority | None = None
    """Higher goes first. null: 0."""

    def on(self, *, name: str | None, labels: Mapping[str, str], priority: int) -> dict[str, Any]:
        """The three as they become."""
        said = self.model_fields_set
        merged = {} if self.labels is None else {**labels, **self.labels}
        return {
            "name": self.name if "name" in said else name,
            "labels": {key: value for key, value in merged.items() if value is not None}
            if "labels" in said
            else dict(labels),
            "priority": (self.priority or 0) if "priority" in said else priority,
        }
