"""A decoder's weights as a checkpoint fills them where nothing is trained: without masters, gradients and moments."""

from __future__ import annotations

from collections.abc import Iterator

from engine.gather import merged
from engine.model import Decoder
from engine.optimizer import Piece
from engine.pieces import Rectangle, globally, without_padding
from engine.placement import placement_of


class Restored:
    """The weights that were trained, each rank's own piece of them. A pipeline's stages make it together."""

    def __init__(self, decoder: Decoder) -> None:
        self.mesh = decoder.mesh
        self.steps = 0
        self._trained = [(name, each) for name, each in decoder.named_parameters() if each.requires_grad]
        self.shapes = merged(self.mesh, {name: list(placement_of(each).shape) for name, each in self._trained})

    def pieces(self) -> Iterator[Piece]:
        """The boxes of global parameters that this rank has, also where others have them too."""
        for name, parameter in self._trained:
            placement = placement_of(parameter)
            local = Rectangle((0,) * parameter.ndim, tuple(parameter.shape))
            if (true := without_padding(local, placement)) is not None:
                weight = parameter.detach()[true.within(local)]
                yield Piece(name, globally(true, placement), {"weight": weight}, is_kept=False)

    def publish(self) -> None:
        """Every rank has read its own."""
