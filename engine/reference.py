"""How likely each answer was before training, which DPO compares with: found once, kept with rows and checkpoints.

The model that training starts from says so, adapters being nothing yet, so that no second model is ever held.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from math import ceil
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from engine.batch import Batch
from engine.data.loader import Loader
from engine.data.prepare import Prepared, Report
from engine.data.rows import Array, Rows
from engine.failure import RunFailure
from engine.passes import Passes
from engine.together import together

FILE = "reference.json"


def refer(
    run_dir: Path,
    prepared: Prepared,
    passes: Passes,
    loader_of: Callable[[Rows], Loader],
    report: Report,
    *,
    kept: Path | None = None,
) -> None:
    """Give all rows their `references`. Every rank calls this, before anything is trained or loaded to go on from.

    `kept` is a checkpoint that may have those of these very rows. Raises RunFailure where the model that training
    starts from has none.
    """
    mesh = passes.decoder.mesh
    parts = {"train": prepared.train} | ({} if prepared.validation is None else {"validation": prepared.validation})
    digests = {name: rows.digest() for name, rows in parts.items()}
    with together(mesh):
        found = {} if kept is None else read(kept / FILE, digests)
    for name, rows in parts.items():
        rows.references = found[name] if name in found else compute(rows, passes, loader_of, report)
    with together(mesh):
        if mesh.world_rank == 0:
            write(run_dir / "prepared" / FILE, parts, digests)


def compute(rows: Rows, passes: Passes, loader_of: Callable[[Rows], Loader], report: Report) -> Array:
    """One pass over the rows, shared out as training is."""
    mesh, decoder = passes.decoder.mesh, passes.decoder
    rows.references = np.zeros(rows.documents)
    # On the host, where few numbers travel at little cost. Ranks that share a row's tokens have the same sums.
    log_probs = torch.zeros(rows.documents, dtype=torch.float64)
    counts = mesh.rank("tensor") == 0 and mesh.rank("context") == 0
    decoder.eval()
    for batch, parts in passes.losses(counted(loader_of(rows), report)):
        assert parts.log_probs_BP2 is not None
        assert batch.rows_B is not None
        if counts:
            for row, own in zip(batch.rows_B.tolist(), parts.log_probs_BP2.flatten(1).cpu(), strict=True):
                place = rows.place(row)
                # A rank without rows has a blank one, of no pairs.
                log_probs[place][: len(own)] = own[: place.stop - place.start]
    decoder.train()
    if mesh.parallel.ranks > 1:
        with mesh.exchange():
            dist.all_reduce(log_probs)
    check(rows, log_probs)
    references: Array = log_probs.numpy()
    return references


def counted(loader: Loader, report: Report) -> Iterator[Batch]:
    """This rank's batches, each reported when the next is taken."""
    total = ceil(ceil(len(loader.rows) / loader.data_size) / loader.micro_batch)
    for done, batch in enumerate(loader.sweep(), start=1):
        yield batch
        report("reference", done, total, "batches")


def check(rows: Rows, log_probs: torch.Tensor) -> None:
    """Raise RunFailure, naming a line, where the model gives an answer no probability at all."""
    bad = (~log_probs.isfinite()).nonzero()
    if not len(bad):
        return
    document = int(bad[0])
    row = next(row for row in range(len(rows)) if document < rows.place(row).stop)
    line = rows.origins(row)[document - rows.place(row).start][1]
    raise RunFailure(
        "non_finite_loss",
        f"before training, the model's log-probability of {len(bad)} of {len(log_probs)} answers is not finite, such "
        f"as of one in line {line}",
        "Look at the data there; where it is all answers, the base's weights are not finite.",
    )


def read(path: Path, digests: dict[str, str]) -> dict[str, Array]:
    """What a file has of the very rows that the digests tell."""
    if not path.is_file():
        return {}
    held = json.loads(path.read_text())
    return {
        name: np.array(held[name]["log_probs"])
        for name, digest in digests.items()
        if name in held and held[name]["rows"] == digest
    }


def write(path: Path, parts: dict[str, Rows], digests: dict[str, str]) -> None:
    """Write the rows' references, to the last bit."""
    held = {
        name: {"rows": digests[name], "log_probs": rows.references.tolist()}
        for name, rows in parts.items()
        if rows.references is not None
    }
    path.write_text(json.dumps(held))


def keep(run_dir: Path, folder: Path) -> None:
    """Copy what was found into a folder, such as a checkpoint."""
    shutil.copyfile(run_dir / "prepared" / FILE, folder / FILE)
