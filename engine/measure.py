"""What each layer of a run really keeps for its backward pass, beside what the plan says: `python -m engine measure`.

One micro-batch of made-up tokens, in the run's shapes, goes forward on every rank. Nothing is written, and neither data
nor weights are read: of a base, its `config.json` alone.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from engine import crew, lora, weights
from engine.batch import Batch
from engine.config import ModelShape, Operation, RunConfig
from engine.mesh import Mesh, build
from engine.meter import SHARED, Meter
from engine.model import DTYPES, Decoder
from engine.plan import budget
from engine.plan.recompute import OPERATIONS, Setting, Worth, cost, worth
from engine.standing import standing

MOST_SECONDS = 3600.0
"""One micro-batch forward is a matter of minutes; a rank that takes longer than that hangs."""


@dataclass(frozen=True)
class Measured:
    """Bytes of one layer on one rank."""

    layer: int
    measured: int
    predicted: int

    @property
    def difference(self) -> int:
        return self.measured - self.predicted


@dataclass(frozen=True)
class Report:
    """One rank."""

    rank: int
    operations: list[str]
    """Replayed in each of its layers."""
    layers: list[Measured]
    elsewhere: int
    """Bytes kept before, between and behind the layers, or by several of them."""
    worth: dict[Operation, Worth]
    """Of each operation, for a layer that keeps everything else."""


def main(run_file: Path, *, as_json: bool) -> int:
    """Measure as this rank; with nobody else there, start the ranks that the run asks for. The exit code."""
    run = RunConfig.model_validate_json(run_file.read_bytes())
    if standing().world_size == 1 and run.parallel.ranks > 1:
        # What can't be measured is refused once, and not by every rank.
        ready_shape(run, run_file.absolute().parent)
        return start(run_file, ranks=run.parallel.ranks, as_json=as_json)
    reports = measure(run, run_file.absolute().parent)
    if standing().world_rank == 0:
        sys.stdout.write(f"{json.dumps([_plain(report) for report in reports]) if as_json else table(reports)}\n")
    return 0


def measure(run: RunConfig, run_dir: Path) -> list[Report]:
    """Every rank's report, in order. All ranks call it together."""
    mesh = build(run.parallel, run.device)
    mine = measured(run, ready_shape(run, run_dir), mesh)
    reports: list[Report | None] = [mine] * run.parallel.ranks
    if run.parallel.ranks > 1:
        dist.all_gather_object(reports, mine)
    mesh.close()
    return [report for report in reports if report is not None]


def ready_shape(run: RunConfig, run_dir: Path) -> ModelShape:
    """The model to measure. Raises ValueError, saying what would work, where it can't run as `run` says."""
    shape = run.model if run.base is None else weights.read_shape(run_dir / run.base)
    assert shape is not None
    run.check_shape(shape)
    budget.replayed_by_rank(run, shape)
    return shape


def measured(run: RunConfig, shape: ModelShape, mesh: Mesh) -> Report:
    """This rank's report."""
    operations = budget.replayed(run, shape, rank=mesh.rank("pipeline"))
    decoder = Decoder(shape, mesh, recompute=operations, dtype=DTYPES[run.training.precision])
    if run.lora is not None:
        lora.adapt(decoder, run.lora, seed=run.training.seed)
    batch = _batch(run, shape, mesh.device)
    with Meter(decoder.parameters(), dict(decoder.model.layers.items())) as meter:
        for chunk, stage in enumerate(decoder.train().stages):
            # What a stage reads of the one before is made up, and needs a gradient as that does.
            before = torch.zeros(
                decoder.hidden_size(batch), dtype=decoder.dtype, device=mesh.device, requires_grad=True
            )
            decoder.run(chunk, batch, None if stage.first else before)
    setting = Setting.of(run, shape)
    layers = []
    for name in decoder.model.layers:
        # Below the first layer nothing learns beside adapters.
        reached = run.lora is None or int(name) > 0
        predicted = cost(replace(setting, reached=reached), operations).saved
        layers.append(Measured(int(name), meter.bytes[name], predicted))
    named = [operation for operation in OPERATIONS if operation in operations]
    return Report(mesh.world_rank, list(named), layers, meter.bytes[SHARED], worth(setting))


def _batch(run: RunConfig, shape: ModelShape, device: torch.device) -> Batch:
    """Rows of two documents where the run packs examples, otherwise of one."""
    rows, tokens = run.training.micro_batch, run.data.seq_len
    ids_BT = torch.arange(rows * tokens, device=device).view(rows, tokens) % shape.vocab_size
    places_T = torch.arange(tokens, device=device)
    documents_BT = None
    if run.data.packing and run.data.format != "text":
        half = tokens // 2
        documents_BT = (places_T >= half).long().expand(rows, -1)
        places_T = torch.where(places_T >= half, places_T - half, places_T)
    return Batch(ids_BT, ids_BT, places_T.expand(rows, -1), documents_BT)


def table(reports: list[Report]) -> str:
    """A line for each layer of each rank, and what each operation would bring in a layer."""
    lines = [f"{'rank':>4} {'layer':>5} {'measured':>15} {'predicted':>15} {'difference':>12}"]
    for report in reports:
        lines += [
            f"{report.rank:>4} {row.layer:>5} {row.measured:>15,} {row.predicted:>15,} {row.difference:>12,}"
            for row in report.layers
        ]
        lines.append(f"{report.rank:>4} {'else':>5} {report.elsewhere:>15,}")
        lines.append(f"rank {report.rank} replays {', '.join(report.operations) or 'nothing'}")
    # Ranks hold equal shares of a layer.
    lines.append(f"{'a layer would':<16} {'free bytes':>15} {'add FLOPs':>20}")
    lines += [f"{name:<16} {each.freed:>15,} {each.flops:>20,}" for name, each in reports[0].worth.items()]
    return "\n".join(lines)


def _plain(report: Report) -> dict[str, object]:
    rows = [{**asdict(row), "difference": row.difference} for row in report.layers]
    return {**asdict(report), "layers": rows}


def start(run_file: Path, *, ranks: int, as_json: bool) -> int:
    """Start every rank on this host and wait for them; rank 0 says what all found. None outlives one that fails."""
    asked = ["measure", str(run_file.absolute()), *(["--json"] if as_json else [])]
    return crew.run(asked, ranks=ranks, seconds=MOST_SECONDS)
