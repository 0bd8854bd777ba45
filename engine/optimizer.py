"""AdamW over flat buffers, with its state shared out among replicas (ZeRO-1, Rajbhandari et al. 2020).

Weights are views into one buffer in the model's dtype; gradients are summed up in fp32; masters and moments are fp32
and each replica keeps its share. One step is: sum gradients (reduce-scatter), norm, update the share, gather weights.
On a CPU, a large gradient that is added to no other stays where and as autograd made it: its place in the buffer is
never touched, and so takes no memory.

All buffers have one layout: N elements, of which a replica owns the share S. A parameter is a *slot* of N; slots of
one kind lie side by side, so that what is done to a kind is done to few large runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby, pairwise
from math import isfinite, prod
from operator import mul
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from engine.cached import WIDENED, widened
from engine.comm import all_gather_flat, reduce_scatter_flat
from engine.config import Training
from engine.gather import merged
from engine.landing import Landing, land
from engine.mesh import ENDS, Mesh
from engine.pieces import Rectangle, cover, globally, without_padding
from engine.placement import Placement, placement_of

ALIGNMENT = 16
"""Elements; a slot begins on a cache line in fp32."""
NORM_CHUNK = 1 << 12
"""Elements whose squares are summed in fp32; the sums are in fp64. More would cost digits that layouts differ in."""
WORTH = 2**18
"""Elements from which a gradient is kept as it came; to widen smaller ones each by itself costs more than it frees."""


@dataclass(frozen=True)
class Kind:
    """What is done alike to a parameter's gradient and weight."""

    decays: bool
    """Matrices decay, norms and biases do not."""
    partial: str
    """The group over which its gradient must be summed; empty: it is whole."""
    is_replicated: bool
    """Each tensor rank holds the whole of it."""
    copy: int
    """Number of this rank among those of one replica that hold the same; the first counts, and is saved."""

    @property
    def follows(self) -> bool:
        """The weight is the first end's of the pipeline, and what the optimizer has of it here means nothing.

        At another place of the buffers, many replicas' gradients are added up in another order: updated apart, the two
        would drift from one another.
        """
        return self.partial == ENDS and self.copy > 0


@dataclass(frozen=True)
class Held:
    """A trainable parameter of this rank's model."""

    name: str
    parameter: Parameter
    placement: Placement
    kind: Kind


@dataclass(frozen=True)
class Slot(Held):
    """A parameter's run of the flat buffers."""

    start: int
    shape: tuple[int, ...]
    """Of the local tensor, padding included."""

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()


@dataclass(frozen=True)
class Run:
    """A stretch of the flat buffers with slots of one kind."""

    kind: Kind
    start: int
    stop: int

    def within(self, own: slice) -> slice:
        """The part of this run that `own` covers, in indices of `own`."""
        start = max(self.start, own.start) - own.start
        return slice(start, max(start, min(self.stop, own.stop) - own.start))


@dataclass(frozen=True)
class Piece:
    """A box of a global parameter, with the part of each state that belongs to it as a view of this rank's buffers."""

    parameter: str
    box: Rectangle
    tensors: dict[str, Tensor]
    is_kept: bool
    """This rank is the one that saves it, where several hold the same."""


class Fillable(Protocol):
    """What a checkpoint is loaded into."""

    mesh: Mesh
    steps: int
    """Updates done since the moments were zero."""
    shapes: dict[str, list[int]]
    """Global shape of every trainable parameter, of all stages."""

    def publish(self) -> None:
        """Let every rank's weights follow from the masters, which were filled from outside."""

    def pieces(self) -> Iterator[Piece]:
        """The boxes of global parameters that this rank has a share in, padding left out."""


class AnyOptimizer(Fillable, Protocol):
    """What a run and its checkpoints need of an optimizer, however its state is laid out."""

    @property
    def slots(self) -> Sequence[Held]:
        """Every trainable parameter of this rank's model, whether or not this rank has a share of it."""

    def sum_gradients(self) -> float:
        """Sum this step's gradients over all ranks that hold a part, and return their global L2 norm."""

    def update(self, *, lr: float, norm: float) -> None:
        """Clip by `norm`, which `sum_gradients` found, update this rank's share, and give every rank the weights."""

    def drop_gradients(self) -> float:
        """Forget the gradients that have come since the last step; the L2 norm of what this rank had of them."""

    def restart(self, weights: Mapping[str, Tensor]) -> None:
        """Begin anew from these weights of this rank's model: no moments, no updates."""


class Optimizer:
    """Owns the buffers behind a model's trainable parameters, and updates them."""

    def __init__(
        self, parameters: Iterable[tuple[str, Parameter]], mesh: Mesh, *, training: Training, shard: bool
    ) -> None:
        """Move the parameters that require gradients into flat buffers. All have one dtype and carry a placement.

        A pipeline's stages call this together; under LoRA one may have nothing to train.
        """
        self.mesh = mesh
        self.training = training
        self.steps = 0
        """Updates done since the moments were zero."""
        self.group = mesh.group("replicas")
        self.shards = mesh.size("replicas") if shard else 1
        self.slots, self.runs, size = lay_out(parameters, multiple=self.shards * ALIGNMENT)
        dtypes = {slot.parameter.dtype for slot in self.slots}
        dtype = dtypes.pop() if dtypes else torch.float32
        assert not dtypes, "parameters of several types"
        share = size // self.shards
        rank = mesh.rank("replicas") if shard else 0
        self.own = slice(rank * share, (rank + 1) * share)
        self.weights_N = torch.zeros(size, dtype=dtype, device=mesh.device)
        self.gradients_N = torch.empty(size, dtype=torch.float32, device=mesh.device)
        # What lies behind slots is summed with them.
        ends, starts = [0, *(slot.stop for slot in self.slots)], [*(slot.start for slot in self.slots), size]
        for end, start in zip(ends, starts, strict=True):
            self.gradients_N[end:start].zero_()
        self.shapes = merged(mesh, {slot.name: list(slot.placement.shape) for slot in self.slots})
        """Global shape of every trainable parameter, of all stages."""
        self._landings = [self._adopt(slot) for slot in self.slots]
        self.weights_S = self.weights_N[self.own]
        # In fp32 the weights are their own masters.
        self.masters_S = self.weights_S.float()
        self.averages_S = torch.zeros_like(self.masters_S)
        self.squares_S = torch.zeros_like(self.masters_S)
        self.gradients_S = torch.empty_like(self.masters_S) if self.shards > 1 else self.gradients_N
        self._whole: list[tuple[Slot, Tensor]] = []
        """Gradients that are not in the buffer, from when they are summed until they are used."""

    def _adopt(self, slot: Slot) -> Landing:
        """Let the buffers hold the slot's weight, and its gradient."""
        weight = self.weights_N[slot.start : slot.stop].view(slot.shape)
        weight.copy_(slot.parameter.detach())
        slot.parameter.data = weight
        # A GPU would launch a lot for each.
        is_worth = self.mesh.device.type == "cpu" and slot.parameter.numel() >= WORTH
        keeps = is_worth and self.group is None and self.mesh.group(slot.kind.partial) is None
        landing = Landing(self.gradients_N[slot.start : slot.stop].view(slot.shape), keeps=keeps)
        land(slot.parameter, landing)
        return landing

    def sum_gradients(self) -> float:
        """Sum this step's gradients over all ranks that hold a part, and return their global L2 norm."""
        taken = zip(self.slots, [landing.taken() for landing in self._landings], strict=True)
        self._whole = [(slot, whole) for slot, whole in taken if whole is not None]
        with self.mesh.exchange():
            for run in self.runs:
                if (group := self.mesh.group(run.kind.partial)) is not None:
                    dist.all_reduce(self.gradients_N[run.start : run.stop], group=group)
            if self.shards > 1:
                reduce_scatter_flat(self.gradients_S, self.gradients_N, group=self.group)
            elif self.group is not None:
                dist.all_reduce(self.gradients_N, group=self.group)
        norm = self._norm()
        if not isfinite(norm):
            # Nobody can use them, and the next ones need their room.
            self._whole = []
        return norm

    def drop_gradients(self) -> float:
        """Forget the gradients that have come since the last step; the L2 norm of what this rank had of them."""
        self._whole = []
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for landing in self._landings:
            if landing.is_used:
                whole = landing.taken()
                total += square_sum(landing.total if whole is None else whole)
        return float(total.sqrt())

    @torch.no_grad()
    def restart(self, weights: Mapping[str, Tensor]) -> None:
        """Begin anew from these weights of this rank's model: no moments, no updates."""
        for slot in self.slots:
            slot.parameter.copy_(weights[slot.name])
        self.masters_S.copy_(self.weights_S)
        self.averages_S.zero_()
        self.squares_S.zero_()
        self.steps = 0

    def _norm(self) -> float:
        """L2 norm of the global gradient: shares are added up, and what several ranks hold counts once."""
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for run in self.runs:
            if run.kind.copy > 0:
                continue
            for _, gradients in self._gradients(run):
                for gradient in gradients:
                    total += square_sum(gradient)
        return norm_over(self.mesh, total, "model", *(["replicas"] if self.shards > 1 else []))

    def update(self, *, lr: float, norm: float) -> None:
        """Clip by `norm`, which `sum_gradients` found, update this rank's share, and give every rank the weights."""
        assert isfinite(norm), "the caller stops at a gradient that is not finite"
        for (decays, follows), runs in groupby(self.runs, key=lambda run: (run.kind.decays, run.kind.follows)):
            if follows:
                continue
            of_a_kind = list(runs)
            for here, gradient in self._wide(Run(of_a_kind[0].kind, of_a_kind[0].start, of_a_kind[-1].stop)):
                move(
                    [self.masters_S[here]],
                    [gradient],
                    [self.averages_S[here]],
                    [self.squares_S[here]],
                    steps=self.steps,
                    lr=lr,
                    norm=norm,
                    decays=decays,
                    training=self.training,
                )
                # While a core's cache has them.
                self._round(here)
        self.steps += 1
        self._whole = []
        self._spread()

    def _gradients(self, run: Run) -> Iterator[tuple[slice, list[Tensor]]]:
        """What this replica has of a run's gradient, in stretches of the share: one of the buffer, or side by side what
        stayed as it came."""
        own = run.within(self.own)
        start = own.start
        for side_by_side in adjoining([kept for kept in self._whole if run.start <= kept[0].start < run.stop]):
            begin, end = side_by_side[0][0].start, side_by_side[-1][0].stop
            if start < begin:
                yield slice(start, begin), [self.gradients_S[start:begin]]
            yield slice(begin, end), [whole for _, whole in side_by_side]
            start = aligned(end)
        if start < own.stop:
            yield slice(start, own.stop), [self.gradients_S[start : own.stop]]

    def _wide(self, run: Run) -> Iterator[tuple[slice, Tensor]]:
        """The same in fp32, in stretches that are good until the next one."""
        for there, gradients in self._gradients(run):
            for first, wide_K in widened(gradients):
                yield slice(there.start + first, there.start + first + wide_K.shape[0]), wide_K

    def publish(self) -> None:
        """Round the masters to the weights, and gather every rank's share of them; ends take the first one's."""
        self._round(slice(None))
        self._spread()

    def _round(self, here: slice) -> None:
        """Make weights of these masters."""
        if self.weights_S.data_ptr() != self.masters_S.data_ptr():
            self.weights_S[here].copy_(self.masters_S[here])

    def _spread(self) -> None:
        """Gather every replica's share of the weights; ends take the first one's."""
        if self.shards > 1:
            with self.mesh.exchange():
                all_gather_flat(self.weights_N, self.weights_S, group=self.group)
        for run in self.runs:
            if run.kind.partial == ENDS:
                with self.mesh.exchange():
                    dist.broadcast(self.weights_N[run.start : run.stop], group=self.mesh.group(ENDS), group_src=0)

    def pieces(self) -> Iterator[Piece]:
        """What this rank's share holds of each global parameter, cut into at most three boxes; padding left out."""
        states = {"weight": self.masters_S, "average": self.averages_S, "square": self.squares_S}
        for slot in self.slots:
            start, stop = max(slot.start, self.own.start), min(slot.stop, self.own.stop)
            if start >= stop or slot.kind.follows:
                continue
            for part in cover(slot.shape, start - slot.start, stop - slot.start):
                true = without_padding(part, slot.placement)
                if true is None:
                    continue
                at = slot.start - self.own.start + sum(map(mul, part.offset, strides_of(slot.shape)))
                run = slice(at, at + prod(part.size))
                tensors = {key: state[run].view(part.size)[true.within(part)] for key, state in states.items()}
                yield Piece(slot.name, globally(true, slot.placement), tensors, self._keeps(slot.kind))

    def _keeps(self, kind: Kind) -> bool:
        """Whether this rank is the one to save a share of `kind`, which others may hold as well."""
        return kind.copy == 0 and (self.shards > 1 or self.mesh.rank("replicas") == 0)


def norm_over(mesh: Mesh, squares: Tensor, *groups: str) -> float:
    """The root of each rank's sum of squares, an fp64 scalar, added up over the groups one after another, in place."""
    with mesh.exchange():
        for name in groups:
            if (group := mesh.group(name)) is not None:
                dist.all_reduce(squares, group=group)
        # Here a host that is ahead of its device waits for it, and so for the other ranks.
        return float(squares.sqrt())


def adjoining(kept: Sequence[tuple[Slot, Tensor]]) -> Iterator[list[tuple[Slot, Tensor]]]:
    """The same in groups of slots, each of which begins where the one before ends."""
    begins = [0, *(at for at in range(1, len(kept)) if kept[at - 1][0].stop != kept[at][0].start), len(kept)]
    yield from (list(kept[begin:end]) for begin, end in pairwise(begins) if begin < end)


def square_sum(x: Tensor) -> Tensor:
    """fp64 scalar: sum of the squares of a tensor of any type."""
    x_N = x.reshape(-1)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    # Of another type than fp32 a CPU makes a copy in that, so it is given a part at a time.
    makes_copy = x_N.device.type == "cpu" and x_N.dtype != torch.float32
    for some_N in torch.split(x_N, WIDENED) if makes_copy else [x_N]:
        size = some_N.shape[0]
        whole = size // NORM_CHUNK * NORM_CHUNK
        norms = torch.linalg.vector_norm(some_N[:whole].view(-1, NORM_CHUNK), dim=1, dtype=torch.float32)
        total += norms.double().square().sum()
        if whole < size:
            total += torch.linalg.vector_norm(some_N[whole:], dtype=torch.float32).double().square()
    return total


def move(
    masters: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    *,
    steps: int,
    lr: float,
    norm: float,
    decays: bool,
    training: Training,
) -> None:
    """AdamW's update number `steps` + 1 of these masters, in one pass, after clipping the global `norm`.

    The gradients are not to be used afterwards.
    """
    clip, (beta1, beta2) = training.clip, training.betas
    # Divides as torch.nn.utils.clip_grad_norm_ does; the kernel does so in its one pass.
    excess = None if clip is None or norm + 1e-6 <= clip else masters[0].new_tensor((norm + 1e-6) / clip)
    adamw(
        masters,
        gradients,
        averages,
        squares,
        [],
        # Counted up in place, each by itself.
        list(masters[0].new_full((len(masters),), float(steps)).unbind()),
        fused=True,
        grad_scale=excess,
        amsgrad=False,
        maximize=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=training.weight_decay if decays else 0.0,
        eps=training.eps,
    )


def lay_out(parameters: Iterable[tuple[str, Parameter]], *, multiple: int) -> tuple[list[Slot], list[Run], int]:
    """Slots for every trainable parameter, the runs of each kind, and the buffers' size: a multiple of `multiple`."""
    trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    kinds = {name: kind_of(parameter) for name, parameter in trainable}
    # A kind's copy, its last field, follows from the others on one rank and differs between ranks whose order must not.
    order = sorted(trainable, key=lambda item: astuple(kinds[item[0]])[:-1])
    slots: list[Slot] = []
    runs: list[Run] = []
    end = 0
    for kind, members in groupby(order, key=lambda item: kinds[item[0]]):
        start = end
        for name, parameter in members:
            slots.append(Slot(name, parameter, placement_of(parameter), kind, end, tuple(parameter.shape)))
            end = aligned(end + parameter.numel())
        runs.append(Run(kind, start, end))
    return slots, runs, max(1, -(-end // multiple)) * multiple


def aligned(end: int) -> int:
    """Where the next slot begins."""
    return -(-end // ALIGNMENT) * ALIGNMENT


def kind_of(parameter: Parameter) -> Kind:
    """What is done to `parameter`, from its placement."""
    placement = placement_of(parameter)
    return Kind(len(placement.shape) > 1, placement.partial or "", placement.dim is None, placement.copy)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Steps along each dim in a row-major buffer."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
