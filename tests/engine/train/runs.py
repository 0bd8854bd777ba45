"""Small runs of the real trainer: a run directory with data, and what its events said."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from engine.config import RunConfig
from engine.events import Event
from engine.stop import StopWish
from engine.trainer import train

SHAPE = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_hidden_size": 48,
    "max_seq_len": 32, "vocab_size": 261,
}  # fmt: skip
"""Bytes and four control tokens are 260 ids; one more, so that two ranks have a row of padding."""
TRAINING = {
    "steps": 10, "global_batch": 4, "micro_batch": 1, "lr": 1e-3, "precision": "fp32", "warmup": 0.2, "seed": 5,
}  # fmt: skip

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor-sequence": {"tensor": 2, "sequence": True},
    "context": {"context": 2},
    "data": {"data": 2},
    "pipeline": {"pipeline": 2},
    "data-weights": {"data": 2, "shard_weights": True},
}
"""One rank, and two along each axis."""


def config(**changes: Any) -> RunConfig:
    """A run of the tiny llama on bytes; `training`, `parallel`, `data` … replace single fields."""
    run: dict[str, Any] = {
        "model": SHAPE,
        "tokenizer": {"type": "bytes"},
        "objective": "pretrain",
        "data": {"train": ["data/train.txt"], "format": "text", "seq_len": 32},
        "training": TRAINING,
    }
    for name, value in changes.items():
        run[name] = run[name] | value if isinstance(run.get(name), dict) and isinstance(value, dict) else value
    return RunConfig.model_validate(run)


def write(run_dir: Path, run: RunConfig) -> Path:
    """Write `run.json`, with text, questions with answers and pairs of answers beside it."""
    data = run_dir / "data"
    data.mkdir(exist_ok=True)
    random = Random(3)
    words = ["shed", "train", "rail", "signal", "switch", "a", "the", "of", "on"]
    (data / "train.txt").write_text("\n".join(" ".join(random.choices(words, k=12)) for _ in range(60)))
    pairs = [{"prompt": f"{n} and {n}?", "completion": " " + "yes " * (n % 4 + 1)} for n in range(9)]
    (data / "train.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    preferred = [{"prompt": f"{n}?", "chosen": " yes" * (n % 3 + 1), "rejected": " no" * (n % 2 + 1)} for n in range(9)]
    (data / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in preferred))
    (run_dir / "run.json").write_text(run.model_dump_json())
    return run_dir / "run.json"


COMPLETION: dict[str, Any] = {
    "objective": "sft",
    "data": {"train": ["data/train.jsonl"], "format": "completion", "seq_len": 32},
}
"""Labels on the answers only, which differ in length."""
PREFERENCE: dict[str, Any] = {
    "objective": "dpo",
    "dpo": {"beta": 0.5},
    "data": {"train": ["data/pairs.jsonl"], "format": "preference", "seq_len": 32},
}
"""Pairs of answers, one or two of them in a row."""


def events_of(run_dir: Path, run: RunConfig, wish: StopWish | None = None) -> list[Event]:
    """Train `run` on this process's rank, and return its events."""
    run_file = run_dir / "run.json"
    if not run_file.exists():
        write(run_dir, run)
    seen: list[Event] = []
    train(run, run_dir, seen.append, wish or StopWish())
    return seen


def losses(events: list[Event]) -> list[float]:
    return [event.loss for event in events if event.type == "step"]


def load_events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def base_in(folder: Path) -> Path:
    """A model of three steps, to go on from."""
    events_of(folder, config(training={"steps": 3}))
    return folder / "export" / "model"
