"""Commands that take a spec in a file: `submit` makes it a job, `plan` says what it would need."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from api.cli.answers import show_facts, show_json, size
from api.cli.asking import JsonFlag, client
from api.cli.describing import in_line
from api.cli.sending import ready
from api.cli.specs import read_spec
from api.cli.watching import stay
from api.client import Json
from engine.counting import counted

app = typer.Typer()

SpecFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A JobSpec in YAML or JSON; - reads it from the standard input."),
]


@app.command(rich_help_panel="Jobs")
def submit(
    context: typer.Context,
    file: SpecFile,
    watch: Annotated[bool, typer.Option("--watch", help="Stay and watch it.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Submit a job; prints its id.

    Data may be named by a path beside the spec instead of a file's id. Once the spec is found good it is uploaded,
    unless it is there already.
    """
    spec = read_spec(file)
    with client(context) as trainshed:
        job = trainshed.submit(ready(trainshed, spec, quiet=as_json))
        if as_json and not watch:
            show_json(job)
        elif not as_json:
            typer.echo(job["id"])
        if watch:
            stay(trainshed, job, as_json=as_json)


@app.command(rich_help_panel="Jobs")
def plan(context: typer.Context, file: SpecFile, as_json: JsonFlag = False) -> None:
    """Say what a job would be and need, and queue nothing.

    Data named by a path is uploaded to be counted; `submit` then finds it there.
    """
    spec = read_spec(file)
    with client(context) as trainshed:
        planned = trainshed.plan(ready(trainshed, spec, quiet=as_json))
    if as_json:
        show_json(planned)
    else:
        show_facts(facts(planned))


def facts(plan: Json) -> dict[str, object]:
    """The lines that a person reads of a plan."""
    layout, disk, queue = plan["layout"], plan["disk"], plan["queue"]
    memory = plan["bytes_per_rank"]
    axes = [f"{name} {ranks}" for name, ranks in layout["parallel"].items() if _is_an_axis(ranks)]
    parts = sorted(
        ((name, held) for name, held in memory.items() if name != "total" and held), key=lambda part: -part[1]
    )
    return {
        "kind": f"{plan['kind']}, {plan['trainable_parameters']:,} of {plan['parameters']:,} parameters trained",
        "data": "; ".join(map(_data, plan["data"])),
        "steps": f"about {plan['estimated_steps']:,} of {layout['global_batch']:,} rows of {layout['seq_len']:,} "
        f"tokens: {plan['estimated_tokens']:,} tokens, about {plan['estimated_epochs']:.2g} epochs",
        "layout": f"{counted(plan['slots'], 'slot')} ({layout['device']}, "
        f"{layout['precision']})" + (f": {', '.join(axes)}" if axes else ""),
        "passes": f"{layout['micro_batches']:,} of {layout['micro_batch']:,} rows a step",
        "recomputed": ", ".join(layout["recomputed"]),
        "memory": f"{size(memory['total'])} a rank: " + ", ".join(f"{name} {size(held)}" for name, held in parts),
        "compute": f"{plan['flops_per_step']:.3g} FLOPs a step",
        "time": _time(plan["time"]),
        "disk": f"{size(disk['total_bytes'])}: a checkpoint {size(disk['checkpoint_bytes'])}, "
        f"the result {size(disk['result_bytes'])}",
        "starts": queue["reason"] or "at once",
        "in line": in_line(queue) if queue["reason"] else None,
        **{f"layout {number}": _alternative(one) for number, one in enumerate(plan["alternatives"], start=1)},
        **{f"not {number}": why for number, why in enumerate(plan["lost"], start=1)},
    }


def _time(time: Json) -> str:
    if time["step_seconds"] is None:
        return str(time["calibration"])
    parts = sorted(((name, seconds) for name, seconds in time["seconds_by_term"].items()), key=lambda part: -part[1])
    most = ", ".join(f"{name} {seconds:.2g}" for name, seconds in parts[:3] if seconds)
    return (
        f"{time['step_seconds']:.3g} s a step ({most}), {time['tokens_per_second']:,.0f} tokens a second, "
        f"{timedelta(seconds=round(time['eta_seconds']))} in all; rates {time['calibration']}"
    )


def _alternative(one: Json) -> str:
    seconds = {name: taken for name, taken in one["seconds"].items() if name != "total" and taken}
    terms = ", ".join(f"{name} {taken:.2g}" for name, taken in sorted(seconds.items(), key=lambda part: -part[1]))
    return f"{one['words']}: {one['seconds']['total']:.3g} s a step ({terms}), {size(one['bytes_per_rank'])} a rank"


def _is_an_axis(ranks: object) -> bool:
    return isinstance(ranks, int) and not isinstance(ranks, bool) and ranks > 1


def _data(file: Json) -> str:
    report = file["report"]
    found = [f"{report[name]:,} {name}" for name in ("examples", "tokens") if report.get(name)]
    return f"{file['use']} {file['filename']} ({', '.join([*found, size(file['bytes'])])})"
