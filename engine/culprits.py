"""Which rows give a loss or gradient that is not finite, in a step or a validation, and which lines they were made of.

Found by running the rows again one at a time, so it takes as long as a few steps, or as a validation or two; it
happens once in a long while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from math import isfinite
from pathlib import Path

import torch
import torch.distributed as dist

from engine.batch import IGNORE, Batch
from engine.data.loader import Loader
from engine.failure import RunFailure
from engine.mesh import Mesh
from engine.optimizer import AnyOptimizer
from engine.passes import Passes

MOST_ROWS = 8
"""That a message names."""
MOST_LINES = 8
"""Of each file, for one row."""


class NonFinite(RunFailure):
    """A loss or a gradient is not finite: a step made no update, or a validation tells nothing."""

    def __init__(self, step: int, what: str, rows: str, *, hint: str, weights: bool) -> None:
        super().__init__("non_finite_loss", f"{what} at step {step}; {rows}", hint)
        self.weights = weights
        """Each of several rows gives it, so it is not the data."""


IN_TRAINING = (
    "Where it names lines, look at the data there. Lower training.lr, lengthen training.warmup, or let "
    "training.non_finite skip such steps or roll_back, training.max_recoveries times; weights that are not "
    "finite from the first step on come from the base."
)
IN_VALIDATION = (
    "Where it names lines, correct them or leave them out of the validation data; with training.non_finite set to skip "
    "or roll_back they only cost that validation's loss. Where it is the weights, lower training.lr or lengthen "
    "training.warmup."
)
"""What to do."""


def in_step(
    step_index: int,
    *,
    loss: float,
    norm: float,
    batches: Sequence[Batch],
    loader: Loader,
    files: Sequence[Path],
    passes: Passes,
    optimizer: AnyOptimizer,
) -> NonFinite:
    """What to raise for a step, counted from 0, that has this loss and norm. Every rank calls this together."""
    if isfinite(loss):
        what = f"the gradient's norm is {norm}"
        places = found(batches, lambda row: isfinite(own_norm(row, passes, optimizer)), loader.batch, optimizer.mesh)
    else:
        what = f"the loss is {loss}"
        places = found(batches, lambda row: isfinite(own_loss(row, passes)), loader.batch, optimizer.mesh)
    order = loader.order(step_index)
    rows = in_words(sources([int(order[place]) for place in places], loader, files), found=len(places), of=len(order))
    weights = is_everywhere(len(places), of=len(order))
    return NonFinite(step_index + 1, what, rows, hint=IN_TRAINING, weights=weights)


def in_validation(step: int, *, loss: float, loader: Loader, files: Sequence[Path], passes: Passes) -> NonFinite:
    """What to raise for a validation after `step` with this loss, of all of `loader`. All ranks call it together."""
    count = len(loader.rows)
    mesh = passes.decoder.mesh
    rows = found(loader.sweep(), lambda row: isfinite(own_loss(row, passes)), count, mesh)
    said = in_words(sources(rows, loader, files), found=len(rows), of=count, whose="validation")
    weights = is_everywhere(len(rows), of=count)
    return NonFinite(step, f"the validation loss is {loss}", said, hint=IN_VALIDATION, weights=weights)


def found(batches: Iterable[Batch], is_fine: Callable[[Batch], bool], rows: int, mesh: Mesh) -> list[int]:
    """Places of the rows that are not fine on some rank, of so many `rows` in all batches of all ranks."""
    marks = torch.zeros(rows, dtype=torch.int64)
    each = (turn for batch in batches for turn in turns(batch, mesh))
    for place, row in mesh.stopwatch.whereabouts.through(each):
        if not is_fine(row) and place is not None:
            marks[place] = 1
    if mesh.parallel.ranks > 1:
        with mesh.exchange():
            dist.all_reduce(marks)
    return [int(place) for place in marks.nonzero()]


def turns(batch: Batch, mesh: Mesh) -> list[tuple[int | None, Batch]]:
    """Place and row, one at a time. Replicas that share weights run together: while one has its row, others have none.

    A row without a place has no labels, and nothing that could be wrong with it but the weights.
    """
    own: list[tuple[int | None, Batch]] = []
    # A rank without rows has a blank one to take part with.
    if batch.num_labels:
        assert batch.rows_B is not None
        own = [(place, batch.row(number)) for number, place in enumerate(batch.rows_B.tolist())]
    if not mesh.parallel.is_shared_out:
        return own
    counts = [0] * mesh.size("replicas")
    with mesh.exchange():
        dist.all_gather_object(counts, len(own), group=mesh.group("replicas"))
    like = batch.row(0)
    blank = replace(
        like,
        tokens_BT=torch.zeros_like(like.tokens_BT),
        labels_BT=torch.full_like(like.labels_BT, IGNORE),
        num_labels=0,
    )
    # Context ranks of one replica have the same rows, at the same time.
    return [
        turn
        for replica, count in enumerate(counts[:: mesh.size("context")])
        for turn in (own if replica == mesh.rank("data") else [(None, blank)] * count)
    ]


def own_loss(row: Batch, passes: Passes) -> float:
    """A row's summed loss, on the ranks that have it; 0 on others."""
    return float(passes.evaluate([row])[0])


def own_norm(row: Batch, passes: Passes, optimizer: AnyOptimizer) -> float:
    """L2 norm of what this rank has of a row's gradient."""
    passes.train([row], labels=1)
    return optimizer.drop_gradients()


def sources(rows: Sequence[int], loader: Loader, files: Sequence[Path]) -> list[str]:
    """The lines that the first few of these rows were made of."""
    return [source(loader.rows.origins(row), files) for row in rows[:MOST_ROWS]]


def source(origins: Iterable[tuple[int, int]], files: Sequence[Path]) -> str:
    """The lines that a row was made of."""
    said = []
    for file, group in groupby(sorted(set(origins)), key=lambda origin: origin[0]):
        lines = [str(line) for _, line in group]
        more = f" and {len(lines) - MOST_LINES} more" if len(lines) > MOST_LINES else ""
        said.append(f"{files[file]} {'line' if len(lines) == 1 else 'lines'} {', '.join(lines[:MOST_LINES])}{more}")
    return ", ".join(said)


def is_everywhere(found: int, *, of: int) -> bool:
    """Whether so many rows tell that it is not the rows."""
    return found == of and of > 1


def in_words(sources: Sequence[str], *, found: int, of: int, whose: str = "step") -> str:
    """Which rows they are, of those in the step or the validation."""
    if found == 0:
        return f"no row of the {whose} gives it alone"
    if is_everywhere(found, of=of):
        return f"each of its {of} rows gives it, so it is the weights and not the data"
    more = f"; and {found - len(sources)} rows more" if found > len(sources) else ""
    return f"it comes from {'; '.join(sources)}{more}"
