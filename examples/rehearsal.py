"""A model of random weights over bytes, for the short form of an example: all goes its way, within seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from engine.tokenizer import Tokenizer

NAME = "rehearsal"
LAYERS, HIDDEN, FFN, HEADS, KV_HEADS = 2, 64, 128, 4, 2
STD = 0.02


def base(models: Path) -> str:
    """The model's name in the folder `models`, where it is made if it isn't there."""
    folder = models / NAME
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = Tokenizer.bytes()
        tokenizer.save(folder)
        save_file(weights(tokenizer.vocab_size), folder / "model.safetensors", metadata={"format": "pt"})
        generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.stop_ids)}
        (folder / "generation_config.json").write_text(json.dumps(generation))
        # Last, because a folder with one is a model.
        (folder / "config.json").write_text(json.dumps(config(tokenizer)))
    return NAME


def config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "dtype": "float32",
    }


def weights(vocab_size: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    kv = HIDDEN // HEADS * KV_HEADS
    matrices = {"model.embed_tokens": (vocab_size, HIDDEN)}
    norms = ["model.norm"]
    for layer in range(LAYERS):
        of_layer = f"model.layers.{layer}."
        matrices |= {
            f"{of_layer}self_attn.q_proj": (HIDDEN, HIDDEN),
            f"{of_layer}self_attn.k_proj": (kv, HIDDEN),
            f"{of_layer}self_attn.v_proj": (kv, HIDDEN),
            f"{of_layer}self_attn.o_proj": (HIDDEN, HIDDEN),
            f"{of_layer}mlp.gate_proj": (FFN, HIDDEN),
            f"{of_layer}mlp.up_proj": (FFN, HIDDEN),
            f"{of_layer}mlp.down_proj": (HIDDEN, FFN),
        }
        norms += [f"{of_layer}input_layernorm", f"{of_layer}post_attention_layernorm"]
    draw = np.random.default_rng(1)
    return {
        **{f"{name}.weight": draw.normal(0, STD, size).astype(np.float32) for name, size in matrices.items()},
        **{f"{name}.weight": np.ones(HIDDEN, np.float32) for name in norms},
    }
