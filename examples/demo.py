"""A job's whole life on this machine: pretrain a small model on real text, fine-tune it, download both, talk to them.

Everything after `trainshed serve` is HTTP with a key, through the Python client. Run it with `make demo`; what it makes
stays in `.demo` to look at. It ends non-zero, with the reason and the log's tail, when anything is not as it should be.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from safetensors import safe_open
from tokenizers import Tokenizer

from api.client import Client
from service import LOG, Failed, service
from showing import as_script, console, fetch, final_loss, quote, run, seconds

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / ".demo"
WELL_BELOW = 1.0
"""Nats a token that the trained model must need fewer than guessing by frequency alone."""

TWO_CPU_RANKS = {"TRAINSHED_SLOTS": "2", "CUDA_VISIBLE_DEVICES": ""}
"""The same demo on every machine, whatever GPUs it has or lacks."""

PRETRAIN: dict[str, Any] = {
    "kind": "pretrain",
    "name": "python-topics",
    "model": {
        "architecture": "llama",
        "num_layers": 2,
        "hidden_size": 256,
        "num_heads": 8,
        "num_kv_heads": 4,
        "ffn_hidden_size": 704,
        "max_seq_len": 256,
    },
    "tokenizer": {"train": {"vocab_size": 2048}},
    "data": {"seq_len": 256, "validation": 0.02},
    "training": {"steps": 300, "global_batch": 4, "lr": 1.2e-3, "warmup": 0.1, "checkpoint_every": 150},
    "parallel": {"tensor": 2, "sequence": True},
    "recompute": {"mode": "selective"},
    "resources": {"gpus": 2},
}
FINETUNE: dict[str, Any] = {
    "kind": "finetune",
    "name": "python-answers",
    "data": {"seq_len": 256},
    "method": {"type": "lora", "rank": 16, "alpha": 32},
    "training": {"epochs": 40, "global_batch": 2, "lr": 6e-3},
}


def main() -> None:
    began = time.monotonic()
    shutil.rmtree(DEMO, ignore_errors=True)
    DEMO.mkdir()
    with service(DEMO, **TWO_CPU_RANKS) as client:
        console.print(
            f"[bold]Trainshed[/] is up at {client.http.base_url}; its log is {(DEMO / LOG).relative_to(ROOT)}"
        )
        text = "\n\n".join(topics.values())
        upload = client.upload(io.BytesIO(text.encode()), filename="topics.txt")
        pretrained = run(client, {**PRETRAIN, "data": {"train": [upload["id"]], **PRETRAIN["data"]}})
        chat = client.upload(ROOT / "examples" / "chat.jsonl")
        tuned = run(
            client,
            {**FINETUNE, "model": {"base": pretrained["model"]}, "data": {"train": [chat["id"]], **FINETUNE["data"]}},
        )
        files = [fetch(client, job, DEMO / job["name"]) for job in (pretrained, tuned)]
        entropy = unigram_entropy(DEMO / "python-topics" / "model" / "tokenizer.json", text)
        loss = final_loss(client, pretrained)
        if not loss < entropy - WELL_BELOW:
            raise Failed(f"the loss {loss:.2f} is not well below the text's unigram entropy {entropy:.2f}")
        tuned_loss = final_loss(client, tuned)
        weights = reload(DEMO / "python-answers" / "model")
        speak(client, pretrained, tuned)
    took = time.monotonic() - began
    console.print(f"\nBoth models lie in {DEMO.relative_to(ROOT)}/. `make serve` starts the service for your own.\n")
    console.print(
        f"[bold green]ok[/] pretrain {pretrained['progress']['step']} steps on {pretrained['slots']} ranks in "
        f"{seconds(pretrained):.0f} s, loss {loss:.2f} against {entropy:.2f} by token frequency alone (nats a token); "
        f"fine-tune {tuned['progress']['step']} steps in {seconds(tuned):.0f} s, loss {tuned_loss:.2f}; "
        f"{sum(files)} files verified, {weights / 1e6:.1f} M weights reloaded; {took:.0f} s in all, no process left",
        soft_wrap=True,
    )


def unigram_entropy(tokenizer: Path, text: str) -> float:
    """Nats a token that one needs who knows how often each token occurs in the text, and nothing else."""
    counts = Counter(Tokenizer.from_file(str(tokenizer)).encode(text).ids)
    total = counts.total()
    return -sum(count / total * math.log(count / total) for count in counts.values())


def reload(model: Path) -> int:
    """Read the merged weights without the service and let the engine alone speak from them; how many there are."""
    with safe_open(model / "model.safetensors", framework="pt") as tensors:
        weights: int = sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    question = "What is a tuple?"
    messages = [{"role": "user", "content": question}]
    said = subprocess.run(
        [sys.executable, "-m", "engine", "serve", model],
        input=json.dumps({"id": "1", "messages": messages, "max_tokens": 40, "temperature": 0}) + "\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if said.returncode:
        raise Failed(f"the engine does not read {model}:\n{said.stderr}")
    quote("engine alone", question, json.loads(said.stdout.splitlines()[-1])["choices"][0]["text"])
    return weights


def speak(client: Client, pretrained: dict[str, Any], tuned: dict[str, Any]) -> None:
    prompt = "The for statement is used to"
    went_on = client.complete(pretrained["model"], prompt, max_tokens=40, temperature=0.7, seed=1)
    quote("/v1/completions", prompt, went_on["choices"][0]["text"])
    question = "What does break do?"
    answer = client.chat(tuned["model"], [{"role": "user", "content": question}], max_tokens=40, temperature=0)
    quote("/v1/chat/completions", question, answer["choices"][0]["message"]["content"])


if __name__ == "__main__":
    as_script(main)
