"""A job's whole life on this machine: pretrain a small model on real text, fine-tune it, download both, talk to them.

Everything after `trainshed serve` is HTTP with a key, through the Python client. Run it with `make demo`; what it makes
stays in `.demo` to look at. It ends non-zero, with the reason and the log's tail, when anything is not as it should be.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from tokenizers import Tokenizer

from trainshed import ApiError, Client, Damaged, Unreachable

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / ".demo"
LOG = DEMO / "serve.log"
START_SECONDS, STOP_SECONDS = 90, 40
WELL_BELOW = 1.0
"""Nats a token that the trained model must need fewer than guessing by frequency alone."""
LAST_STEPS = 10
"""The loss of a step is that of a few rows; the mean over the last ones says more."""

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
console = Console(highlight=False)


class Failed(Exception):
    """The demo did not show what it is meant to show."""


def main() -> None:
    began = time.monotonic()
    shutil.rmtree(DEMO, ignore_errors=True)
    DEMO.mkdir()
    with service() as client:
        console.print(f"[bold]Trainshed[/] is up at {client.http.base_url}; its log is {LOG.relative_to(ROOT)}")
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


@contextmanager
def service() -> Iterator[Client]:
    """`trainshed serve` on a fresh data directory, with a key of our choice; nothing of it is left afterwards."""
    key = f"demo-{secrets.token_urlsafe(24)}"
    port = free_port()
    trainshed = str(Path(sys.executable).with_name("trainshed"))
    command = [trainshed, "serve", "--data-dir", str(DEMO / "data"), "--port", str(port)]
    with LOG.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **TWO_CPU_RANKS, "TRAINSHED_ADMIN_KEY": key},
            start_new_session=True,
        )
    try:
        with Client(f"http://127.0.0.1:{port}", key) as client:
            wait_until_ready(client, process)
            yield client
        process.send_signal(signal.SIGINT)
        code = process.wait(STOP_SECONDS)
        if code:
            raise Failed(f"the service ended with exit code {code}")
        if left := ours():
            raise Failed(f"processes were left behind: {[describe(process) for process in left]}")
    finally:
        process.kill()
        process.wait()
        for left_behind in ours():
            left_behind.kill()


def wait_until_ready(client: Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    missing: Any = "no answer"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Failed(f"the service ended at once, with exit code {process.returncode}")
        try:
            missing = client.ready()
        except httpx.TransportError:
            time.sleep(0.1)
            continue
        if missing["status"] == "ready":
            return
        time.sleep(0.1)
    raise Failed(f"the service was not ready after {START_SECONDS} s: {missing}")


def run(client: Client, spec: dict[str, Any]) -> dict[str, Any]:
    """Submit a job, show it live, and return it once it succeeded."""
    job = client.submit(spec)
    console.print(f"\n[bold]{job['kind']}[/] {job['id']}: {ranks(job)}", soft_wrap=True)
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:>6}  {task.fields[speed]:>7} tokens/s  ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=5) as bar:
        task = bar.add_task(job["state"], total=None, loss="", speed="")
        for event in client.follow(job["id"]):
            said = event.data.get("data", {})
            match event.data["type"]:
                case "done":
                    job = event.data["job"]
                case "state":
                    bar.update(task, description=said["state"])
                case "started":
                    bar.update(task, total=said["total_steps"])
                case "progress":
                    bar.update(task, description=said["phase"])
                case "step":
                    loss, speed = f"{said['loss']:.3f}", f"{said['tokens_per_second']:,.0f}"
                    bar.update(task, description="training", completed=said["step"], loss=loss, speed=speed)
                    if not console.is_terminal and said["step"] % 50 == 0:
                        console.print(f"step {said['step']}, loss {loss}, {speed} tokens/s")
        bar.update(task, description=job["state"])
    if job["state"] != "succeeded":
        raise Failed(f"{job['id']} {job['state']}: {json.dumps(job['error'], indent=2)}\n{log_of(client, job['id'])}")
    return job


def final_loss(client: Client, job: dict[str, Any]) -> float:
    points = client.metrics(job["id"], names="loss")["series"]["loss"]
    losses = [float(loss) for _, loss in points[-LAST_STEPS:]]
    return sum(losses) / len(losses)


def ranks(job: dict[str, Any]) -> str:
    run_config = job["run_config"]
    parallel, count = run_config["parallel"], job["slots"]
    layout = f"tensor {parallel['tensor']}, data {parallel['data']}{', sequence' if parallel['sequence'] else ''}"
    return f"{count} {'rank' if count == 1 else 'ranks'} ({layout}), recompute {run_config['recompute']['mode']}"


def fetch(client: Client, job: dict[str, Any], into: Path) -> int:
    """Download what the job made and hold every file against the manifest; how many there were."""
    client.download(job["id"], into)
    manifest = client.artifacts(job["id"])["manifest"]
    for entry in manifest["files"]:
        with (into / entry["path"]).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                raise Failed(f"{entry['path']} is not what the manifest says")
    return len(manifest["files"])


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


def quote(source: str, prompt: str, text: str) -> None:
    shown = " ".join(text.split())
    console.print(f"\n[bold]{source}[/]  {prompt}")
    console.print(f"  {shown}", style="cyan", markup=False)


def seconds(job: dict[str, Any]) -> float:
    return float(job["finished_at"] - job["started_at"])


def log_of(client: Client, job_id: str) -> str:
    try:
        return client.logs(job_id, tail=30)
    except (ApiError, Unreachable, httpx.TransportError) as error:
        return f"(its log can't be read: {error})"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ours() -> list[psutil.Process]:
    """Processes that work in the demo's folder or were told of it, whoever their parent is; not this one."""
    found = []
    for process in psutil.process_iter():
        try:
            traces = (process.cwd(), process.environ().get("TRAINSHED_DATA_DIR", ""), *process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if process.pid != os.getpid() and any(trace.startswith(f"{DEMO}/data") for trace in traces):
            found.append(process)
    return found


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return str(process.pid)


def end(number: int, frame: object) -> None:
    """SIGTERM ends it as Ctrl-C does, so that the service is stopped in either case."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    try:
        main()
    except (Failed, ApiError, Damaged, Unreachable, httpx.HTTPError, subprocess.TimeoutExpired) as error:
        console.print(f"\n[bold red]failed:[/] {type(error).__name__}: ", end="")
        console.print(str(error), markup=False)
        if LOG.exists():
            console.print(f"\nThe end of {LOG}:\n{LOG.read_text(errors='replace')[-3000:]}", markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
