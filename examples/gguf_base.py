"""A llama's GGUF file as a folder in Hugging Face layout, in fp32: what it was quantised to is kept as it is.

Only what byte-level BPE vocabularies and plain rotary positions need; anything else is refused in words.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Array = np.ndarray[Any, np.dtype[np.float32]]

CUTS = {
    "gpt-2": (),
    "smollm": (pre_tokenizers.Digits(individual_digits=True),),
}
"""What happens to text before it is cut into words as GPT-2's is, by the name that the format has for it."""
WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""`blk.3.attn_q.weight` there is `model.layers.3.self_attn.q_proj.weight` here."""
CONTROL = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
           "pad_token": "padding_token_id"}  # fmt: skip
"""Role of a control token here, and its key there."""


class Unsupported(ValueError):
    """The file holds what this can't convert; the text says what."""


class Source:
    """What the file says, by key."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(path)
        for key, known in {"general.architecture": ("llama",), "tokenizer.ggml.model": ("gpt2",)}.items():
            if (there := self.get(key)) not in known:
                raise Unsupported(f"{path.name} has {key} {there!r}; only {', '.join(known)} can be converted")

    def get(self, key: str, default: Any = None) -> Any:
        found = self.reader.fields.get(key)
        return default if found is None else found.contents()

    def __getitem__(self, key: str) -> Any:
        if key not in self.reader.fields:
            raise Unsupported(f"the file has no {key}")
        return self.get(key)


def convert(path: Path, folder: Path) -> None:
    """Write the model in the file `path` to `folder`, which is there whole or not at all."""
    source = Source(path)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    weights = weights_of(source)
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    tokenizer_of(source).save(str(part / "tokenizer.json"))
    written = {
        "config.json": config_of(source, is_tied="lm_head.weight" not in weights),
        "generation_config.json": _ids(source),
        "tokenizer_config.json": tokenizer_config_of(source),
    }
    for name, content in written.items():
        (part / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
    os.replace(part, folder)


def weights_of(source: Source) -> dict[str, Array]:
    return {
        _name(tensor.name): _whole(source, tensor)
        for tensor in source.reader.tensors
        # Frequencies are made anew from the configuration.
        if not tensor.name.startswith("rope_freqs")
    }


def _name(there: str) -> str:
    if there in WHOLE:
        return WHOLE[there]
    block, layer, part, kind = there.split(".") if there.count(".") == 3 else ("", "", "", "")
    if block != "blk" or kind != "weight" or part not in OF_A_LAYER:
        raise Unsupported(f"the file has a tensor {there}, which a llama has not")
    return f"model.layers.{layer}.{OF_A_LAYER[part]}.weight"


def _whole(source: Source, tensor: gguf.ReaderTensor) -> Array:
    # The format lists the fastest dim first.
    size = [int(length) for length in reversed(tensor.shape)]
    values: Array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(size)
    if not tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
        return np.ascontiguousarray(values)
    # Two rows that are turned together lie side by side there, and half a head apart here.
    pairs = values.reshape(-1, _head_dim(source) // 2, 2, size[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(size))


def _head_dim(source: Source) -> int:
    heads: int = source["llama.attention.head_count"]
    dim: int = source.get("llama.rope.dimension_count", source["llama.embedding_length"] // heads)
    return dim


def config_of(source: Source, *, is_tied: bool) -> dict[str, Any]:
    if "llama.rope.scaling.type" in source.reader.fields:
        raise Unsupported("the file scales its rotary positions; only plain ones can be converted")
    heads = source["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(source["tokenizer.ggml.tokens"]),
        "hidden_size": source["llama.embedding_length"],
        "intermediate_size": source["llama.feed_forward_length"],
        "num_hidden_layers": source["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": source.get("llama.attention.head_count_kv", heads),
        "head_dim": _head_dim(source),
        "hidden_act": "silu",
        "max_position_embeddings": source["llama.context_length"],
        # Stored in fp32, and meant as it was written.
        "rms_norm_eps": float(str(np.float32(source["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": source.get("llama.rope.freq_base", 10000.0),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": is_tied,
        "dtype": "float32",
        **_ids(source),
    }


def _ids(source: Source) -> dict[str, int]:
    found = {f"{role}_id": source.get(f"tokenizer.ggml.{key}") for role, key in CONTROL.items() if role != "unk_token"}
    return {name: identity for name, identity in found.items() if identity is not None}


def tokenizer_of(source: Source) -> Tokenizer:
    cut = source["tokenizer.ggml.pre"]
    if cut not in CUTS:
        raise Unsupported(f"the file's vocabulary cuts text as {cut!r}; known are {', '.join(CUTS)}")
    tokens, types = source["tokenizer.ggml.tokens"], source["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in source["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*CUTS[cut], words])
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return backend


def tokenizer_config_of(source: Source) -> dict[str, Any]:
    tokens = source["tokenizer.ggml.tokens"]
    roles = {role: source.get(f"tokenizer.ggml.{key}") for role, key in CONTROL.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": source["tokenizer.chat_template"],
        **{role: tokens[identity] for role, identity in roles.items() if identity is not None},
    }
