"""Which training documents are learned worst, and which lines they are: what the steps find out in passing.

A document's loss is its labels' mean in the last step that trained on it. How far that lies above the whole step's loss
tells an outlier, since a model finds everything hard in its first steps. No pass over the data is made for it, and no
exchange between ranks: the losses travel with the step's own sums.

B rows, T tokens, S tokens of this rank, N documents of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.batch import IGNORE, Batch
from engine.context import ContextAxis
from engine.data.loader import Loader
from engine.data.rows import Array
from engine.events import Outlier
from engine.loss import LossParts


class Tally:
    """Sums over the labels of each document of a step, as far as this rank has them."""

    def __init__(self, documents_N: Array, first_B: Array, context: ContextAxis, device: torch.device) -> None:
        """`documents_N` are the step's, row after row; those of the row at place b begin at `first_B[b]`."""
        self.documents_N, self.context = documents_N, context
        self._first_B = torch.as_tensor(first_B, device=device)
        # One place more: what fills the last row is a document after all others.
        size = len(documents_N) + 1 if len(documents_N) else 0
        self._sums_2N = torch.zeros(2, size, dtype=torch.float64, device=device)

    @property
    def sums(self) -> Tensor:
        """fp64, flat, to be summed over ranks as the step's loss is: each document's loss, then its labels' weight."""
        return self._sums_2N.flatten()

    def add(self, batch: Batch, parts: LossParts) -> None:
        """Take what the last stage makes of one of the step's batches, all of them under the documents they are of."""
        if parts.losses_BS is None or not len(self.documents_N):
            return
        if self.context.size > 1:
            batch = batch.at(self.context.places(batch.tokens_BT.shape[1], batch.tokens_BT.device))
        assert batch.rows_B is not None
        of_BS = self._first_B[batch.rows_B][:, None].expand_as(batch.labels_BT)
        if batch.documents_BT is not None:
            of_BS = of_BS + batch.documents_BT
        weights_BS = (batch.labels_BT != IGNORE).double()
        if batch.weights_BT is not None:
            weights_BS *= batch.weights_BT
        values = torch.stack([parts.losses_BS.double().flatten(), weights_BS.flatten()])
        self._sums_2N.index_add_(1, of_BS.flatten(), values)


class Outliers:
    """Of each document what its last step found; 12 bytes a document where it is kept."""

    def __init__(self, loader: Loader, context: ContextAxis, *, most: int) -> None:
        """`most` are named in the end; 0 watches nothing."""
        self.loader, self.context, self.most = loader, context, most
        count = loader.rows.documents if most else 0
        # Memory is taken page by page, by who notes something: rank 0.
        self._step_N: Array = np.zeros(count, dtype=np.int32)
        self._loss_N: Array = np.zeros(count, dtype=np.float32)
        self._usual_N: Array = np.zeros(count, dtype=np.float32)
        self.since_step = 0
        """The first step noted; 0: none yet."""

    def tally(self, step_index: int) -> Tally:
        """Where to add up a step, counted from 0."""
        places = [self.loader.rows.place(int(row)) for row in (self.loader.order(step_index) if self.most else ())]
        first_B = np.cumsum([0, *(place.stop - place.start for place in places)])
        documents_N = np.concatenate([np.arange(0), *(np.arange(place.start, place.stop) for place in places)])
        return Tally(documents_N, first_B, self.context, self.loader.device)

    def note(self, step: int, tally: Tally, sums: Sequence[float], *, loss: float) -> None:
        """Take the sums over all ranks of what was tallied in a step that had this loss."""
        if not len(tally.documents_N):
            return
        losses_N, weights_N = np.array(sums).reshape(2, -1)[:, :-1]
        learned_N = weights_N > 0
        if not learned_N.any():
            return
        documents = tally.documents_N[learned_N]
        self.since_step = self.since_step or step
        self._step_N[documents] = step
        self._loss_N[documents] = losses_N[learned_N] / weights_N[learned_N]
        self._usual_N[documents] = loss

    def worst(self, files: Sequence[Path]) -> tuple[Outlier, ...]:
        """The documents whose loss lies furthest above their step's, the furthest first."""
        above_N = np.where(self._step_N > 0, self._loss_N - self._usual_N, 0)
        candidates = above_N.nonzero()[0]
        order = candidates[np.lexsort((candidates, -above_N[candidates]))]
        return tuple(self._named(int(document), files) for document in order[: self.most] if above_N[document] > 0)

    def _named(self, document: int, files: Sequence[Path]) -> Outlier:
        file, line = self.loader.rows.origin(document)
        return Outlier(
            file=str(files[file]),
            line=line,
            loss=float(self._loss_N[document]),
            step=int(self._step_N[document]),
            step_loss=float(self._usual_N[document]),
        )
