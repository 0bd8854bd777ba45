"""Shapes by name, as data. A job may say a preset and still set single sizes itself."""

from __future__ import annotations

from typing import Any


def _llama(
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    ffn_hidden_size: int,
    max_seq_len: int,
    vocab_size: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "ffn_hidden_size": ffn_hidden_size,
        "max_seq_len": max_seq_len,
        "vocab_size": vocab_size,
        "tie_embeddings": True,
    } | more


def _gpt(
    num_layers: int, hidden_size: int, num_heads: int, max_seq_len: int, vocab_size: int, **more: Any
) -> dict[str, Any]:
    sizes = _llama(num_layers, hidden_size, num_heads, 4 * hidden_size, max_seq_len, vocab_size)
    return sizes | {"architecture": "gpt2"} | more


PRESETS: dict[str, dict[str, Any]] = {
    # Karpathy's llama2.c, trained on TinyStories.
    "llama-15m": _llama(6, 288, 6, 768, 256, 32_000),
    "llama-42m": _llama(8, 512, 8, 1376, 1024, 32_000),
    "llama-110m": _llama(12, 768, 12, 2048, 1024, 32_000),
    # GPT-3's smallest (Brown et al. 2020, table 2.1), with SwiGLU.
    "llama-125m": _llama(12, 768, 12, 2048, 2048, 32_000),
    # SmolLM2-135M's sizes.
    "llama-135m": _llama(30, 576, 9, 1536, 2048, 49_152, num_kv_heads=3),
    # TinyLlama (Zhang et al. 2024).
    "llama-1.1b": _llama(22, 2048, 32, 5632, 2048, 32_000, num_kv_heads=4, tie_embeddings=False),
    # Llama 2 (Touvron et al. 2023).
    "llama-7b": _llama(32, 4096, 32, 11_008, 4096, 32_000, tie_embeddings=False),
    # Korthikanti et al. 2022, table 3: layers, width and heads as there; SwiGLU's 8/3 for their 4 keeps the parameters.
    "22b": _llama(48, 6144, 64, 16_384, 2048, 51_200),
    "175b": _llama(96, 12_288, 96, 32_768, 2048, 51_200),
    "530b": _llama(105, 20_480, 128, 54_656, 2048, 51_200),
    "1t": _llama(128, 25_600, 160, 68_288, 2048, 51_200),
    # GPT-2's smallest (Radford et al. 2019, table 2).
    "gpt2": _gpt(12, 768, 12, 1024, 50_257),
    # BLOOM's smallest.
    "bloom-560m": _gpt(24, 1024, 16, 2048, 250_880, architecture="bloom"),
    # Korthikanti et al. 2022, table 3, to the letter: the GPT layer, and the dropout that its memory counts.
    "gpt-22b": _gpt(48, 6144, 64, 2048, 51_200, hidden_dropout=0.1, attention_dropout=0.1),
    "gpt-175b": _gpt(96, 12_288, 96, 2048, 51_200, hidden_dropout=0.1, attention_dropout=0.1),
    "gpt-530b": _gpt(105, 20_480, 128, 2048, 51_200, hidden_dropout=0.1, attention_dropout=0.1),
    "gpt-1t": _gpt(128, 25_600, 160, 2048, 51_200, hidden_dropout=0.1, attention_dropout=0.1),
}
"""Name to fields of `engine.config.ModelShape`. `vocab_size` gives way to the tokenizer's."""
