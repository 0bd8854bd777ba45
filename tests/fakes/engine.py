"""Stands in for `python -m engine launch`: same arguments and files, no training. Options choose what it does amiss."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    options = parse()
    run_dir = options.run.parent
    run = json.loads(options.run.read_text())
    events = Events(run_dir / "events.jsonl")
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: None if options.ignore_term else told.append(number))
    # One that stays behind unless the whole group is killed.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(run_dir)])
    (run_dir / "logs").mkdir(exist_ok=True)
    (run_dir / "logs" / "rank-0.log").write_text("rank 0 is up\n")

    training = run["training"]
    start = int(Path(run["resume"]).name.split("-")[1]) if run.get("resume") else 0
    events.write("started", total_steps=training["steps"], start_step=start, ranks=options.ranks, parameters=1,
                 trainable_parameters=1, train_rows=1, train_tokens=1, vocab_size=260, device="cpu")  # fmt: skip
    unsaid: int | None = None
    if options.go_back_to is not None and not start:
        # A run that has saved twice, goes back to the first, and dies before it saves again.
        for step in range(1, 2 * options.go_back_to + 1):
            events.write("step", step=step, loss=1 / step, lr=0.1, grad_norm=1.0, tokens=step, tokens_per_second=1.0,
                         step_seconds=options.step_seconds)  # fmt: skip
            if step % options.go_back_to == 0:
                save(run_dir, step, events)
        rest(options.step_seconds, options.heartbeat_timeout)
        events.write("rolled_back", step=options.go_back_to, from_step=step, rows=step)
        rest(options.step_seconds, options.heartbeat_timeout)
        return end(1)
    for step in range(start + 1, training["steps"] + 1):
        rest(options.step_seconds, options.heartbeat_timeout)
        if options.fail:
            events.write("failed", code=options.fail, message="as it was told", hint="tell it something else")
            return end(1)
        if options.vanish_at == step:
            end(-1)
        events.write("step", step=step, loss=1 / step, lr=0.1, grad_norm=1.0, tokens=step, tokens_per_second=1.0,
                     step_seconds=options.step_seconds)  # fmt: skip
        # One that is due is written while the next step is taken.
        if unsaid is not None:
            save(run_dir, unsaid, events)
        unsaid = step if told or step % (training["checkpoint_every"] or training["steps"]) == 0 else None
        if unsaid is not None and (told or step == training["steps"]):
            save(run_dir, unsaid, events)
        if told:
            events.write("stopped", step=step)
            return end(0)
    export(run_dir / "export", run)
    events.write("finished", step=training["steps"], tokens=training["steps"])
    return end(0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-seconds", type=float, default=0.01)
    parser.add_argument("--fail", help="report this error at the first step")
    parser.add_argument("--vanish-at", type=int, help="die at this step without a word")
    parser.add_argument("--go-back-to", type=int, help="go back to this step from its double, once, and die")
    parser.add_argument("--ignore-term", action="store_true", help="do not end when asked")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--heartbeat-timeout", type=float)
    parser.add_argument("--nice", type=int)
    parser.add_argument("run", type=Path)
    return parser.parse_args()


class Events:
    def __init__(self, path: Path) -> None:
        self.path, self.seq = path, 0

    def write(self, type: str, **fields: Any) -> None:
        self.seq += 1
        with self.path.open("a") as file:
            file.write(json.dumps({"type": type, "seq": self.seq, "time": time.time(), **fields}) + "\n")


heard_at = time.monotonic()


def rest(seconds: float, timeout: float | None) -> None:
    """Let a step's time pass; die with the group where the heartbeat ends or stays out."""
    global heard_at
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if timeout is None:
            time.sleep(left)
        elif select.select([0], [], [], min(left, 0.05))[0]:
            if not os.read(0, 4096):
                end(-1)
            heard_at = time.monotonic()
        elif time.monotonic() - heard_at > timeout:
            end(-1)


def end(code: int) -> int:
    """Leave nobody behind; below zero, not even oneself."""
    if code < 0:
        os.killpg(0, signal.SIGKILL)
    return code


def save(run_dir: Path, step: int, events: Events) -> None:
    name = f"checkpoints/step-{step:08d}"
    whole(run_dir / name, {"weights.bin": f"step {step}".encode()}, {})
    events.write("checkpoint", step=step, path=name, bytes=10, seconds=0.0)


def export(folder: Path, run: dict[str, Any]) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 16, "vocab_size": 260, "max_position_embeddings": 16,
    }  # fmt: skip
    files = {"model/config.json": json.dumps(config).encode(), "model/model.safetensors": b"weights"}
    whole(folder, files, {"run": run})


def whole(folder: Path, files: dict[str, bytes], more: dict[str, Any]) -> None:
    part = folder.with_name(folder.name + ".part")
    for name, content in files.items():
        path = part / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    entries = [
        {"path": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    ]
    (part / "manifest.json").write_text(json.dumps({"files": entries, **more}))
    part.rename(folder)


if __name__ == "__main__":
    sys.exit(main())
