"""Hugging Face's `config.json` to a `ModelShape` and back. Pure: part of the engine's contract, without torch.

What a model has that the engine does not compute is refused by name: silently ignoring it would train another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from engine.config import FAMILIES, SCALINGS, ModelShape, kind_of_scaling

LLAMA_NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_seq_len": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
    "attention_dropout": "attention_dropout",
}
LLAMA_USUAL = {"max_position_embeddings": 2048, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}
FIXED: dict[str, tuple[Any, ...]] = {
    # Two names of one function.
    "hidden_act": ("silu", "swish", None),
    "partial_rotary_factor": (1, 1.0, None),
    "use_mrope": (False, None),
    "dual_chunk_attention_config": (None,),
    "quantization_config": (None,),
}
"""Keys that only one meaning is computed for, with the values that mean it."""


@dataclass(frozen=True)
class Dialect:
    """How a family's `config.json` says what a shape is; what it may say is `engine.config.FAMILIES`'s."""

    architecture: str
    """The class in `transformers`."""
    usual: Mapping[str, Any] = field(default_factory=dict)
    """What its configuration class there takes for keys that are left out."""
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    """Our fields and its keys."""
    needed: tuple[str, ...] = ("num_layers", "hidden_size", "num_heads", "ffn_hidden_size", "vocab_size")
    """Sizes that have to be there."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other keys that it is read with, and which key each stands for."""
    twins: Mapping[str, str] = field(default_factory=dict)
    """Keys that are computed only where they say what another key says."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: FIXED)
    """As `FIXED`; of the first key the first value is written too."""
    switches_window: bool = False
    """A window counts only with `use_sliding_window`, and only from layer `max_window_layers` on."""


_QWEN = {
    **LLAMA_USUAL,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
# A sum in parts (pretraining_tp, slow_but_exact) and scores in fp32 (reorder_and_upcast_attn) are the same function.
DIALECTS = {
    "llama": Dialect("LlamaForCausalLM", LLAMA_USUAL),
    "mistral": Dialect(
        "MistralForCausalLM",
        {**LLAMA_USUAL, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    ),
    "qwen2": Dialect("Qwen2ForCausalLM", _QWEN, switches_window=True),
    "qwen3": Dialect("Qwen3ForCausalLM", {**_QWEN, "head_dim": 128}, switches_window=True),
    "gpt2": Dialect(
        "GPT2LMHeadModel",
        usual={
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "embd_pdrop": 0.1,
            "resid_pdrop": 0.1,
            "attn_pdrop": 0.1,
        },
        names={
            "num_layers": "n_layer",
            "hidden_size": "n_embd",
            "num_heads": "n_head",
            "ffn_hidden_size": "n_inner",
            "vocab_size": "vocab_size",
            "max_seq_len": "n_positions",
            "tie_embeddings": "tie_word_embeddings",
            "norm_eps": "layer_norm_epsilon",
            "init_std": "initializer_range",
            "hidden_dropout": "embd_pdrop",
            "attention_dropout": "attn_pdrop",
        },
        needed=("num_layers", "hidden_size", "num_heads", "vocab_size"),
        aliases={
            "num_hidden_layers": "n_layer",
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
        twins={"resid_pdrop": "embd_pdrop"},
        fixed={
            # Two names of one function.
            "activation_function": ("gelu_new", "gelu_pytorch_tanh", None),
            "scale_attn_weights": (True, None),
            "scale_attn_by_inverse_layer_idx": (False, None),
            "add_cross_attention": (False, None),
            "quantization_config": (None,),
        },
    ),
    "bloom": Dialect(
        "BloomForCausalLM",
        usual={"seq_length": 2048, "layer_norm_epsilon": 1e-5},
        names={
            "num_layers": "n_layer",
            "hidden_size": "hidden_size",
            "num_heads": "n_head",
            "vocab_size": "vocab_size",
            "max_seq_len": "seq_length",
            "tie_embeddings": "tie_word_embeddings",
            "norm_eps": "layer_norm_epsilon",
            "init_std": "initializer_range",
            "hidden_dropout": "hidden_dropout",
            "attention_dropout": "attention_dropout",
        },
        needed=("num_layers", "hidden_size", "num_heads", "vocab_size"),
        aliases={"num_hidden_layers": "n_layer", "n_embed": "hidden_size", "num_attention_heads": "n_head"},
        fixed={"apply_residual_connection_post_layernorm": (False, None), "quantization_config": (None,)},
    ),
}
"""By `model_type`."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""Members of `layer_types`."""


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a `config.json` describes. Raises ValueError naming what is missing or not supported."""
    if not isinstance(config, Mapping):
        raise ValueError("config.json: it must hold one JSON object")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in DIALECTS:
        raise ValueError(f"config.json: model_type {family!r} is not supported; supported: {', '.join(DIALECTS)}")
    dialect, traits = DIALECTS[family], FAMILIES[family]
    architectures = config.get("architectures") or [dialect.architecture]
    if architectures != [dialect.architecture]:
        raise ValueError(f"config.json: architectures={architectures!r} is not supported; use {dialect.architecture}")
    config = {**dialect.usual, **_without_aliases(config, dialect.aliases)}
    for key, fine in dialect.fixed.items():
        if config.get(key, fine[0]) not in fine:
            raise ValueError(f"config.json: {key}={config[key]!r} is not supported; only {fine[0]!r} is")
    for key, other in dialect.twins.items():
        if config.get(key) != config.get(other):
            raise ValueError(
                f"config.json: {key}={config.get(key)!r} is not supported; only {other}'s {config.get(other)!r} is"
            )
    sizes = _sizes(config, dialect)
    said = {
        ours: value
        for ours, theirs in dialect.names.items()
        if (value := _given(config, theirs, dialect.usual.get(theirs))) is not None
    }
    if not said.get("init_std"):
        said.pop("init_std", None)
    if traits.positions == "rope":
        said["rope_scaling"], said["rope_theta"] = _rope(config)
    try:
        # Hugging Face's defaults stand in for what a config may leave out.
        return ModelShape.model_validate(
            {
                "architecture": family,
                "num_kv_heads": sizes["num_heads"],
                "head_dim": sizes["hidden_size"] // sizes["num_heads"],
                "ffn_hidden_size": 4 * sizes["hidden_size"],
                **said,
                "attention_bias": _switched(config, "attention_bias", _switch(traits.attention_bias)),
                "mlp_bias": _switched(config, "mlp_bias", _switch(traits.mlp_bias)),
                "sliding_window": _window(config, sizes["num_layers"], switches=dialect.switches_window),
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"config.json: {where}: {reason}" if where else f"config.json: {reason}") from error


def config_of(
    shape: ModelShape, *, bos_id: int | None, eos_id: int | None, pad_id: int | None, dtype: str
) -> dict[str, Any]:
    """The `config.json` of a model, as `transformers` and its peers read it. `dtype` is "float32" or "bfloat16"."""
    dialect = DIALECTS[shape.architecture]
    said = {theirs: getattr(shape, ours) for ours, theirs in dialect.names.items()}
    said |= {key: said[other] for key, other in dialect.twins.items()}
    key, (value, *_) = next(iter(dialect.fixed.items()))
    if shape.family.positions == "rope":
        # The older pair of keys: newer readers understand it, older ones don't know `rope_parameters`.
        said |= {"rope_theta": shape.rope_theta, "rope_scaling": shape.rope_scaling}
    return {
        "architectures": [dialect.architecture],
        "model_type": shape.architecture,
        **said,
        key: value,
        **_traits_of(shape),
        "use_cache": True,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
        "torch_dtype": dtype,
    }


def _without_aliases(config: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Each key by its usual name. Raises ValueError where two names of one key disagree."""
    plain = {key: value for key, value in config.items() if key not in aliases}
    for alias, key in aliases.items():
        if (value := config.get(alias)) is None:
            continue
        if plain.get(key, value) not in (None, value):
            raise ValueError(
                f"config.json: {alias}={value!r} is not {key}={plain[key]!r}, though the two mean the same"
            )
        plain[key] = value
    return plain


def _sizes(config: Mapping[str, Any], dialect: Dialect) -> dict[str, int]:
    """The sizes that have to be there, by our names."""
    sizes: dict[str, int] = {}
    missing = [dialect.names[ours] for ours in dialect.needed if config.get(dialect.names[ours]) is None]
    if missing:
        raise ValueError(f"config.json: {', '.join(missing)} missing")
    for ours in dialect.needed:
        size = config[dialect.names[ours]]
        if type(size) is not int or size < 1:
            raise ValueError(f"config.json: {dialect.names[ours]}={size!r} is not a whole number from 1")
        sizes[ours] = size
    return sizes


def _traits_of(shape: ModelShape) -> dict[str, Any]:
    """What sets a shape apart in its family, in keys that the family's configuration class knows."""
    traits, dialect = FAMILIES[shape.architecture], DIALECTS[shape.architecture]
    said: dict[str, Any] = {}
    for key, values in (("attention_bias", traits.attention_bias), ("mlp_bias", traits.mlp_bias)):
        if len(values) > 1:
            said[key] = getattr(shape, key) not in (False, "none")
    if traits.windowed:
        said["sliding_window"] = shape.sliding_window
    if dialect.switches_window:
        slides = shape.sliding_window is not None
        said["use_sliding_window"] = slides
        said["max_window_layers"] = 0 if slides else shape.num_layers
        said["layer_types"] = [SLIDING if slides else FULL] * shape.num_layers
    return said


def _switch(values: tuple[Any, ...]) -> dict[bool, Any]:
    """What false and true in a config mean for a trait that may have these values, the usual one first."""
    return {value not in (False, "none"): value for value in values}


def _switched(config: Mapping[str, Any], key: str, meanings: Mapping[bool, Any]) -> Any:
    usual = next(iter(meanings))
    said = _given(config, key, usual)
    if not isinstance(said, bool) or said not in meanings:
        raise ValueError(f"config.json: {key}={said!r} is not supported; only {' or '.join(map(repr, meanings))} is")
    return meanings[said]


def _window(config: Mapping[str, Any], num_layers: int, *, switches: bool) -> Any:
    """The window that every layer has; None where none has one. Raises ValueError where only some have."""
    window: Any = config.get("sliding_window")
    first: Any = 0
    if switches:
        if not _switched(config, "use_sliding_window", {False: False, True: True}):
            window = None
        first = config.get("max_window_layers")
        if type(first) is not int:
            raise ValueError(f"config.json: max_window_layers={first!r} is not a whole number")
    said = config.get("layer_types")
    if said is None:
        key, value = "max_window_layers", first
        kinds = {kind for kind, there in ((SLIDING, first < num_layers), (FULL, first > 0)) if there}
        kinds = kinds if window is not None else {FULL}
    else:
        key, value = "layer_types", said
        kinds = set(map(str, said)) if isinstance(said, list) and len(said) == num_layers else set()
    # Without a switch, a window that no layer has is a contradiction, which its readers take either way.
    if kinds == {FULL} and (switches or window is None):
        return None
    if kinds == {SLIDING} and window is not None:
        return window
    raise ValueError(
        f"config.json: {key}={value!r} with sliding_window={window!r} is not supported; "
        "only one window for all layers, or none, is"
    )


def _given(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    return default if value is None else value


def _rope(config: Mapping[str, Any]) -> tuple[dict[str, Any] | None, float]:
    """Scaling and base, from `rope_scaling` with `rope_theta` beside it, or from `rope_parameters` with both inside."""
    # Where both are, the older one counts, as in transformers: it is what people set over a file's.
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"config.json: rope_scaling={given!r} is not an object")
    scaling = dict(given)
    theta = scaling.pop("rope_theta", None)
    if theta is None:
        theta = _given(config, "rope_theta", 10_000.0)
    if scaling.get("partial_rotary_factor") in (1, 1.0, None):
        scaling.pop("partial_rotary_factor", None)
    # Of an unknown kind, or with keys that don't fit: ModelShape says so.
    needed, allowed = SCALINGS.get(kind_of_scaling(scaling), (scaling.keys(), frozenset()))
    # Some write the trained length beside the mapping; there it wins, as in transformers.
    if "original_max_position_embeddings" in allowed and config.get("original_max_position_embeddings"):
        scaling["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return (scaling if needed or scaling.keys() - {"rope_type", "type"} else None), theta
