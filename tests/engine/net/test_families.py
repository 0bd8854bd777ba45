"""config.json and shapes: what is read, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig

from engine.config import ModelShape
from engine.families import config_of, shape_of_config
from tests.engine.net import nets

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 96,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def test_what_a_config_leaves_out_is_what_transformers_takes() -> None:
    theirs = LlamaConfig(**{key: value for key, value in CONFIG.items() if key not in ("model_type", "architectures")})
    assert shape_of_config(CONFIG) == ModelShape(
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=theirs.num_key_value_heads,
        head_dim=theirs.head_dim,
        ffn_hidden_size=48,
        max_seq_len=theirs.max_position_embeddings,
        vocab_size=96,
        tie_embeddings=theirs.tie_word_embeddings,
        norm_eps=theirs.rms_norm_eps,
        rope_theta=theirs.rope_parameters["rope_theta"],
        init_std=theirs.initializer_range,
    )


def test_a_config_that_transformers_writes_is_read() -> None:
    theirs = LlamaConfig(**CONFIG, num_key_value_heads=2, head_dim=16, rope_parameters={**LLAMA3, "rope_theta": 5e5})
    shape = shape_of_config(theirs.to_dict())
    assert (shape.num_kv_heads, shape.head_dim, shape.rope_theta) == (2, 16, 5e5)
    assert shape.rope_scaling == LLAMA3


def test_a_scaling_set_over_rope_parameters_counts_as_in_transformers() -> None:
    given = CONFIG | {
        "rope_theta": 77.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    theirs = LlamaConfig(**given).rope_parameters
    shape = shape_of_config(given)
    assert (shape.rope_scaling, shape.rope_theta) == ({"rope_type": "linear", "factor": 2.0}, 77.0)
    assert theirs == {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_what_a_config_of_another_family_leaves_out_is_what_transformers_takes(family: str) -> None:
    given: dict[str, Any] = {key: CONFIG[key] for key in CONFIG if key not in ("model_type", "architectures")}
    # As many as their own numbers of key-value heads divide.
    given |= {"num_attention_heads": 32, "hidden_size": 128}
    theirs = AutoConfig.for_model(family, **given)
    shape = shape_of_config({"model_type": family, **given})
    assert (shape.num_kv_heads, shape.max_seq_len) == (theirs.num_key_value_heads, theirs.max_position_embeddings)
    assert shape.head_dim == getattr(theirs, "head_dim", 128 // 32)
    assert shape.sliding_window == theirs.sliding_window
    assert (shape.tie_embeddings, shape.norm_eps) == (theirs.tie_word_embeddings, theirs.rms_norm_eps)
    assert (shape.rope_theta, shape.init_std) == (theirs.rope_parameters["rope_theta"], theirs.initializer_range)
    assert shape_of_config(theirs.to_dict()) == shape


GPT2: dict[str, Any] = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 96}
BLOOM: dict[str, Any] = {"model_type": "bloom", "n_layer": 2, "hidden_size": 32, "n_head": 4, "vocab_size": 96}


def test_what_a_gpt2_config_leaves_out_is_what_transformers_takes() -> None:
    theirs = AutoConfig.for_model("gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=96)
    shape = shape_of_config(GPT2)
    assert (shape.num_kv_heads, shape.head_dim, shape.ffn_hidden_size) == (4, 8, 4 * 32)
    assert (shape.max_seq_len, shape.norm_eps) == (theirs.n_positions, theirs.layer_norm_epsilon)
    assert (shape.hidden_dropout, shape.attention_dropout) == (theirs.embd_pdrop, theirs.attn_pdrop)
    assert (shape.tie_embeddings, shape.init_std) == (theirs.tie_word_embeddings, theirs.initializer_range)
    assert shape_of_config(theirs.to_dict()) == shape


def test_what_a_bloom_config_leaves_out_is_what_transformers_takes() -> None:
    theirs = AutoConfig.for_model("bloom", n_layer=2, hidden_size=32, n_head=4, vocab_size=96)
    shape = shape_of_config(BLOOM)
    assert (shape.num_kv_heads, shape.head_dim, shape.ffn_hidden_size) == (4, 8, 4 * 32)
    # The length that BLOOM was trained at; ALiBi has none of its own.
    assert (shape.max_seq_len, shape.norm_eps) == (2048, theirs.layer_norm_epsilon)
    assert (shape.hidden_dropout, shape.attention_dropout) == (theirs.hidden_dropout, theirs.attention_dropout)
    assert (shape.tie_embeddings, shape.init_std) == (theirs.tie_word_embeddings, theirs.initializer_range)
    assert shape_of_config(theirs.to_dict()) == shape


def test_the_names_that_bigscience_used_mean_the_same() -> None:
    old = {"model_type": "bloom", "n_layer": 2, "n_embed": 32, "num_attention_heads": 4, "vocab_size": 96}
    more = {"pretraining_tp": 4, "offset_alibi": 100, "seq_length": 2048}
    assert shape_of_config({**old, **more}) == shape_of_config(BLOOM)
    with pytest.raises(ValueError, match="num_attention_heads=4 is not n_head=8, though the two mean the same"):
        shape_of_config({**old, "n_head": 8})


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        pytest.param(GPT2, {"activation_function": "relu"}, "activation_function='relu'", id="activation"),
        pytest.param(GPT2, {"scale_attn_weights": False}, "scale_attn_weights=False", id="unscaled"),
        pytest.param(GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx", id="by layer"),
        pytest.param(GPT2, {"add_cross_attention": True}, "add_cross_attention=True", id="cross attention"),
        pytest.param(GPT2, {"resid_pdrop": 0.2}, "resid_pdrop=0.2 is not supported; only embd_pdrop's 0.1", id="rates"),
        pytest.param(GPT2, {"attn_pdrop": 1.0}, "attention_dropout", id="all dropped"),
        pytest.param(GPT2, {"n_head": 5}, "head_dim=6 times num_heads=5 must be hidden_size=32", id="uneven heads"),
        pytest.param(GPT2, {"architectures": ["GPT2ForTokenClassification"]}, "use GPT2LMHeadModel", id="head"),
        pytest.param(GPT2, {"n_embd": None}, "n_embd missing", id="size"),
        pytest.param(
            BLOOM,
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm=True",
            id="residual after the norm",
        ),
    ],
)
def test_what_is_not_computed_of_gpt2_and_bloom_is_refused_by_name(
    base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        shape_of_config({**base, **changes})


QWEN = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        pytest.param("mistral", {"sliding_window": 8}, 8, id="mistral"),
        pytest.param("mistral", {"sliding_window": None}, None, id="mistral without"),
        pytest.param("mistral", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, None, id="said twice"),
        pytest.param("qwen2", {**QWEN, "max_window_layers": 0}, 8, id="all layers"),
        pytest.param("qwen2", {**QWEN, "max_window_layers": 2}, None, id="no layer"),
        pytest.param("qwen2", {**QWEN, "use_sliding_window": False, "max_window_layers": 1}, None, id="off"),
        pytest.param("qwen3", {**QWEN, "layer_types": ["sliding_attention"] * 2}, 8, id="all layers by name"),
        pytest.param("qwen3", {**QWEN, "layer_types": ["full_attention"] * 2}, None, id="no layer by name"),
    ],
)
def test_a_window_is_read_where_it_holds_for_all_layers_or_for_none(
    family: str, changes: dict[str, Any], window: int | None
) -> None:
    config = {**CONFIG, "model_type": family, "architectures": None, "num_key_value_heads": 2, **changes}
    assert shape_of_config(config).sliding_window == window


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        pytest.param("qwen2", {**QWEN, "max_window_layers": 1}, "max_window_layers=1", id="some layers"),
        pytest.param("qwen2", {**QWEN, "max_window_layers": "1"}, "max_window_layers='1'", id="a number in words"),
        pytest.param("qwen2", {"use_sliding_window": "no"}, "use_sliding_window='no'", id="a switch in words"),
        pytest.param(
            "qwen3", {**QWEN, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types=", id="some by name"
        ),
        pytest.param("qwen3", {"layer_types": ["sliding_attention"] * 2}, "layer_types=", id="a window that is off"),
        pytest.param("qwen3", {"layer_types": ["full_attention"]}, "layer_types=", id="too few"),
        pytest.param(
            "mistral", {"sliding_window": 8, "layer_types": ["full_attention"] * 2}, "layer_types=", id="either way"
        ),
        pytest.param("mistral", {"sliding_window": 0}, "sliding_window", id="no window at all"),
        pytest.param("mistral", {"attention_bias": True}, "attention_bias=True is not supported", id="mistral's bias"),
        pytest.param("qwen2", {"attention_bias": False}, "attention_bias=False is not supported", id="qwen2's bias"),
        pytest.param("qwen3", {"mlp_bias": True}, "mlp_bias=True is not supported", id="qwen3's bias"),
        pytest.param("qwen2", {"use_mrope": True}, "use_mrope=True", id="positions in three dims"),
        pytest.param("qwen2", {"architectures": ["LlamaForCausalLM"]}, "use Qwen2ForCausalLM", id="architecture"),
    ],
)
def test_what_another_family_does_not_compute_is_refused_by_name(
    family: str, changes: dict[str, Any], message: str
) -> None:
    config = {**CONFIG, "model_type": family, "architectures": None, "num_key_value_heads": 2, "head_dim": 8}
    with pytest.raises(ValueError, match=message):
        shape_of_config({**config, **changes})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"architecture": "qwen2", "attention_bias": "none"}, "use qkv", id="a bias"),
        pytest.param({"architecture": "qwen3", "qk_norm": False}, "qk_norm=False is not what qwen3 has", id="a norm"),
        pytest.param({"sliding_window": 8}, "use mistral or qwen2 or qwen3", id="a window"),
        pytest.param({"architecture": "gpt2"}, "num_kv_heads=2 is not what gpt2 has; use num_kv_heads=4", id="groups"),
        pytest.param({"architecture": "gpt2", "num_kv_heads": 4, "head_dim": 16}, "must be hidden_size=32", id="wide"),
        pytest.param({"architecture": "bloom", "num_kv_heads": 4}, "use 128, which is 4 x hidden_size", id="width"),
        pytest.param({"architecture": "gpt2", "rope_theta": 5e5}, "rope_theta=500000.0 is not what gpt2", id="theta"),
        pytest.param({"architecture": "bloom", "rope_scaling": LLAMA3}, "positions are not rotary", id="scaling"),
        pytest.param({"hidden_dropout": 0.1}, "hidden_dropout=0.1 is not what llama has", id="dropout"),
    ],
)
def test_a_shape_has_what_its_family_has(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nets.shape(**fields)


@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["plain", "llama3"])
def test_a_shape_survives_its_config(scaling: dict[str, Any] | None) -> None:
    shape = nets.shape(rope_scaling=scaling, rope_theta=5e5, head_dim=16, tie_embeddings=False)
    assert shape_of_config(config_of(shape, bos_id=1, eos_id=2, pad_id=None, dtype="float32")) == shape


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_a_shape_with_dropout_survives_its_config(family: str) -> None:
    shape = nets.shape(
        architecture=family, num_kv_heads=4, ffn_hidden_size=128, hidden_dropout=0.1, attention_dropout=0.2
    )
    assert shape_of_config(config_of(shape, bos_id=1, eos_id=2, pad_id=None, dtype="float32")) == shape


def test_a_llama_with_attention_dropout_is_read() -> None:
    assert shape_of_config({**CONFIG, "attention_dropout": 0.1}).attention_dropout == 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"model_type": "gptj"}, r"model_type 'gptj' is not supported; supported: llama", id="family"),
        pytest.param({"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification", id="head"),
        pytest.param({"attention_bias": "yes"}, "attention_bias='yes' is not supported", id="attention bias"),
        pytest.param({"sliding_window": 8}, "sliding_window=8 is not what llama has", id="window"),
        pytest.param({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention", id="layer types"),
        pytest.param({"hidden_act": "gelu"}, "hidden_act='gelu'", id="activation"),
        pytest.param({"attention_dropout": 1.5}, "attention_dropout", id="attention dropout"),
        pytest.param({"quantization_config": {"bits": 4}}, "quantization_config", id="quantised"),
        pytest.param({"rope_scaling": {"type": "longrope"}}, "rope_scaling type 'longrope'", id="rope"),
        pytest.param({"rope_scaling": {"type": "linear"}}, "'linear' needs factor", id="rope without factor"),
        pytest.param(
            {"rope_scaling": {"type": "linear", "factor": 2, "mrope_section": [1]}}, "mrope_section", id="rope key"
        ),
        pytest.param(
            {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a number", id="rope in words"
        ),
        pytest.param({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a number from", id="rope 0"),
        pytest.param({"rope_scaling": {"type": "linear", "factor": 1e-300}}, "factor must be", id="rope near 0"),
        pytest.param({"rope_scaling": {"type": "dynamic", "factor": [2.0]}}, "factor must be", id="rope in a list"),
        pytest.param({"rope_scaling": {**LLAMA3, "factor": float("inf")}}, "factor must be", id="rope without end"),
        pytest.param(
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 1}}, "low_freq_factor must be below", id="rope band"
        ),
        pytest.param({"rope_scaling": {"type": "yarn", "factor": 2, "truncate": "no"}}, "truncate must be", id="yarn"),
        pytest.param({"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2}, "head_dim", id="narrow head"),
        pytest.param({"rms_norm_eps": 1e308}, "norm_eps", id="norm"),
        pytest.param({"rope_theta": 1}, "rope_theta", id="theta"),
        pytest.param({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor", id="partial rope"),
        pytest.param({"vocab_size": None}, "vocab_size missing", id="size"),
        pytest.param({"num_attention_heads": 0}, "num_attention_heads=0 is not a whole number", id="no heads"),
        pytest.param({"hidden_size": "32"}, "hidden_size='32' is not a whole number", id="a size in words"),
        pytest.param({"num_key_value_heads": 3}, "num_kv_heads=3 must divide", id="groups"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape_of_config({**CONFIG, **changes})
