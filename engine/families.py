"""Hugging Face's `config.json` to a `ModelShape` and back. Pure: part of the engine's contract, without torch.

What a model has that the engine does not compute is refused by name: silently ignoring it would train another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from engine.config import SCALINGS, ModelShape, kind_of_scaling

SUPPORTED = ("llama",)
"""Values of `model_type` that can be read."""

SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
"""Our names and Hugging Face's, of sizes that have to be there."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "attention_dropout": (0, 0.0, None),
    "partial_rotary_factor": (1, 1.0, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
}
"""Keys that only one meaning is computed for, with the values that mean it."""


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a `config.json` describes. Raises ValueError naming what is missing or not supported."""
    if not isinstance(config, Mapping):
        raise ValueError("config.json: it must hold one JSON object")
    family = config.get("model_type")
    if family not in SUPPORTED:
        raise ValueError(f"config.json: model_type {family!r} is not supported; supported: {', '.join(SUPPORTED)}")
    architectures = config.get("architectures") or ["LlamaForCausalLM"]
    if architectures != ["LlamaForCausalLM"]:
        raise ValueError(f"config.json: architectures={architectures!r} is not supported; use LlamaForCausalLM")
    for key, fine in NEUTRAL.items():
        if config.get(key, fine[0]) not in fine:
            raise ValueError(f"config.json: {key}={config[key]!r} is not supported; only {fine[0]!r} is")
    missing = [theirs for theirs in SIZES.values() if config.get(theirs) is None]
    if missing:
        raise ValueError(f"config.json: {', '.join(missing)} missing")
    sizes = {ours: config[theirs] for ours, theirs in SIZES.items()}
    for ours, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"config.json: {SIZES[ours]}={size!r} is not a whole number from 1")
    scaling, theta = _rope(config)
    try:
        # Hugging Face's defaults for llama stand in for what a config may leave out.
        return ModelShape(
            architecture="llama",
            **sizes,
            num_kv_heads=_given(config, "num_key_value_heads", sizes["num_heads"]),
            head_dim=_given(config, "head_dim", sizes["hidden_size"] // sizes["num_heads"]),
            max_seq_len=_given(config, "max_position_embeddings", 2048),
            tie_embeddings=_given(config, "tie_word_embeddings", False),
            norm_eps=_given(config, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            init_std=_given(config, "initializer_range", 0.02) or 0.02,
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"config.json: {where}: {said}" if where else f"config.json: {said}") from error


def config_of(
    shape: ModelShape, *, bos_id: int | None, eos_id: int | None, pad_id: int | None, dtype: str
) -> dict[str, Any]:
    """The `config.json` of a model, as `transformers` and its peers read it. `dtype` is "float32" or "bfloat16"."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": shape.architecture,
        **{theirs: getattr(shape, ours) for ours, theirs in SIZES.items()},
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_seq_len,
        "tie_word_embeddings": shape.tie_embeddings,
        "rms_norm_eps": shape.norm_eps,
        # The older pair of keys: newer readers understand it, older ones don't know `rope_parameters`.
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling,
        "initializer_range": shape.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "use_cache": True,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
        "torch_dtype": dtype,
    }


def _given(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    return default if value is None else value


def _rope(config: Mapping[str, Any]) -> tuple[dict[str, Any] | None, float]:
    """Scaling and base, from `rope_scaling` with `rope_theta` beside it, or from `rope_parameters` with both inside."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
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
