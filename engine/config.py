"""What a run is, with every number explicit. The service resolves wishes to this; the trainer reads nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from math import gcd, isfinite, lcm, sqrt
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Part(BaseModel):
    """A frozen piece of configuration that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Size = Annotated[int, Field(ge=1, le=2**20)]
"""One dimension of a model. Far beyond any that there is, and small enough to try each divisor of it in a moment."""
Layers = Annotated[int, Field(ge=1, le=10_000)]

NamedTemplate = Literal["chatml", "plain"]
Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "gpt2", "bloom"]
AttentionBias = Literal["none", "qkv", "all"]
Rate = Annotated[float, Field(ge=0, lt=1)]
"""Share of elements that dropout zeroes."""
Target = Literal["q", "k", "v", "o", "gate", "up", "down"]
"""A matrix of a layer."""


@dataclass(frozen=True)
class Traits:
    """What sets one family apart from another: the values that a field of its shape may have, the usual one first.

    What the layers of a family are made of follows, the same for all its shapes.
    """

    attention_bias: tuple[AttentionBias, ...] = ("none",)
    mlp_bias: tuple[bool, ...] = (False,)
    qk_norm: tuple[bool, ...] = (False,)
    windowed: bool = True
    """Attention may be limited to a sliding window."""
    free_heads: bool = True
    """Queries may share keys and values, and heads may be wider than their part of `hidden_size`."""
    ffn_ratio: int | None = None
    """`ffn_hidden_size` over `hidden_size`, where the family knows no other."""
    norm: Literal["rms", "layer"] = "rms"
    """layer: LayerNorm, with a bias (Ba et al. 2016)."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """gelu: no gate, and the tanh form of GELU (Hendrycks & Gimpel 2016)."""
    positions: Literal["rope", "learned", "alibi"] = "rope"
    """learned: a table of `max_seq_len` embeddings; alibi: scores fall with distance (Press et al. 2021)."""
    embed_norm: bool = False
    """The embedding's output is normed (BLOOM, section 3.2.2)."""
    drops: frozenset[Literal["embedding", "branches"]] = frozenset()
    """Where `hidden_dropout` is: after the embedding, and on what attention and feed-forward add to the residual."""

    @property
    def matrices(self) -> tuple[Target, ...]:
        """The matrices of a layer, in the order in which a token goes through them."""
        inward: tuple[Target, ...] = ("gate", "up") if self.mlp == "swiglu" else ("up",)
        return ("q", "k", "v", "o", *inward, "down")

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Field of a shape to the values it may have."""
        return {"attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias, "qk_norm": self.qk_norm}


FAMILIES: dict[str, Traits] = {
    "llama": Traits(attention_bias=("none", "all"), mlp_bias=(False, True), windowed=False),
    "mistral": Traits(),
    "qwen2": Traits(attention_bias=("qkv",)),
    "qwen3": Traits(attention_bias=("none", "all"), qk_norm=(True,)),
    "gpt2": Traits(
        attention_bias=("all",),
        mlp_bias=(True,),
        windowed=False,
        free_heads=False,
        norm="layer",
        mlp="gelu",
        positions="learned",
        drops=frozenset({"embedding", "branches"}),
    ),
    "bloom": Traits(
        attention_bias=("all",),
        mlp_bias=(True,),
        windowed=False,
        free_heads=False,
        ffn_ratio=4,
        norm="layer",
        mlp="gelu",
        positions="alibi",
        embed_norm=True,
        drops=frozenset({"branches"}),
    ),
}

SCALINGS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset()),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
        frozenset({"original_max_position_embeddings"}),
    ),
    "yarn": (
        frozenset({"factor"}),
        frozenset(
            {
                "original_max_position_embeddings",
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
            }
        ),
    ),
}
"""Keys that each kind of `rope_scaling` needs, and those it may have."""
SMALLEST_SCALE, LARGEST_SCALE = 2**-24, 2**24
"""Of any number in `rope_scaling`; what is beyond drowns in fp32."""


def kind_of_scaling(scaling: Mapping[str, Any]) -> str:
    """Which kind a `rope_scaling` is, by the newer or the older of the keys that say so."""
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


class ModelShape(Part):
    """The sizes of a decoder. Field names are ours; `engine.weights` maps them to and from Hugging Face's."""

    architecture: Architecture = "llama"
    """The family: which of the fields below may be what, and what the exported `config.json` calls them."""
    num_layers: Layers
    hidden_size: Size
    num_heads: Size
    num_kv_heads: Size
    """Fewer than `num_heads` is grouped-query attention."""
    head_dim: Annotated[Size, Field(ge=2, multiple_of=2)]
    """Width of one head; `hidden_size // num_heads` unless the base says otherwise."""
    attention_bias: AttentionBias = "none"
    """Which projections add a bias; the family's usual ones unless said, and likewise the next two."""
    mlp_bias: bool = False
    """The feed-forward matrices add one."""
    qk_norm: bool = False
    """Each head's query and key are normed before they are turned (Henry et al. 2020)."""
    sliding_window: Size | None = None
    """Tokens that a token sees in each layer, itself among them; None: all before it."""
    ffn_hidden_size: Size
    max_seq_len: Size
    """Longest sequence the model is meant for, in tokens."""
    vocab_size: Annotated[Size, Field(ge=2)]
    """True size, before any padding for tensor parallelism."""
    tie_embeddings: bool = True
    """The output layer is the transposed embedding."""
    norm_eps: float = Field(1e-5, gt=0, le=1)
    rope_theta: float = Field(10_000.0, gt=1, le=1e12)
    """Of rotary positions; other kinds leave it and the next as they are."""
    rope_scaling: dict[str, Any] | None = None
    """Hugging Face's `rope_scaling` mapping as it stands in `config.json`; None is plain RoPE."""
    hidden_dropout: Rate = 0.0
    """In training, share of features dropped where the family's `Traits.drops` says."""
    attention_dropout: Rate = 0.0
    """In training, share of the attention's probabilities dropped."""
    init_std: float = Field(0.02, gt=0, le=10)
    """Standard deviation of the initial weights."""

    @property
    def family(self) -> Traits:
        """What its layers are made of."""
        return FAMILIES[self.architecture]

    @model_validator(mode="before")
    @classmethod
    def as_usual_in_the_family(cls, given: Any) -> Any:
        family = FAMILIES.get(str(given.get("architecture", "llama"))) if isinstance(given, Mapping) else None
        if family is None:
            return given
        return {field: values[0] for field, values in family.choices().items()} | dict(given)

    @field_validator("rope_scaling")
    @classmethod
    def scaling_is_computed(cls, scaling: dict[str, Any] | None) -> dict[str, Any] | None:
        _check_scaling(scaling or {})
        return scaling

    @model_validator(mode="after")
    def belongs_to_its_family(self) -> Self:
        family = FAMILIES[self.architecture]
        for field, values in family.choices().items():
            if (value := getattr(self, field)) not in values:
                raise ValueError(f"{field}={value!r} is not what {self.architecture} has; use {_either(values)}")
        if self.sliding_window is not None and not family.windowed:
            windowed = [name for name, traits in FAMILIES.items() if traits.windowed]
            raise ValueError(
                f"sliding_window={self.sliding_window} is not what {self.architecture} has; "
                f"leave it out, or use {_either(windowed)}"
            )
        rotary = {name: ModelShape.model_fields[name].default for name in ("rope_theta", "rope_scaling")}
        for field, usual in rotary.items():
            if family.positions != "rope" and (value := getattr(self, field)) != usual:
                raise ValueError(
                    f"{field}={value!r} is not what {self.architecture} has, whose positions are not rotary; leave it "
                    "out"
                )
        if self.hidden_dropout and not family.drops:
            dropping = [name for name, traits in FAMILIES.items() if traits.drops]
            raise ValueError(
                f"hidden_dropout={self.hidden_dropout:g} is not what {self.architecture} has; "
                f"leave it out, or use {_either(dropping)}"
            )
        return self

    @model_validator(mode="after")
    def has_the_proportions_of_its_family(self) -> Self:
        family, hidden = self.family, self.hidden_size
        if not family.free_heads and self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} is not what {self.architecture} has; use num_kv_heads="
                f"{self.num_heads}, as many as num_heads"
            )
        if not family.free_heads and self.num_heads * self.head_dim != hidden:
            raise ValueError(
                f"head_dim={self.head_dim} times num_heads={self.num_heads} must be hidden_size={hidden} in "
                f"{self.architecture}"
            )
        if family.ffn_ratio is not None and self.ffn_hidden_size != family.ffn_ratio * hidden:
            raise ValueError(
                f"ffn_hidden_size={self.ffn_hidden_size} is not what {self.architecture} has; "
                f"use {family.ffn_ratio * hidden}, which is {family.ffn_ratio} x hidden_size"
            )
        return self

    @model_validator(mode="after")
    def heads_group_evenly(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}; "
                f"try {gcd(self.num_heads, self.num_kv_heads)}"
            )
        if kind_of_scaling(self.rope_scaling or {}) == "dynamic" and self.head_dim < 4:
            raise ValueError(f"rope_scaling of type 'dynamic' needs a head_dim of at least 4, not {self.head_dim}")
        return self


def _either(values: Iterable[object]) -> str:
    return " or ".join(map(str, values))


def _check_scaling(scaling: Mapping[str, Any]) -> None:
    """Raise ValueError, saying what would work, where the rotary positions can't be stretched like this."""
    kind = kind_of_scaling(scaling)
    if kind not in SCALINGS:
        raise ValueError(f"rope_scaling type {kind!r} is not supported; supported: {', '.join(SCALINGS)}")
    needed, allowed = SCALINGS[kind]
    keys = scaling.keys() - {"rope_type", "type"}
    if missing := needed - keys:
        raise ValueError(f"rope_scaling of type {kind!r} needs {', '.join(sorted(missing))}")
    if unknown := keys - needed - allowed:
        raise ValueError(f"rope_scaling.{min(unknown)} is not supported with type {kind!r}")
    for key in sorted(keys - {"truncate"}):
        # YaRN's numbers may be null: each then has a value of its own.
        if not (_is_scale(scaling[key]) or (kind == "yarn" and scaling[key] is None)):
            raise ValueError(f"rope_scaling.{key} must be a number from 2^-24 to 2^24, such as 2.0")
    if not isinstance(scaling.get("truncate", True), bool):
        raise ValueError("rope_scaling.truncate must be true or false")
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ValueError("rope_scaling.low_freq_factor must be below high_freq_factor, such as 1 and 4")


def _is_scale(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isfinite(value) and SMALLEST_SCALE <= value <= LARGEST_SCALE


SHARDED = ("shard_weights", "shard_gradients", "shard_optimizer")
"""What replicas may share out; each includes those after it."""


def with_weaker_sharing(given: Any) -> Any:
    """Fields of a `Parallel`, to which what `SHARDED` says is included is added where nothing is said of it."""
    if not isinstance(given, Mapping):
        return given
    first = next((number for number, name in enumerate(SHARDED) if given.get(name)), len(SHARDED))
    return {name: True for name in SHARDED[first + 1 :]} | dict(given)


def check_sharing(parallel: object) -> None:
    """Raise ValueError where replicas are to share out something without what it includes."""
    for stricter, weaker in pairwise(SHARDED):
        if getattr(parallel, stricter) and not getattr(parallel, weaker):
            raise ValueError(
                f"parallel.{stricter} includes {weaker}, which is false; leave {weaker} out, or {stricter} too"
            )


class Parallel(Part):
    """How many ranks each axis has. Their product is the number of ranks."""

    tensor: int = Field(1, ge=1)
    """Ranks that share each matrix; keep within one host."""
    sequence: bool = False
    """Shard norms and residuals along the sequence over the tensor axis (Korthikanti et al. 2022)."""
    pipeline: int = Field(1, ge=1)
    """Ranks that a token goes through one after another, each with its stage of the layers."""
    virtual: int = Field(1, ge=1)
    """Stages per pipeline rank: more of them idle less and say more to one another (Narayanan et al. 2021)."""
    stages: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Layers of each of the `pipeline` x `virtual` stages; None gives all stages as equal work as can be."""
    context: int = Field(1, ge=1)
    """Ranks that share each row's tokens; `data.seq_len` must be a multiple of twice as many."""
    data: int = Field(1, ge=1)
    """Replicas that each take a share of the global batch."""
    shard_optimizer: bool = True
    """Give each replica its share of the optimizer state only (ZeRO-1, Rajbhandari et al. 2020)."""
    shard_gradients: bool = False
    """And of the gradients (ZeRO-2): each layer's are summed and shared out as they arise."""
    shard_weights: bool = False
    """And of the weights (ZeRO-3): each layer's are gathered for its use, forward and backward."""

    @model_validator(mode="before")
    @classmethod
    def shares_what_comes_before(cls, given: Any) -> Any:
        return with_weaker_sharing(given)

    @model_validator(mode="after")
    def shares_in_order(self) -> Self:
        check_sharing(self)
        if self.shard_gradients and self.pipeline > 1:
            raise ValueError(
                f"parallel.shard_gradients is not available with pipeline={self.pipeline}; "
                "leave it and shard_weights out, or use pipeline=1"
            )
        return self

    @property
    def is_shared_out(self) -> bool:
        """No replica has the whole of its gradients between steps, nor of its weights: there are several that share."""
        return self.shard_gradients and self.data * self.context > 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    def check(self, shape: ModelShape, *, seq_len: int) -> None:
        """Raise ValueError, saying what would work, where `shape` can't be split this way."""
        shared = {name: getattr(shape, name) for name in ("num_heads", "ffn_hidden_size")}
        # Fewer key-value heads than ranks are held in copies.
        if self.tensor % shape.num_kv_heads:
            shared["num_kv_heads"] = shape.num_kv_heads
        for name, size in shared.items():
            if size % self.tensor:
                fits = gcd(self.tensor, *shared.values())
                raise ValueError(f"parallel.tensor={self.tensor} must divide {name}={size}; try {fits}")
        self.check_row(seq_len)
        self.check_stages(shape)

    def check_row(self, seq_len: int) -> None:
        """Raise ValueError, saying what would work, where rows of `seq_len` tokens can't be shared out this way."""
        if seq_len % self.row_unit:
            below, above = seq_len - seq_len % self.row_unit, seq_len + -seq_len % self.row_unit
            raise ValueError(
                f"{self._who_shares_rows()}, so seq_len={seq_len} must be a multiple of {self.row_unit}; "
                f"try seq_len={below or above}"
            )

    @property
    def row_unit(self) -> int:
        """What a row's tokens must be a multiple of."""
        between = self.tensor if self.sequence else 1
        # A context rank has two chunks of a row, one from either side of its middle.
        return between if self.context == 1 else self.context * lcm(2, between)

    def _who_shares_rows(self) -> str:
        by_tensor = f"parallel.sequence shares each row's tokens among tensor={self.tensor} ranks"
        by_context = f"parallel.context={self.context} cuts each row into {2 * self.context} chunks"
        if self.context == 1:
            return by_tensor
        return f"{by_context} and {by_tensor}" if self.sequence and self.tensor > 1 else by_context

    def check_stages(self, shape: ModelShape) -> None:
        """Raise ValueError, saying what would work, where the layers of `shape` can't be shared out to the stages."""
        count = self.pipeline * self.virtual
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(
                f"parallel.virtual={self.virtual} needs a pipeline; set parallel.pipeline to 2 or more, or virtual to 1"
            )
        if count > shape.num_layers:
            fits = max(1, shape.num_layers // self.pipeline)
            name, value = ("virtual", fits) if self.virtual > fits else ("pipeline", shape.num_layers)
            raise ValueError(
                f"parallel.{name}={getattr(self, name)} makes {count} stages of num_layers={shape.num_layers}, and "
                f"each needs a layer; try {name}={value}"
            )
        if self.stages is not None and (
            len(self.stages) != count or sum(self.stages) != shape.num_layers or 0 in self.stages[:-1]
        ):
            raise ValueError(
                f"parallel.stages={list(self.stages)} must be {count} numbers (pipeline={self.pipeline} x "
                f"virtual={self.virtual}) that sum up to num_layers={shape.num_layers}; only the last may be 0"
            )


Operation = Literal["attention_core", "norm", "activation", "dropout", "up_projection", "qkv", "layer"]
"""What can be computed again in backward instead of being saved; `engine.plan.recompute` says what each is worth."""


class Recompute(Part):
    """Which activations are dropped after the forward pass and computed again in the backward pass."""

    mode: Literal["none", "selective", "full", "budget"] = "selective"
    """selective: what `operations` names; full: each whole layer; budget: what costs least and fits `budget_gib`."""
    operations: tuple[Operation, ...] | None = Field(None, min_length=1)
    """Under selective, all that is replayed; None: the attention core alone (Korthikanti et al. 2022, section 5)."""
    budget_gib: float | None = Field(None, gt=0)
    """Under budget, GiB of a rank for the activations of all micro-batches that wait for their backward pass. Each
    stage of a pipeline replays what fits it best."""

    @model_validator(mode="after")
    def has_what_its_mode_needs(self) -> Self:
        if self.operations is not None and self.mode != "selective":
            raise ValueError(f'recompute.operations belong to mode "selective", and the mode is "{self.mode}"')
        if self.mode == "budget" and self.budget_gib is None:
            raise ValueError('recompute.budget_gib is what mode "budget" needs; set it, such as to 8.0')
        if self.mode != "budget" and self.budget_gib is not None:
            raise ValueError(f'recompute.budget_gib belongs to mode "budget", and the mode is "{self.mode}"')
        return self

    @property
    def replayed(self) -> frozenset[Operation]:
        """The operations that are run again, where no budget decides."""
        assert self.mode != "budget", "engine.plan.budget knows"
        if self.mode == "full":
            return frozenset({"layer"})
        return frozenset() if self.mode == "none" else frozenset(self.operations or ("attention_core",))


class Lora(Part):
    """Low-rank adapters beside frozen matrices (Hu et al. 2021), with the meaning `peft` gives each field."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0, le=1e6)
    dropout: float = Field(0.0, ge=0, lt=1)
    rslora: bool = False
    """Scale by alpha / sqrt(rank), which does not shrink what a larger rank learns (Kalajdzievski 2023, equation 4)."""
    targets: tuple[Target, ...] | None = None
    """The matrices that are adapted; None: all that the family has."""

    @property
    def scale(self) -> float:
        """What an adapter's output is multiplied by."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)

    def targets_in(self, shape: ModelShape) -> tuple[Target, ...]:
        """The matrices adapted in a model of `shape`. Raises ValueError naming one that its family does not have."""
        there = shape.family.matrices
        for target in self.targets or ():
            if target not in there:
                raise ValueError(
                    f"lora.targets: {shape.architecture} has no {target!r}; choose from {', '.join(there)}"
                )
        return there if self.targets is None else self.targets


class Dpo(Part):
    """How answers are compared (Rafailov et al. 2023, equation 7)."""

    beta: float = Field(0.1, gt=0, le=1e3)
    """How much what an answer gains in log-probability over the model before training counts: the larger, the closer
    to that model the result stays."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Chance that a pair's answers stand the wrong way round (conservative DPO, Mitchell 2023)."""
    sft_coefficient: float = Field(0.0, ge=0, le=1e3)
    """Weight of the better answer's own loss, a mean over its tokens, which keeps it likely (Pang et al. 2024)."""


class TokenizerSource(Part):
    """Where token ids come from."""

    type: Literal["base", "train", "file", "bytes"]
    """base: the tokenizer beside the base weights; train: byte-level BPE on the training text; bytes: ids are bytes."""
    vocab_size: int | None = Field(None, ge=260)
    """Entries wanted when `type` is "train"; at least the 256 bytes and the special tokens."""
    path: Path | None = None
    """A `tokenizer.json` when `type` is "file"; relative to the run directory."""

    @model_validator(mode="after")
    def has_what_its_type_needs(self) -> Self:
        if (self.type == "train") != (self.vocab_size is not None):
            raise ValueError('tokenizer.vocab_size belongs to type "train", and only there')
        if (self.type == "file") != (self.path is not None):
            raise ValueError('tokenizer.path belongs to type "file", and only there')
        return self


class Data(Part):
    """What is trained on. Paths are relative to the run directory."""

    train: tuple[Path, ...] = Field(min_length=1)
    validation: Path | float | None = None
    """A file, or the fraction of training rows held out; None trains on everything."""
    evaluation: Path | None = None
    """A file of multiple-choice questions, which the model is asked when it is validated; None asks nothing."""
    format: Literal["text", "chat", "completion", "preference", "tokens"]
    """What a line means; see `engine.data.format`."""
    seq_len: int = Field(ge=2)
    """Tokens in a row."""
    packing: bool = True
    """Fill rows with several examples, isolated from one another."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """What happens to an example longer than a row. Plain text is cut into rows and is never overlong."""
    template: NamedTemplate | None = None
    """The chat template to use, and to leave in what is exported; None: the tokenizer's own, or the one that fits."""
    now: datetime | None = None
    """What a chat template that asks for the date is told, so that a resumed run makes the same rows; None: the moment
    at which it asks."""

    @field_validator("validation")
    @classmethod
    def leaves_something(cls, held_out: Path | float | None) -> Path | float | None:
        if isinstance(held_out, float) and not 0 < held_out < 1:
            raise ValueError(f"the fraction held out must lie between 0 and 1, and {held_out:g} does not; try 0.1")
        return held_out


class EarlyStopping(Part):
    """When a run ends before its last step: its validation loss has not become lower for so long."""

    patience: int = Field(ge=1)
    """Validations in a row that may pass without a lower loss."""
    min_delta: float = Field(0.0, ge=0)
    """By how much a loss must be lower to count, in nats."""


class Training(Part):
    """The optimisation. Exactly one of `steps` and `epochs` is set."""

    steps: int | None = Field(None, ge=1)
    """Optimizer steps."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the training rows; becomes steps once the rows are counted, at least one."""
    global_batch: int = Field(ge=1)
    """Rows per optimizer step over all ranks."""
    micro_batch: int = Field(ge=1)
    """Rows per forward pass on one rank."""
    lr: float = Field(gt=0)
    """Peak learning rate."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """The schedule ends at this share of `lr`."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup: float = Field(0.05, ge=0, lt=1)
    """Share of all steps over which the rate rises from zero."""
    decay: float | None = Field(None, gt=0, le=1)
    """Under wsd, the share of all steps, at the end, over which the rate falls; None: a fifth."""
    weight_decay: float = Field(0.1, ge=0, le=100)
    """Decoupled; matrices only, never norms or biases."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    clip: float | None = Field(1.0, gt=0)
    """Largest global gradient norm; None does not clip."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of weights and activations; the optimizer keeps fp32 masters either way."""
    seed: int = Field(1, ge=0, lt=2**63)
    eval_every: int | None = Field(None, ge=1)
    """Steps between validations; None validates at the end only, where there is validation data."""
    checkpoint_every: int | None = Field(None, ge=1)
    """Steps between checkpoints; None saves at the end, and when stopped."""
    keep_checkpoints: int = Field(3, ge=1)
    """Newest checkpoints kept on disk."""
    keep_best: bool = False
    """Save at each validation whose loss is the lowest so far, and keep that checkpoint until there is a better one,
    besides the newest."""
    early_stopping: EarlyStopping | None = None
    """None takes all steps."""
    outliers: int = Field(10, ge=0, le=1000)
    """Training documents to name at the end, with file and line, of those whose loss lies furthest above their step's;
    dpo names none."""
    samples: int = Field(0, ge=0, le=20)
    """Validation prompts that the model answers after each validation; not in a pipeline."""
    non_finite: Literal["stop", "skip", "roll_back"] = "stop"
    """What follows a loss or a gradient that is not finite. stop: the run fails, naming the rows; skip: the step makes
    no update; roll_back: the run goes back to its last checkpoint, or to its start, and leaves out the rows since
    (Chowdhery et al. 2022, section 5.1).

    A validation makes no update. Where some of its rows have such a loss, stop fails the run, and skip and roll_back
    warn, naming the rows, and go on without a validation loss. Where all of several have, the weights are broken: skip
    fails as stop does, and roll_back goes back."""
    max_recoveries: int = Field(3, ge=1)
    """Times that a run may skip or roll back before it stops."""
    roll_back_checkpoints: int = Field(1, ge=1)
    """Checkpoints that roll_back goes back by, of those that this attempt has saved or gone on from; where there are
    fewer, to the oldest."""
    check_replicas_every: int | None = Field(100, ge=1)
    """Steps between comparisons of what several ranks must hold alike; None compares before checkpoints only."""

    @model_validator(mode="after")
    def one_length_and_whole_batches(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("set exactly one of training.steps and training.epochs")
        if self.roll_back_checkpoints > self.keep_checkpoints:
            raise ValueError(
                f"training.roll_back_checkpoints={self.roll_back_checkpoints} needs so many kept; raise "
                f"training.keep_checkpoints, which is {self.keep_checkpoints}"
            )
        return self

    @property
    def cooling(self) -> float:
        """Share of all steps over which wsd falls."""
        return 0.2 if self.decay is None else self.decay

    @model_validator(mode="after")
    def falls_where_it_may(self) -> Self:
        if self.decay is not None and self.schedule != "wsd":
            raise ValueError(f'training.decay belongs to schedule "wsd", and the schedule is "{self.schedule}"')
        if self.schedule == "wsd" and self.warmup + self.cooling > 1:
            raise ValueError(
                f"training.decay={self.cooling} and training.warmup={self.warmup} are shares of all steps, and more "
                "than all together; lower one of them"
            )
        return self

    def check(self, parallel: Parallel) -> None:
        """Raise ValueError, saying what would work, where the batch can't be dealt out evenly."""
        step = self.micro_batch * parallel.data
        if self.global_batch % step:
            below = max(step, self.global_batch - self.global_batch % step)
            raise ValueError(
                f"training.global_batch={self.global_batch} must be a multiple of micro_batch={self.micro_batch} "
                f"x parallel.data={parallel.data}; try {below}"
            )


class Export(Part):
    """What the run leaves behind."""

    dtype: Literal["keep", "bf16", "fp32"] = "keep"
    """keep: the base's dtype when fine-tuning, the training precision otherwise."""
    merged: bool = True
    """Under LoRA, also write the base with the adapter merged in."""
    checkpoint: Literal["last", "best"] = "last"
    """Which weights: those after the last step, or those of the lowest validation loss."""
    gguf: bool = False
    """Also write the model as a GGUF file."""
    base_name: str | None = None
    """What the adapter calls its base, for whoever puts it on one; None: its path in the run."""

    @model_validator(mode="after")
    def has_a_model_to_write(self) -> Self:
        if self.gguf and not self.merged:
            raise ValueError("gguf needs the merged model; set merged to true, or leave gguf out")
        return self

    def check(self, shape: ModelShape) -> None:
        """Raise ValueError, saying what would work, where a model of `shape` can't be left this way."""
        if not self.gguf:
            return
        if shape.architecture not in GGUF:
            raise ValueError(f"gguf is not available for {shape.architecture}; only for {', '.join(GGUF)}")
        if shape.sliding_window is not None and shape.sliding_window < shape.max_seq_len:
            raise ValueError(f"gguf is not available with sliding_window={shape.sliding_window}; leave gguf out")
        if (kind := kind_of_scaling(shape.rope_scaling or {})) not in GGUF_SCALINGS:
            raise ValueError(f"gguf is not available with rope_scaling of type {kind!r}; leave gguf out")
        if shape.architecture == "qwen3" and shape.attention_bias != "none":
            raise ValueError("gguf is not available for qwen3 with attention_bias; leave gguf out")


GGUF: tuple[Architecture, ...] = ("llama", "mistral", "qwen2", "qwen3")
"""Families that can be written as GGUF files."""
GGUF_SCALINGS = ("default", "linear", "llama3")


class RunConfig(Part):
    """One run of the engine. `run.json` is this, and the run directory is the folder it lies in."""

    model: ModelShape | None = None
    """Shape to start from scratch; None reads it from `base`."""
    base: Path | None = None
    """Folder in Hugging Face layout to start from, relative to the run directory; None starts from random weights."""
    tokenizer: TokenizerSource
    objective: Literal["pretrain", "sft", "dpo"]
    """pretrain: every token is a label; sft: only what the assistant says; dpo: what it says, one answer of a pair
    against the other."""
    lora: Lora | None = None
    """None trains every weight."""
    dpo: Dpo = Dpo()
    """Read where the objective is dpo."""
    data: Data
    training: Training
    parallel: Parallel = Parallel()
    recompute: Recompute = Recompute()
    export: Export = Export()
    device: Literal["cpu", "cuda"] = "cpu"
    resume: Path | None = None
    """Checkpoint folder to continue from, relative to the run directory or absolute."""
    stall_seconds: float | None = Field(600.0, gt=0)
    """A run in which no rank has gone on for so long ends, naming the one that the others wait for; None waits on.

    Whatever ends counts: an exchange between ranks, a micro-batch, a piece of the data or of a checkpoint.
    """
    peak_flops_per_rank: float | None = Field(None, gt=0)
    """FLOP/s of one device at `training.precision`, for MFU; None leaves MFU out."""

    @model_validator(mode="after")
    def fits_together(self) -> Self:
        if (self.model is None) == (self.base is None):
            raise ValueError("set exactly one of model (from scratch) and base (continue from weights)")
        if self.lora is not None and self.base is None:
            raise ValueError("lora needs a base to adapt")
        if (self.objective == "dpo") != (self.data.format == "preference"):
            raise ValueError(
                'objective "dpo" and data.format "preference" go together: pairs are compared, not imitated'
            )
        if self.tokenizer.type == "base" and self.base is None:
            raise ValueError('tokenizer.type "base" needs a base')
        self._check_validation()
        self.training.check(self.parallel)
        self.parallel.check_row(self.data.seq_len)
        if self.model is not None:
            self.check_shape(self.model)
        return self

    def _check_validation(self) -> None:
        """Raise ValueError where what follows a validation loss is asked for, and there is none to follow."""
        training = self.training
        if training.samples and self.data.validation is None:
            raise ValueError("training.samples answers validation prompts; set data.validation, or leave it out")
        if training.samples and self.parallel.pipeline > 1:
            raise ValueError(
                f"training.samples={training.samples} needs the whole model on each rank, or on those of the tensor "
                f"axis, and parallel.pipeline is {self.parallel.pipeline}; leave samples out, or set pipeline to 1"
            )
        if self.export.checkpoint == "best" and not training.keep_best:
            raise ValueError('export.checkpoint "best" needs training.keep_best; set it to true')
        for name, asked in (("keep_best", training.keep_best), ("early_stopping", training.early_stopping)):
            if asked and (self.data.validation is None or training.eval_every is None):
                lacking = "data.validation" if self.data.validation is None else "training.eval_every"
                raise ValueError(f"training.{name} goes by the validation loss; set {lacking}, or leave it out")

    def check_shape(self, shape: ModelShape) -> None:
        """Raise ValueError, saying what would work, where a model of `shape` can't run this way."""
        if self.data.seq_len > shape.max_seq_len:
            raise ValueError(
                f"data.seq_len={self.data.seq_len} is longer than the model's max_seq_len={shape.max_seq_len}; "
                f"use at most {shape.max_seq_len}"
            )
        self.parallel.check(shape, seq_len=self.data.seq_len)
        self.export.check(shape)
        if self.lora is not None:
            self.lora.targets_in(shape)
