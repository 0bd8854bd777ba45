"""Which rows a step trains on, as tensors. A pure function of the step's number and of where the run goes on from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil

import numpy as np
import torch

from engine.batch import IGNORE, Batch
from engine.data.prepare import shuffled
from engine.data.rows import Array, Rows


class Loader:
    """Deals the rows out over steps, data ranks and micro-batches; every layout gets the same rows in a step.

    An epoch is an order of all rows drawn from (seed, epoch), and a step takes the next `global_batch` of an endless
    line of epochs. Where there are fewer rows than that, a step is the rows there are.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        data_rank: int = 0,
        data_size: int = 1,
        window: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rows = rows
        self.seed = seed
        self.batch = min(global_batch, len(rows))
        """Rows in a step, over all ranks."""
        self.micro_batch = micro_batch
        self.data_rank = data_rank
        self.data_size = data_size
        self.device = torch.device(device)
        self._pairs = rows.pairs(window)
        self._begun = (0, 0)
        self._epoch = lru_cache(maxsize=2)(lambda epoch: shuffled(len(rows), seed, epoch))
        """The order of an epoch's rows. A step needs two at most, and the next step mostly the same."""

    def go_on(self, *, step: int, rows: int) -> None:
        """The first `step` steps have taken `rows` rows of the line, in batches of whatever size."""
        self._begun = (step, rows)

    def taken(self, step: int) -> int:
        """Rows of the line that the first `step` steps take."""
        begun, rows = self._begun
        return rows + (step - begun) * self.batch

    def steps(self, epochs: float) -> int:
        """Steps, those before included, that `epochs` passes over the rows take; at least one."""
        begun, rows = self._begun
        return max(1, begun + ceil((epochs * len(self.rows) - rows) / self.batch - 1e-9))

    def step(self, step_index: int) -> list[Batch]:
        """This rank's micro-batches of a step, counted from 0. Every rank gets as many, were some without a label."""
        return list(self._deal(self.order(step_index), step_index))

    def tokens(self, step_index: int) -> int:
        """Inputs of the step over all ranks, padding left out."""
        filled = self.rows.filled[self.order(step_index)]
        return int(np.minimum(filled, self.rows.seq_len).sum())

    def pairs(self, step_index: int) -> int:
        """Pairs of tokens of one document, and of one window, in the step over all ranks: what its attention costs."""
        return int(self._pairs[self.order(step_index)].sum())

    def order(self, step_index: int) -> Array:
        """The rows of a step, over all ranks."""
        first, count = self.taken(step_index), len(self.rows)
        places = np.arange(first, first + self.batch)
        return np.concatenate(
            [
                self._epoch(epoch)[places[places // count == epoch] % count]
                for epoch in range(first // count, (first + self.batch - 1) // count + 1)
            ]
        )

    def sweep(self) -> Iterator[Batch]:
        """This rank's share of one pass over all rows, in their order. Every rank gets as many batches."""
        return self._deal(np.arange(len(self.rows)), 0)

    def _deal(self, order: Array, step_index: int) -> Iterator[Batch]:
        share = ceil(len(order) / self.data_size)
        first = self.data_rank * share
        for start in range(0, share, self.micro_batch):
            places = range(first + start, first + min(start + self.micro_batch, share))
            places = range(places.start, min(places.stop, len(order)))
            yield self._batch([int(order[place]) for place in places], list(places) or [0], step_index)

    def _batch(self, rows: Sequence[int], places: Sequence[int], step_index: int) -> Batch:
        """The rows as tensors; without any, one row of padding, so that this rank takes part in the step."""
        full = [self.rows.row(row) for row in rows]
        width = self.rows.width
        if not full:
            blank = torch.full((1, width - 1), self.rows.pad_id)
            tokens_BT, labels_BT = blank, torch.full_like(blank, IGNORE)
            positions_BT, documents_BT = torch.arange(width - 1)[None], None
            num_labels = 0
        else:
            tokens = np.stack([row.tokens for row in full])
            trained = np.stack([row.trained for row in full])[:, 1:]
            num_labels = int(trained.sum())
            labels_BT = torch.from_numpy(np.where(trained, tokens[:, 1:], IGNORE))
            tokens_BT = torch.from_numpy(np.ascontiguousarray(tokens[:, :-1]))
            # A row that is one document, padding after it or not, needs no mask: nothing looks ahead.
            alone = all(row.documents[row.filled - 1] == 0 for row in full)
            documents = np.stack([row.documents for row in full])[:, :-1]
            positions = (
                np.tile(np.arange(width), (len(full), 1)) if alone else np.stack([row.positions for row in full])
            )
            positions_BT = torch.from_numpy(np.ascontiguousarray(positions[:, :-1]))
            documents_BT = None if alone else torch.from_numpy(np.ascontiguousarray(documents))
        batch = Batch(
            tokens_BT=tokens_BT,
            labels_BT=labels_BT,
            positions_BT=positions_BT,
            documents_BT=documents_BT,
            rows_B=torch.tensor(places),
            reference_BP2=self._references(rows),
            num_labels=num_labels,
            step=step_index,
        )
        return batch.to(self.device)

    def _references(self, rows: Sequence[int]) -> torch.Tensor | None:
        """B P 2, as a batch has them; one row of none without any rows."""
        if self.rows.references is None:
            return None
        found = [self.rows.references[self.rows.place(row)] for row in rows] or [np.empty(0)]
        most = max(map(len, found))
        padded = [np.pad(each, (0, most - len(each)), constant_values=np.nan) for each in found]
        return torch.from_numpy(np.stack(padded).reshape(len(found), most // 2, 2))
