"""A tiny base of our own making, in Hugging Face layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine import weights
from engine.families import config_of
from tests.engine.data.make import llama_folder
from tests.engine.net import nets

NAME = "cases-base"


def write(folder: Path, *, template: str | None = None, **tokenizer: Any) -> None:
    """Two layers over the vocabulary of the tests' llama, of random weights; `tokenizer` is configuration."""
    if folder.is_dir():
        return
    llama_folder(folder, template=template, **tokenizer)
    shape = nets.shape(vocab_size=320, max_seq_len=512, init_std=0.02)
    model = nets.decoder(shape)
    weights.save(model, folder, model.dtype)
    config = config_of(shape, bos_id=1, eos_id=2, pad_id=None, dtype="float32")
    (folder / "config.json").write_text(json.dumps(config))
