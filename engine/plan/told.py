"""What a run needs and takes, in words: `python -m engine plan RUN_JSON`. Reads of a base its `config.json` alone."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from engine.config import ModelShape, RunConfig
from engine.families import shape_of_config
from engine.plan import budget, memory, search
from engine.plan.cluster import Cluster, described, from_facts
from engine.plan.flops import model_flops
from engine.plan.recompute import FP32
from engine.plan.search import Found, Wishes
from engine.plan.time import Layout, Step, Timer


def main(run_file: Path, *, device: str | None, rates: Path | None, memory_gib: float | None, as_json: bool) -> int:
    """Write the plan of a run to stdout; the exit code.

    `device` is one of the table's, `rates` a file of what `calibrate` wrote; without either nothing is said of time.
    Raises ValueError where the run can't be as it says.
    """
    run = RunConfig.model_validate_json(run_file.read_bytes())
    shape = shape_of(run, run_file.absolute().parent)
    run.check_shape(shape)
    cluster = _cluster(run, device, rates, memory_gib)
    told = plan(run, shape, cluster)
    sys.stdout.write(f"{json.dumps(told) if as_json else words(told)}\n")
    return 0


def shape_of(run: RunConfig, run_dir: Path) -> ModelShape:
    """The model that a run trains."""
    if run.model is not None:
        return run.model
    assert run.base is not None, "a run has a shape or a base"
    config = run_dir / run.base / "config.json"
    if not config.is_file():
        raise ValueError(f"base: there is no {config}; put the model's folder there")
    return shape_of_config(json.loads(config.read_bytes()))


def plan(run: RunConfig, shape: ModelShape, cluster: Cluster | None) -> dict[str, Any]:
    """What a run needs; and, on a `cluster`, what it takes and which layouts would be faster."""
    training, parallel = run.training, run.parallel
    step = Step(shape, run.data.seq_len, training.global_batch, training.precision, run.lora)
    tokens = step.tokens
    replayed = budget.replayed(run, shape)
    layout = Layout(parallel, training.micro_batch, replayed)
    needs = max(memory.of_run(run, shape), key=lambda one: one.total)
    trained = memory.parameters(shape) if run.lora is None else memory.adapter_parameters(shape, run.lora)
    told: dict[str, Any] = {
        "layout": search.words(layout),
        "parameters": memory.parameters(shape),
        "trainable_parameters": trained,
        "bytes_per_rank": needs.itemised(),
        "bytes_by_phase": needs.by_phase(),
        "flops_per_step": model_flops(shape, tokens=tokens, pairs=tokens * run.data.seq_len, lora=run.lora),
        "checkpoint_bytes": 3 * FP32 * trained,
        "tokens_per_step": tokens,
    }
    if cluster is None:
        return told
    terms = Timer(step, cluster).terms(layout)
    found = search.search(step, cluster, ranks=parallel.ranks, wishes=Wishes(on_host=run.device == "cpu"))
    return told | {
        "seconds": terms.itemised(),
        "tokens_per_second": tokens / terms.total,
        "eta_seconds": None if training.steps is None else training.steps * terms.total,
        **_found(found),
    }


def words(told: dict[str, Any]) -> str:
    """A plan's lines."""
    held = {name: size for name, size in told["bytes_per_rank"].items() if name != "total" and size}
    lines = [
        f"layout     {told['layout']}",
        f"weights    {told['trainable_parameters']:,} of {told['parameters']:,} trained; a checkpoint takes "
        f"{search.as_size(told['checkpoint_bytes'])}",
        f"memory     {search.as_size(told['bytes_per_rank']['total'])} a rank: "
        + ", ".join(f"{name} {search.as_size(size)}" for name, size in sorted(held.items(), key=lambda part: -part[1])),
        "phases     " + ", ".join(f"{phase} {search.as_size(size)}" for phase, size in told["bytes_by_phase"].items()),
        f"compute    {told['flops_per_step']:.3g} FLOPs a step of {told['tokens_per_step']:,} tokens",
    ]
    if "seconds" not in told:
        return "\n".join([*lines, "time       not calibrated: say --device, or --rates with what `calibrate` wrote"])
    lines.append(f"time       {_seconds(told['seconds'])}; {told['tokens_per_second']:,.0f} tokens a second")
    if told["eta_seconds"] is not None:
        lines.append(f"in all     {timedelta(seconds=round(told['eta_seconds']))}")
    lines += [
        f"best       {one['layout']}: {_seconds(one['seconds'])}, {search.as_size(one['bytes'])} a rank"
        for one in told["best"]
    ]
    lines += [f"not        {why}" for why in told["lost"]]
    return "\n".join(lines)


def _seconds(terms: dict[str, float]) -> str:
    parts = sorted(((name, taken) for name, taken in terms.items() if name != "total"), key=lambda part: -part[1])
    said = ", ".join(f"{name} {taken:.2g}" for name, taken in parts if taken)
    return f"{terms['total']:.3g} s a step ({said})"


def _found(found: Found) -> dict[str, Any]:
    best = [
        {
            "layout": candidate.words,
            "parallel": candidate.layout.parallel.model_dump(mode="json"),
            "seconds": candidate.terms.itemised(),
            "bytes": candidate.memory.total,
        }
        for candidate in found.best
    ]
    return {"best": best, "lost": [loser.why for loser in found.losers]}


def _cluster(run: RunConfig, device: str | None, rates: Path | None, memory_gib: float | None) -> Cluster | None:
    room = None if memory_gib is None else int(memory_gib * 2**30)
    if rates is not None:
        try:
            return from_facts(json.loads(rates.read_text()), memory_bytes=room, node_size=run.parallel.ranks)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{rates} is not what `python -m engine calibrate` writes: {error!r}") from error
    if device is None:
        return None
    cluster = described(device)
    if room is None:
        return cluster
    return replace(cluster, device=replace(cluster.device, memory_bytes=room))
