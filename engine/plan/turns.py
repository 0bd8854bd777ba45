"""In which order each rank of a pipeline takes its forward and backward passes: 1F1B, plain and interleaved.

After Narayanan et al. 2021, section 2.2. Chunk c of rank r is virtual stage c * ranks + r: a micro-batch goes through
the ranks once for every chunk. Each rank's order is fixed beforehand, and neighbours' orders agree, so that messages
need no names: what is received next is what was sent next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

TELLING_GROUPS = 4
"""Groups of one size after which what waits has been there before: a pass comes back up to two groups later."""


class Turn(NamedTuple):
    """One pass of one micro-batch through one chunk of this rank."""

    forward: bool
    """False: backward."""
    chunk: int
    """Of this rank's, from 0."""
    micro: int
    """Number of the micro-batch in its step, from 0."""


def turns(*, ranks: int, rank: int, chunks: int, micro_batches: int) -> list[Turn]:
    """All passes of a step on pipeline rank `rank`, for any number of micro-batches.

    The first are forward: enough that the last stage can go backward without waiting. Then forward and backward
    alternate, and what is left is backward.
    """
    order = visits(ranks=ranks, chunks=chunks, micro_batches=micro_batches)
    forward = [Turn(True, chunk, micro) for chunk, micro in order]
    backward = [Turn(False, chunks - 1 - chunk, micro) for chunk, micro in order]
    first = before_backward(ranks=ranks, rank=rank, chunks=chunks, micro_batches=micro_batches)
    alternating = chain.from_iterable(zip_longest(forward[first:], backward[: len(order) - first]))
    return [*forward[:first], *(turn for turn in alternating if turn), *backward[len(order) - first :]]


def before_backward(*, ranks: int, rank: int, chunks: int, micro_batches: int) -> int:
    """Forward passes before forward and backward begin to alternate."""
    first = ranks - rank - 1
    if chunks > 1:
        # Twice as far ahead, for a backward pass has to come back through the chunks as well, a group of micro-batches
        # at a time.
        first = 2 * first + (chunks - 1) * group_size(ranks, micro_batches, 0)
    return min(first, chunks * micro_batches)


def visits(*, ranks: int, chunks: int, micro_batches: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order in which every rank goes forward: a group through a chunk, then the next."""
    runs = passes_through(ranks=ranks, chunks=chunks, micro_batches=micro_batches)
    return [(chunk, micro) for chunk, run in runs for micro in run]


def passes_through(*, ranks: int, chunks: int, micro_batches: int) -> Iterator[tuple[int, range]]:
    """The same, each group of micro-batches in one."""
    start = 0
    for number in range(max(1, micro_batches // ranks)):
        group = range(start, start + group_size(ranks, micro_batches, number))
        yield from ((chunk, group) for chunk in range(chunks))
        start = group.stop


def group_size(ranks: int, micro_batches: int, number: int) -> int:
    """Micro-batches of group `number`, which go through a chunk together; the larger groups come first.

    Each has one for every rank, or more where the paper's multiple of `ranks` is not given: fewer would leave ranks
    idle in every group, not only in the first and last.
    """
    count = max(1, micro_batches // ranks)
    each, more = divmod(micro_batches, count)
    return each + (number < more)


def most_in_flight(
    *, ranks: int, rank: int, chunks: int, micro_batches: int, layers: Sequence[int] | None = None
) -> dict[int, int]:
    """Micro-batches of each chunk that wait for their backward pass on a rank when the most layers do, over all chunks.

    `layers` are those of each chunk; None: as many in each.
    """
    weights = [1] * chunks if layers is None else layers
    ahead = before_backward(ranks=ranks, rank=rank, chunks=chunks, micro_batches=micro_batches)
    # Of groups of one size, a few show all that waits; there are two sizes, and a caller may have any number of groups.
    count = max(1, micro_batches // ranks)
    each, larger = divmod(micro_batches, count)
    sizes = [each + 1] * min(larger, TELLING_GROUPS) + [each] * min(count - larger, TELLING_GROUPS)
    forward = [chunk for size in sizes for chunk in range(chunks) for _ in range(size)]
    weight = heaviest = at = 0
    for number, chunk in enumerate(forward):
        weight += weights[chunk]
        if weight > heaviest:
            heaviest, at = weight, number + 1
        if number >= ahead:
            weight -= weights[chunks - 1 - forward[number - ahead]]
    waiting = dict.fromkeys(range(chunks), 0)
    for chunk in forward[:at]:
        waiting[chunk] += 1
    for chunk in forward[: max(0, at - 1 - ahead)]:
        waiting[chunks - 1 - chunk] -= 1
    return waiting


def room(*, ranks: int, chunks: int, micro_batches: int) -> int:
    """Messages that a neighbour may be behind in receiving, one way, so that no rank waits for itself in the end.

    Where a group is larger than the ranks are many, the surplus goes around before the first rank wants it.
    """
    return 2 + (max(0, group_size(ranks, micro_batches, 0) - ranks) if chunks > 1 else 0)
