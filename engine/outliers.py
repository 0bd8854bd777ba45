"""Which training documents are learned worst, and which lines they are: what the steps find out in passing.

A document's loss is its labels' mean in the last step that trained on it. How far that lies above the whole step's loss
tells an outlier, since a model finds everything hard in its first steps. No pass over the data is made for it, and no
exchange between ranks: the losses travel with the step's own sums.

B rows, N documents of a step, or of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.context import ContextAxis
from engine.data.loader import Loader
from engine.data.rows import Array
from engine.events import Outlier
from engine.tally import Tally


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
        """The documents whose loss lies furthest above their step's, the furthest first, each by its worst stretch.

        Of a file that is one document in many stretches, as plain text is, no line would tell where to look.
        """
        above_N = np.where(self._step_N > 0, self._loss_N - self._usual_N, 0)
        candidates = (above_N > 0).nonzero()[0]
        if not len(candidates):
            return ()
        files_N, lines_N = self.loader.rows.all_origins()
        for file in np.unique(files_N):
            lines = lines_N[files_N == file]
            if len(lines) > 1 and lines.min() == lines.max():
                candidates = candidates[files_N[candidates] != file]
        named: dict[tuple[int, int], int] = {}
        for document in candidates[np.lexsort((candidates, -above_N[candidates]))]:
            named.setdefault((int(files_N[document]), int(lines_N[document])), int(document))
            if len(named) == self.most:
                break
        return tuple(self._named(document, files) for document in named.values())

    def _named(self, document: int, files: Sequence[Path]) -> Outlier:
        file, line = self.loader.rows.origin(document)
        return Outlier(
            file=str(files[file]),
            line=line,
            loss=float(self._loss_N[document]),
            step=int(self._step_N[document]),
            step_loss=float(self._usual_N[document]),
        )
