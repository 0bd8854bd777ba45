"""config.json and shapes: what is read, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig

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


@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["plain", "llama3"])
def test_a_shape_survives_its_config(scaling: dict[str, Any] | None) -> None:
    shape = nets.shape(rope_scaling=scaling, rope_theta=5e5, head_dim=16, tie_embeddings=False)
    assert shape_of_config(config_of(shape, bos_id=1, eos_id=2, pad_id=None, dtype="float32")) == shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"model_type": "gpt2"}, r"model_type 'gpt2' is not supported; supported: llama", id="family"),
        pytest.param({"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification", id="head"),
        pytest.param({"attention_bias": True}, "attention_bias=True is not supported", id="attention bias"),
        pytest.param({"mlp_bias": True}, "mlp_bias=True", id="mlp bias"),
        pytest.param({"hidden_act": "gelu"}, "hidden_act='gelu'", id="activation"),
        pytest.param({"attention_dropout": 0.1}, "attention_dropout=0.1", id="attention dropout"),
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
