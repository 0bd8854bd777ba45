"""The loss of each document by itself, added up batch by batch from what a model makes of rows anyway.

B rows, T tokens, S tokens of this rank, N documents of all rows.
"""

from __future__ import annotations

from typing import Self

import numpy as np
import torch
from torch import Tensor

from engine.batch import IGNORE, Batch
from engine.context import ContextAxis
from engine.data.rows import Array, Rows
from engine.loss import LossParts


class Tally:
    """What is summed over the labels of each document of some rows, as far as this rank has them."""

    def __init__(self, documents_N: Array, first_B: Array, context: ContextAxis, device: torch.device) -> None:
        """`documents_N` are those of the rows, row after row; of the row at place b they begin at `first_B[b]`."""
        self.documents_N, self.context = documents_N, context
        self._first_B = torch.as_tensor(first_B, device=device)
        # One place more: what fills the last row is a document after all others.
        size = len(documents_N) + 1 if len(documents_N) else 0
        self._sums_2N = torch.zeros(2, size, dtype=torch.float64, device=device)

    @classmethod
    def of(cls, rows: Rows, context: ContextAxis, device: torch.device) -> Self:
        """Of all documents of these rows, which come in their order."""
        first_B = np.array([rows.place(row).start for row in range(len(rows))])
        return cls(np.arange(rows.documents), first_B, context, device)

    @property
    def sums(self) -> Tensor:
        """fp64, flat, to be summed over ranks as a loss is: each document's loss, then its labels' weight."""
        return self._sums_2N.flatten()

    def add(self, batch: Batch, parts: LossParts) -> None:
        """Take what the last stage makes of a batch of the rows, all of them under the documents they are of."""
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
