"""What examples show on a terminal: a job as it runs, what it leaves, what a model says, and why something failed."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from api.client import ApiError, Client, Damaged, Unreachable
from service import Failed

LAST_STEPS = 10
"""The loss of a step is that of a few rows; the mean over the last ones says more."""
LINES = 10
"""Steps that are told of where there is no terminal for a bar."""

console = Console(highlight=False)


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
        every = 1
        for event in client.follow(job["id"]):
            said = event.data.get("data", {})
            match event.data["type"]:
                case "done":
                    job = event.data["job"]
                case "state":
                    bar.update(task, description=said["state"])
                case "started":
                    bar.update(task, total=said["total_steps"])
                    every = max(1, said["total_steps"] // LINES)
                case "progress":
                    bar.update(task, description=said["phase"])
                case "step":
                    loss, speed = f"{said['loss']:.3f}", f"{said['tokens_per_second']:,.0f}"
                    bar.update(task, description="training", completed=said["step"], loss=loss, speed=speed)
                    if not console.is_terminal and said["step"] % every == 0:
                        console.print(f"step {said['step']}, loss {loss}, {speed} tokens/s")
        bar.update(task, description=job["state"])
    if job["state"] != "succeeded":
        raise Failed(f"{job['id']} {job['state']}: {json.dumps(job['error'], indent=2)}\n{log_of(client, job['id'])}")
    return job


def ranks(job: dict[str, Any]) -> str:
    run_config = job["run_config"]
    parallel, count = run_config["parallel"], job["slots"]
    layout = f"tensor {parallel['tensor']}, data {parallel['data']}{', sequence' if parallel['sequence'] else ''}"
    return f"{count} {'rank' if count == 1 else 'ranks'} ({layout}), recompute {run_config['recompute']['mode']}"


def series(client: Client, job: dict[str, Any], name: str) -> list[float]:
    """Every value of one metric of a job, in order of its steps."""
    return [float(value) for _, value in client.metrics(job["id"], names=name)["series"].get(name, [])]


def final_loss(client: Client, job: dict[str, Any]) -> float:
    losses = series(client, job, "loss")[-LAST_STEPS:]
    return sum(losses) / len(losses)


def fetch(client: Client, job: dict[str, Any], into: Path) -> int:
    """Download what the job made and hold every file against the manifest; how many there were."""
    client.download(job["id"], into)
    manifest = client.artifacts(job["id"])["manifest"]
    for entry in manifest["files"]:
        with (into / entry["path"]).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                raise Failed(f"{entry['path']} is not what the manifest says")
    return len(manifest["files"])


def quote(source: str, prompt: str, text: str) -> None:
    shown = " ".join(text.split())
    console.print(f"\n[bold]{source}[/]  ", end="")
    console.print(prompt, markup=False)
    console.print(f"  {shown}", style="cyan", markup=False)


def seconds(job: dict[str, Any]) -> float:
    return float(job["finished_at"] - job["started_at"])


def log_of(client: Client, job_id: str) -> str:
    try:
        return client.logs(job_id, tail=30)
    except (ApiError, Unreachable, httpx.TransportError) as error:
        return f"(its log can't be read: {error})"


def as_script(main: Callable[[], object]) -> None:
    """Run an example; it ends non-zero, with the reason, when something isn't as it should be."""
    signal.signal(signal.SIGTERM, _end)
    try:
        main()
    except (Failed, ApiError, Damaged, Unreachable, httpx.HTTPError, subprocess.TimeoutExpired) as error:
        console.print(f"\n[bold red]failed:[/] {type(error).__name__}: ", end="")
        console.print(str(error), markup=False)
        for note in getattr(error, "__notes__", ()):
            console.print(f"\n{note}", markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _end(number: int, frame: object) -> None:
    """SIGTERM ends it as Ctrl-C does, so that the service is stopped in either case."""
    raise KeyboardInterrupt
