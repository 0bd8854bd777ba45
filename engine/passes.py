"""A step's micro-batches forward and backward through this rank's stages, in turns with the pipeline's other ranks.

One rank alone is a pipeline of one: then the turns are forward, backward, micro-batch after micro-batch.

B rows, S tokens of this rank, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from engine.batch import Batch
from engine.channel import Channel, Message
from engine.loss import SUMS, LossParts
from engine.model import Decoder
from engine.plan.turns import Turn, room, turns, visits


class Passes:
    """Runs a decoder whose stages are spread over the pipeline axis."""

    def __init__(self, decoder: Decoder) -> None:
        """Every rank of the mesh calls this together, and likewise the methods, with as many micro-batches."""
        self.decoder = decoder
        mesh = decoder.mesh
        self.ranks, self.rank, self.chunks = mesh.size("pipeline"), mesh.rank("pipeline"), len(decoder.stages)
        self.forward, self.backward = Channel(mesh, forward=True), Channel(mesh, forward=False)
        self.whereabouts = mesh.stopwatch.whereabouts

    def train(
        self, batches: Sequence[Batch], *, labels: int, tell: Callable[[Batch, LossParts], None] | None = None
    ) -> Tensor:
        """Leave the gradients of the mean loss over the `labels` of the global batch, or what else it is a mean over.

        Returns the sums that `SUMS` names, over this replica's batches, in fp64: the same on every tensor rank of the
        last stage, and 0 elsewhere. Where the last stage is, `tell` gets each batch with what the model makes of it.
        """
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.decoder.device)
        if not batches:
            return sums
        pipeline = {"ranks": self.ranks, "chunks": self.chunks, "micro_batches": len(batches)}
        behind = room(**pipeline)
        # The mean over all labels of the step, wherever they are: never a mean of means.
        scale = 1 / max(1, labels)
        # Of what was sent on, only its place in the graph is kept: its memory is free once it is sent (Korthikanti et
        # al. 2022, appendix B).
        waiting: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | None]] = {}
        for turn, arrived in self._taken(turns(rank=self.rank, **pipeline), batches):
            if not turn.forward:
                received, sent = waiting.pop((turn.chunk, turn.micro))
                # Under LoRA nothing may learn in a stage.
                if sent is not None:
                    torch.autograd.backward(sent, arrived)
                if received is not None:
                    assert received.grad is not None
                    self.backward.send(received.grad, room=behind)
                continue
            received = None if arrived is None else arrived.requires_grad_()
            output = self.decoder.run(turn.chunk, batches[turn.micro], received, scale=scale)
            if isinstance(output, LossParts):
                sums += output.sums()
                if tell is not None:
                    tell(batches[turn.micro], output)
                output = output.loss_sum * scale
            else:
                self.forward.send(output.detach(), room=behind)
            waiting[turn.chunk, turn.micro] = received, get_gradient_edge(output) if output.requires_grad else None
            del arrived, received, output
        self.forward.finish()
        self.backward.finish()
        return sums

    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """The sums that `SUMS` names over all batches, in fp64; 0 where `train` has 0."""
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.decoder.device)
        for _, parts in self.losses(batches):
            sums += parts.sums()
        return sums

    @torch.no_grad()
    def losses(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, LossParts]]:
        """Each batch with what the model makes of it, on ranks of the last stage; nothing on others. No gradients."""
        batches = iter(batches)
        while group := list(islice(batches, self.ranks)):
            order = [
                Turn(True, chunk, micro)
                for chunk, micro in visits(ranks=self.ranks, chunks=self.chunks, micro_batches=len(group))
            ]
            for turn, arrived in self._taken(order, group):
                output = self.decoder.run(turn.chunk, group[turn.micro], arrived)
                if not isinstance(output, LossParts):
                    self.forward.send(output, room=2)
                else:
                    yield group[turn.micro], output
        self.forward.finish()

    def over_ranks(self, sums: Tensor, own: Sequence[float] = ()) -> tuple[list[float], list[float]]:
        """Sums over labels (fp64), wherever those are, and those of numbers that each rank has of its own."""
        mesh = self.decoder.mesh
        # Of ranks that share a model, those of the last stage have the loss, each tensor rank the same.
        counts = mesh.rank("tensor") == 0 and self.rank == self.ranks - 1
        both = torch.cat([sums if counts else torch.zeros_like(sums), sums.new_tensor(own)])
        with mesh.exchange():
            if mesh.parallel.ranks > 1:
                dist.all_reduce(both)
            summed = both.tolist()
        return summed[: len(sums)], summed[len(sums) :]

    def _taken(self, order: Sequence[Turn], batches: Sequence[Batch]) -> Iterator[tuple[Turn, Tensor | None]]:
        """Each turn with what it needs from a neighbour, which travels during the turn before."""
        expected = self._expect(order[0], batches)
        for number, turn in enumerate(order):
            arriving, expected = expected, None
            if number + 1 < len(order):
                expected = self._expect(order[number + 1], batches)
            self.whereabouts.go_on()
            yield turn, None if arriving is None else arriving.wait()

    def _expect(self, turn: Turn, batches: Sequence[Batch]) -> Message | None:
        """Begin to receive what a turn needs; None where it needs nothing."""
        stage = self.decoder.stages[turn.chunk]
        if stage.first if turn.forward else stage.last:
            return None
        channel = self.forward if turn.forward else self.backward
        return channel.receive(self.decoder.hidden_size(batches[turn.micro]), self.decoder.dtype)
