"""Builders: vocabularies of the kinds that bases come with, and runs over files written on the spot."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from engine.config import Data, ModelShape, RunConfig, TokenizerSource, Training
from engine.data.format import Chat, conversation
from engine.data.prepare import Prepared, prepare
from engine.tokenizer import Tokenizer

SHAPE = ModelShape(
    num_layers=1, hidden_size=8, num_heads=2, num_kv_heads=2, head_dim=4, ffn_hidden_size=8, max_seq_len=4096,
    vocab_size=512,
)  # fmt: skip


def llama_folder(folder: Path, *, template: str | None = None, **config: Any) -> Path:
    """A base as Llama's were published: BOS before each text, a space before each piece, bytes for what is rare."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    for piece in ("▁", *"abcdefghijklmnopqrstuvwxyz0123456789.:?+=ANU", "he", "▁t", "▁the", "ll", "llo"):
        vocab[piece] = len(vocab)
    merges = [("h", "e"), ("▁", "t"), ("▁t", "he"), ("l", "l"), ("ll", "o")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    if template is not None:
        named["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, **config}))
    return folder


def llama(folder: Path, *, template: str | None = None, **config: Any) -> Tokenizer:
    return Tokenizer.load(llama_folder(folder, template=template, **config))


def talk(*turns: str, **more: Any) -> Chat:
    """A conversation of user and assistant in turn; a turn that starts with `!` has weight 0."""
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        message: dict[str, Any] = {"role": ("user", "assistant")[number % 2], "content": turn.removeprefix("!")}
        messages.append({**message, "weight": 0} if turn.startswith("!") else message)
    return conversation({"messages": messages, **more}, line=1)


def jsonl(values: Iterable[object]) -> bytes:
    return b"".join(json.dumps(value, ensure_ascii=False).encode() + b"\n" for value in values)


def chat_line(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def pair_line(question: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": question}], "chosen": chosen, "rejected": rejected}


OBJECTIVES = {"text": "pretrain", "preference": "dpo"}
"""Of what is not imitated only where it is trained."""


def run(
    *, objective: str | None = None, seed: int = 1, tokenizer: TokenizerSource | None = None, **data: Any
) -> RunConfig:
    data = {"train": (Path("data/train-0.jsonl"),), "format": "text", "seq_len": 16, **data}
    return RunConfig(
        model=SHAPE,
        tokenizer=tokenizer or TokenizerSource(type="bytes"),
        objective=objective or OBJECTIVES.get(data["format"], "sft"),
        data=Data(**data),
        training=Training(steps=1, global_batch=4, micro_batch=2, lr=1e-3, seed=seed),
    )


def prepared(folder: Path, content: bytes, *, tokenizer: Tokenizer | None = None, **asked: Any) -> Prepared:
    """The rows of one training file; ids are bytes unless a tokenizer is given."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "data" / "train-0.jsonl").write_bytes(content)
    return prepare(run(**asked), folder, tokenizer or Tokenizer.bytes(), silent)


def silent(phase: str, done: int, total: int, unit: str) -> None:
    """A report that nobody reads."""
