"""What one forward pass of the model is given. Who fills rows, and with which examples, is `engine.data`'s business."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

IGNORE = -100
"""The label of a position at which nothing is predicted."""


@dataclass(frozen=True)
class Batch:
    """B rows of T tokens, all tensors on one device. Every rank of a data replica holds the same batch."""

    tokens_BT: Tensor
    """int64 token ids."""
    labels_BT: Tensor
    """int64 id to predict at that position (already shifted by one); IGNORE where there is none."""
    positions_BT: Tensor
    """int64 position within the document, from 0."""
    documents_BT: Tensor | None = None
    """int64 number of the document within its row; attention never crosses. None: each row is one document."""
    weights_BT: Tensor | None = None
    """fp32 weight of each label's loss; None: all ones."""
    reference_BP2: Tensor | None = None
    """fp64 log-probability that the model had for the answers of each pair before training, the better one first; NaN
    for those that a row does not have. A row's documents 2p and 2p + 1 are its pair p. None: there are no pairs."""
    rows_B: Tensor | None = None
    """int64 place of each row within the step's global batch, which dropout masks are derived from; None: 0 to B-1."""
    num_labels: int | None = None
    """Labels that are not IGNORE, counted where the batch was made; None: nobody counted."""
    step: int = 0
    """Optimizer step the batch belongs to, which dropout masks are derived from."""

    @property
    def num_terms(self) -> int:
        """What a loss is a mean over: labels, or pairs where there are any."""
        if self.reference_BP2 is None:
            return self.num_labels or 0
        return int((~self.reference_BP2.isnan()).all(-1).sum())

    def at(self, places_S: Tensor) -> Self:
        """Of each row the tokens at `places_S`, int64."""
        chosen: dict[str, Any] = {
            field.name: x.index_select(1, places_S)
            for field in fields(self)
            if isinstance(x := getattr(self, field.name), Tensor) and x.dim() == 2
        }
        return replace(self, **chosen, num_labels=None)

    def row(self, number: int) -> Self:
        """One row alone, as a batch."""
        chosen: dict[str, Any] = {
            field.name: x[number : number + 1]
            for field in fields(self)
            if isinstance(x := getattr(self, field.name), Tensor)
        }
        return replace(self, **chosen, num_labels=None)

    def to(self, device: torch.device) -> Self:
        """The same batch on `device`."""
        moved = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors: dict[str, Any] = {name: x.to(device) for name, x in moved.items() if isinstance(x, Tensor)}
        return replace(self, **tensors)
