"""What all contestants train: a run directory with the weights to start from and the text, and how large each is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from engine import mesh, weights
from engine.config import ModelShape, RunConfig
from engine.families import config_of
from engine.model import Decoder

SEED = 1


@dataclass(frozen=True)
class Size:
    """A model, and the batch of one step."""

    shape: ModelShape
    rows: int
    tokens: int
    """In a row."""

    @property
    def step_tokens(self) -> int:
        return self.rows * self.tokens


def llama(dim: int, layers: int, heads: int, hidden: int, *, rows: int, tokens: int, vocab: int = 32_000) -> Size:
    shape = ModelShape(
        num_layers=layers, hidden_size=dim, num_heads=heads, num_kv_heads=heads, head_dim=dim // heads,
        ffn_hidden_size=hidden, max_seq_len=tokens, vocab_size=vocab, norm_eps=1e-6,
    )  # fmt: skip
    return Size(shape, rows, tokens)


SIZES = {
    "tiny": llama(32, 2, 4, 48, rows=2, tokens=16, vocab=300),
    "S": llama(288, 6, 6, 768, rows=16, tokens=256),
    "M": llama(768, 12, 12, 2048, rows=2, tokens=1024),
}
"""tiny: for tests only. S: 15 million parameters. M: 125 million."""


RECOMPUTE: dict[str, dict[str, Any]] = {
    "auto": {"mode": "none"},
    "activation": {"mode": "selective", "operations": ["activation"]},
    "cheap": {"mode": "selective", "operations": ["norm", "activation"]},
    **{mode: {"mode": mode} for mode in ("none", "selective", "full")},
}
"""What the engine may be told to compute again. "auto" is what the service picks where memory is no question, as it is
for these; "activation" and "cheap" cost no matrix product."""


def lay_out(folder: Path, size: Size, *, steps: int, recompute: str = "auto") -> RunConfig:
    """Write a run of at least `steps` steps into `folder`: `run.json`, the weights to start from, and the text."""
    folder.mkdir(parents=True, exist_ok=True)
    decoder = Decoder(size.shape, mesh.alone(torch.device("cpu")), seed=SEED)
    base = folder / "base"
    base.mkdir(exist_ok=True)
    weights.save(decoder, base, torch.float32)
    config = config_of(size.shape, bos_id=None, eos_id=0, pad_id=None, dtype="float32")
    (base / "config.json").write_text(json.dumps(config))
    write_text(folder, size, rows=size.rows * min(steps, 32))
    run = RunConfig.model_validate(
        {
            "base": "base",
            "tokenizer": {"type": "file", "path": "tokenizer.json"},
            "objective": "pretrain",
            "data": {"train": ["text.txt"], "format": "text", "seq_len": size.tokens},
            "training": {
                # Never the last step, after which the run would be saved and exported.
                "steps": steps + 1, "global_batch": size.rows, "micro_batch": size.rows, "lr": 1e-4,
                "schedule": "constant", "warmup": 0, "precision": "bf16", "seed": SEED,
            },
            "recompute": RECOMPUTE[recompute],
        }
    )  # fmt: skip
    # What is not set is left to the reader: another checkout may not know all that there is.
    (folder / "run.json").write_text(run.model_dump_json(exclude_unset=True))
    return run


def write_text(folder: Path, size: Size, *, rows: int) -> None:
    """One document that fills `rows` rows, of words as frequent as words are, and a tokenizer with one id a word."""
    vocab = {"<|endoftext|>": 0} | {f"w{number}": number for number in range(1, size.shape.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    ranks = np.random.default_rng(SEED).zipf(1.3, size=rows * size.tokens)
    words = 1 + ranks % (size.shape.vocab_size - 1)
    (folder / "text.txt").write_text(" ".join(f"w{word}" for word in words))
