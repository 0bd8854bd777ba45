"""Which layers each stage of a pipeline has, so that the stage with most to compute has as little as can be."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace

from engine.config import ModelShape, Parallel
from engine.plan.flops import matrices


@dataclass(frozen=True)
class Stage:
    """A virtual stage: a run of layers, with what stands before the first or after the last of the model."""

    layers: range
    first: bool
    """Has the embedding."""
    last: bool
    """Has the last norm, the output and the loss."""


def stages(shape: ModelShape, parallel: Parallel) -> list[Stage]:
    """All virtual stages in the order in which a token goes through them; number i is on rank i % pipeline.

    Raises ValueError as `Parallel.check` does.
    """
    parallel.check_stages(shape)
    count = parallel.pipeline * parallel.virtual
    sizes = parallel.stages or split(shape.num_layers, parallel, output=output_in_layers(shape))
    starts = [sum(sizes[:number]) for number in range(count + 1)]
    return [
        Stage(range(starts[number], starts[number + 1]), first=number == 0, last=number == count - 1)
        for number in range(count)
    ]


def chunks(shape: ModelShape, parallel: Parallel, *, rank: int) -> list[Stage]:
    """The virtual stages of pipeline rank `rank`, in order."""
    return stages(shape, parallel)[rank :: parallel.pipeline]


def split(num_layers: int, parallel: Parallel, *, output: float) -> tuple[int, ...]:
    """Layers of each virtual stage, where the last also computes as much as `output` layers do.

    Layers are dealt out one at a time to the stage that then has least: with layers all alike no deal has a smaller
    largest stage. Among equals the rank with least takes it, and then the latest, which keeps fewest activations. The
    last stage may be left with the output alone; each other has a layer.
    """
    count = parallel.pipeline * parallel.virtual
    costs = [1.0] * (count - 1) + [output]
    layers = [1] * (count - 1) + [0]
    of_rank = [sum(costs[rank :: parallel.pipeline]) for rank in range(parallel.pipeline)]

    def entry(number: int) -> tuple[float, float, int]:
        return costs[number], of_rank[number % parallel.pipeline], -number

    least = [entry(number) for number in range(count)]
    heapify(least)
    left = num_layers - (count - 1)
    while left:
        number = -least[0][2]
        if least[0] == entry(number):
            layers[number] += 1
            costs[number] += 1
            of_rank[number % parallel.pipeline] += 1
            left -= 1
        # Either way it costs more than it did, its rank's other stages having had their share.
        heapreplace(least, entry(number))
    return tuple(layers)


def output_in_layers(shape: ModelShape) -> float:
    """Work of the output layer, in layers. Looking up embeddings is none; attention's scores are left out, which grow
    with the rows' length: a layer is a little more than what it is taken for."""
    *layers, output = matrices(shape)
    return output.weights / sum(matrix.weights for matrix in layers[: len(shape.family.matrices)])
