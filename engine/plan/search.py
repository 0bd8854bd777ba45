"""Which layout of a step is fastest among those that fit, and why the others lost.

Layouts are looked at in the order of their time, which is cheap to tell, so that few need their bytes counted. What a
layout takes is `engine.plan.time`'s and `engine.plan.memory`'s business.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import inf

from engine.config import ModelShape, Operation, Parallel, Recompute
from engine.plan import budget, memory
from engine.plan.cluster import Cluster
from engine.plan.memory import Memory
from engine.plan.recompute import ELEMENTS, FP32, Setting, cost
from engine.plan.time import Layout, Step, Terms, Timer

BEST = 5
"""Layouts that are told of."""
MOST_VIRTUAL = 8
LARGEST_MICRO_BATCH = 32
REFUSALS = 200
"""Layouts refused for their bytes after which a search looks no further without having found any."""

Levels = tuple[frozenset[Operation], ...]
"""What may be replayed, cheapest first."""


@dataclass(frozen=True)
class Wishes:
    """What a search may choose, and what is settled. None: whatever is best."""

    recompute: Recompute | None = None
    micro_batch: int | None = None
    largest_micro_batch: int = LARGEST_MICRO_BATCH
    fixed: Mapping[str, int | bool] = field(default_factory=dict)
    """Fields of the layout's `Parallel` that have this value."""
    on_host: bool = False
    """The ranks train on CPUs, see `memory.estimate`."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    layout: Layout
    terms: Terms
    memory: Memory

    @property
    def words(self) -> str:
        """Its axes, as they are said in a spec."""
        return words(self.layout)


@dataclass(frozen=True)
class Loser:
    """A layout that somebody might have expected, and why it is not the one."""

    layout: Layout
    why: str


@dataclass(frozen=True)
class Found:
    """The outcome of a search."""

    best: tuple[Candidate, ...]
    """Fastest first; empty where nothing fits."""
    losers: tuple[Loser, ...]
    considered: int
    """Layouts that the model, the rows and the batch allow."""


def words(layout: Layout) -> str:
    """A layout in short: its axes of more than one rank, rows of a pass, and what is replayed."""
    parallel = layout.parallel
    axes = [f"{axis}={size}" for axis in ("tensor", "pipeline", "virtual", "context", "data")
            if (size := getattr(parallel, axis)) > 1]  # fmt: skip
    shares = [name for name in ("shard_weights", "shard_gradients") if getattr(parallel, name)]
    parts = [*axes, *shares[:1], f"micro_batch={layout.micro_batch}"]
    if layout.replayed:
        parts.append("recompute=" + ("full" if "layer" in layout.replayed else "+".join(sorted(layout.replayed))))
    return " ".join(parts)


def search(step: Step, cluster: Cluster, *, ranks: int, wishes: Wishes | None = None, explain: bool = True) -> Found:
    """The best layouts of `step` over `ranks` devices of `cluster`, and what became of those that come to mind.

    Each is one that `Parallel.check` and `Training.check` accept. Unless it is to `explain`, losers are told only where
    nothing fits. Raises ValueError where the device's rate is unknown,
    or where no layout is valid, with what would be.
    """
    looking = _Search(step, cluster, ranks, wishes or Wishes())
    return looking.found(explain=explain)


@dataclass
class _Search:
    step: Step
    cluster: Cluster
    ranks: int
    wishes: Wishes
    timer: Timer = field(init=False)
    _needs: dict[Layout, Memory] = field(default_factory=dict)
    _worthwhile: dict[tuple[int, bool, int, int], list[frozenset[Operation]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.timer = Timer(self.step, self.cluster)

    def found(self, *, explain: bool) -> Found:
        layouts = list(self.layouts())
        if not layouts:
            raise ValueError(self._nothing_is_valid())
        best, refused = self._best(layouts)
        best = tuple(sorted(map(self._refined, best), key=lambda candidate: candidate.terms.total))
        losers = self._losers(layouts, best, refused) if explain or not best else ()
        return Found(best, losers, considered=len(layouts))

    # What there is

    def layouts(self) -> Iterator[Layout]:
        """Every valid one, each replaying least."""
        least = self.levels[0]
        fixed = self.wishes.fixed.items()
        for parallel in self._parallels():
            if any(getattr(parallel, name) != value for name, value in fixed):
                continue
            share = self.step.global_batch // parallel.data
            for size in self._micro_batches(share, parallel):
                yield Layout(parallel, size, least)

    def _parallels(self) -> Iterator[Parallel]:
        step, layers = self.step, self.step.shape.num_layers
        for tensor in divisors(self.ranks):
            if not _valid(Parallel(tensor=tensor), step):
                continue
            for pipeline in divisors(self.ranks // tensor):
                if pipeline > layers:
                    break
                for context in divisors(self.ranks // tensor // pipeline):
                    data = self.ranks // tensor // pipeline // context
                    if step.global_batch % data:
                        continue
                    axes = {"tensor": tensor, "pipeline": pipeline, "context": context, "data": data}
                    plain = Parallel(**axes)
                    if tensor > 1 and _valid(with_sequence := plain.model_copy(update={"sequence": True}), step):
                        plain = with_sequence
                    elif context > 1 and not _valid(plain, step):
                        continue
                    yield plain
                    for virtual in self._virtuals(pipeline):
                        yield plain.model_copy(update={"virtual": virtual})
                    if pipeline == 1 and data * context > 1:
                        yield plain.model_copy(update={"shard_gradients": True})
                        yield plain.model_copy(update={"shard_gradients": True, "shard_weights": True})

    def _virtuals(self, pipeline: int) -> list[int]:
        """Stages a rank besides one: as many as leave all with the same layers."""
        if pipeline == 1:
            return []
        layers = self.step.shape.num_layers
        most = min(MOST_VIRTUAL, layers // pipeline)
        return [virtual for virtual in range(2, most + 1) if layers % (pipeline * virtual) == 0]

    def _micro_batches(self, share: int, parallel: Parallel) -> list[int]:
        if self.wishes.micro_batch is not None:
            return [self.wishes.micro_batch] if share % self.wishes.micro_batch == 0 else []
        return [size for size in divisors(share) if size <= self.wishes.largest_micro_batch]

    def _may_fit(self, parallel: Parallel) -> bool:
        """Whether weights, gradients and optimizer alone leave room: what doesn't needs no closer look."""
        room = self.room
        if room is None:
            return True
        weights, trained = self._weights
        element, replicas = ELEMENTS[self.step.precision], parallel.data * parallel.context
        each = parallel.tensor * parallel.pipeline
        kept = weights * element / (replicas if parallel.shard_weights else 1)
        kept += trained * FP32 / (replicas if parallel.shard_gradients else 1)
        return (kept + 2 * trained * FP32 / replicas) / each <= room

    @cached_property
    def _weights(self) -> tuple[int, int]:
        weights = memory.parameters(self.step.shape)
        lora = self.step.lora
        return weights, weights if lora is None else memory.adapter_parameters(self.step.shape, lora)

    @property
    def room(self) -> float | None:
        """Bytes that a rank may fill; None where nobody knows."""
        available = self.cluster.device.memory_bytes
        return None if available is None else memory.usable(available)

    @cached_property
    def levels(self) -> Levels:
        """What may be replayed, least first: the wish; the usual where room is unknown; else one more each time."""
        if self.wishes.recompute is not None:
            return (self.wishes.recompute.replayed,)
        if self.room is None:
            return (frozenset(cheap(self.step.shape)),)
        return levels(self.step.shape)

    # Looking

    def _best(self, layouts: list[Layout]) -> tuple[tuple[Candidate, ...], dict[Layout, str]]:
        """The fastest that fit, each with as little replayed as fits, and why faster ones don't fit."""
        waiting = [
            (self.timer.terms(layout).total, number, 0)
            for number, layout in enumerate(layouts)
            if self._may_fit(layout.parallel)
        ]
        heapify(waiting)
        best: list[Candidate] = []
        refused: dict[Layout, str] = {}
        while waiting and len(best) < BEST and (best or len(refused) < REFUSALS * len(self.levels)):
            _, number, level = heappop(waiting)
            layout = replace(layouts[number], replayed=self.levels[level])
            if (why := self.refusal(layout)) is None:
                best.append(Candidate(layout, self.timer.terms(layout), self.needs(layout)))
                continue
            refused[layout] = why
            if level + 1 < len(self.levels) and self._ever_fits(layout):
                more = replace(layout, replayed=self.levels[level + 1])
                heappush(waiting, (self.timer.terms(more).total, number, level + 1))
        return tuple(best), refused

    def _refined(self, candidate: Candidate) -> Candidate:
        """The same layout with the cheapest set of operations replayed that fits, among all sets there are."""
        layout, room = candidate.layout, self.cluster.device.memory_bytes
        if room is None or not layout.replayed or self.wishes.recompute is not None:
            return candidate
        step = self.step
        setting = Setting(
            step.shape, step.seq_len, layout.micro_batch, ELEMENTS[step.precision], layout.parallel, step.lora,
            packed=step.packed, on_cuda=not self.wishes.on_host,
        )  # fmt: skip
        known = layout.parallel.tensor, layout.parallel.sequence, layout.parallel.context, layout.micro_batch
        if known not in self._worthwhile:
            self._worthwhile[known] = worthwhile(setting)
        # The more is done again, the less is kept, so that the first that fits is found by halving.
        sets = self._worthwhile[known]
        first = bisect_left(sets, True, key=lambda some: self.refusal(replace(layout, replayed=some)) is None)
        if first < len(sets):
            cheaper = replace(layout, replayed=sets[first])
            terms = self.timer.terms(cheaper)
            if terms.total < candidate.terms.total and self.refusal(cheaper) is None:
                return Candidate(cheaper, terms, self.needs(cheaper))
        return candidate

    def _ever_fits(self, layout: Layout) -> bool:
        """Whether it does with most replayed."""
        return self.refusal(replace(layout, replayed=self.levels[-1])) is None

    def needs(self, layout: Layout) -> Memory:
        """Bytes of the rank that needs most."""
        if layout not in self._needs:
            step = self.step
            self._needs[layout] = memory.estimate(
                step.shape,
                seq_len=step.seq_len,
                micro_batch=layout.micro_batch,
                precision=step.precision,
                parallel=layout.parallel,
                recompute=as_recompute(layout.replayed),
                lora=step.lora,
                micro_batches=layout.micro_batches(step),
                packed=step.packed,
                on_host=self.wishes.on_host,
                compares=step.compares,
            )
        return self._needs[layout]

    def refusal(self, layout: Layout) -> str | None:
        """Why a layout does not fit; None: it does."""
        room = self.room
        if room is None:
            return None
        needs = self.needs(layout)
        if needs.total <= room:
            return None
        who = f"stage {needs.stage}" if layout.parallel.pipeline > 1 else "a rank"
        largest = f"{as_size(needs.of(needs.largest))} of it {needs.largest}"
        return f"refused: {who} needs {as_size(needs.total)}, {largest}; {as_size(room)} are free"

    # Explaining

    def _losers(
        self, layouts: list[Layout], best: tuple[Candidate, ...], refused: dict[Layout, str]
    ) -> tuple[Loser, ...]:
        told = {candidate.layout.parallel for candidate in best}
        losers: list[Loser] = []
        for kind, is_one in self._obvious():
            alike = [layout for layout in layouts if is_one(layout.parallel)]
            if not alike or any(is_one(parallel) for parallel in told):
                continue
            losers.append(self._loser(kind, alike, best, refused))
        return tuple(losers)

    def _obvious(self) -> Iterable[tuple[str, Callable[[Parallel], bool]]]:
        """Layouts that come to mind."""
        node = min(self.cluster.node_size, self.ranks)
        yield "replicas alone", lambda one: one.data == self.ranks and not one.shard_gradients
        yield "replicas that share weights out", lambda one: one.data == self.ranks and one.shard_weights
        for ranks in dict.fromkeys((self.ranks, 2 * node, node, node // 2)):
            if 1 < ranks <= self.ranks:
                yield f"tensor={ranks}", lambda one, ranks=ranks: one.tensor == ranks  # type: ignore[misc]
        for ranks in (2, 4, 8, 16, 32, 64):
            if ranks <= self.ranks:
                yield f"pipeline={ranks}", lambda one, ranks=ranks: one.pipeline == ranks  # type: ignore[misc]
        yield "context ranks", lambda one: one.context > 1

    def _loser(self, kind: str, alike: list[Layout], best: tuple[Candidate, ...], refused: dict[Layout, str]) -> Loser:
        """The fastest of these that fits, or the one that comes closest to fitting."""
        ordered = sorted(alike, key=lambda layout: self.timer.terms(layout).total)
        ordered = [layout for layout in ordered if self._may_fit(layout.parallel)][:BEST] or ordered[:BEST]
        fitting = [self._least(layout, refused) for layout in ordered if self._ever_fits(layout)]
        if fitting:
            fastest = min(fitting, key=lambda layout: self.timer.terms(layout).total)
            return Loser(fastest, f"{kind}: {self._slower(fastest, best)}")
        last = [replace(one, replayed=self.levels[-1]) for one in ordered]
        closest = min(last, key=lambda layout: self.needs(layout).total)
        return Loser(closest, f"{kind} {self.refusal(closest)}")

    def _least(self, layout: Layout, refused: dict[Layout, str]) -> Layout:
        """It, with as little replayed as fits; with most it does."""
        each = (replace(layout, replayed=level) for level in self.levels)
        return next(one for one in each if one not in refused and self.refusal(one) is None)

    def _slower(self, layout: Layout, best: tuple[Candidate, ...]) -> str:
        terms = self.timer.terms(layout)
        if not best:
            return f"{terms.total:.3g} s a step"
        first = best[0].terms
        more = {name: seconds - first.itemised()[name] for name, seconds in terms.itemised().items() if name != "total"}
        worst = max(more, key=more.__getitem__)
        return (
            f"{terms.total:.3g} s a step, {terms.total - first.total:.2g} s more than the best: {worst} takes "
            f"{terms.itemised()[worst]:.2g} s instead of {first.itemised()[worst]:.2g} s"
        )

    def _nothing_is_valid(self) -> str:
        return (
            f"no layout of {self.ranks} ranks is valid: heads, layers, rows of {self.step.seq_len} tokens and a "
            f"global batch of {self.step.global_batch} can't be shared out to so many; try a power of two, or a "
            f"global batch that is a multiple of {self.ranks}"
        )


def levels(shape: ModelShape) -> Levels:
    """What may be replayed, each set with more saved and more computed again than the one before.

    First what costs no matrix product, then the attention core where it keeps whole scores (Korthikanti et al. 2022,
    section 5), then products whose inputs are small, and in the end whole layers.
    """
    least = frozenset(cheap(shape))
    core = least & {"attention_core"}
    return (frozenset(), *([core] if core else []), least, least | {"up_projection"}, frozenset({"layer"}))


def worthwhile(setting: Setting) -> list[frozenset[Operation]]:
    """The sets to replay of which each keeps less than all that cost as much or less, cheapest first."""
    each = ((cost(setting, some), some) for some in budget.choices(setting))
    found: list[frozenset[Operation]] = []
    kept = inf
    for price, some in sorted(each, key=lambda pair: (pair[0].flops, pair[0].saved, len(pair[1]))):
        if price.saved < kept:
            kept = price.saved
            found.append(some)
    return found


def affordable(
    setting: Setting, micro_batches: int, device_bytes: int, *, compares: bool = False
) -> Iterator[Recompute]:
    """What costs least to replay, of sets that leave the rank which holds most within its device (or nothing).

    Of a pipeline, where each stage may replay its own, it is a budget, so that late ones replay less.
    """
    parallel = setting.parallel
    room = memory.room_for_activations(
        setting, micro_batches=micro_batches, device_bytes=device_bytes, compares=compares
    )
    ranks = range(parallel.pipeline)
    waiting = [budget.waiting(setting.shape, parallel, rank=rank, micro_batches=micro_batches) for rank in ranks]
    try:
        operations = budget.cheapest(setting, layers=max(waiting), budget=room)
    except ValueError:
        return
    if parallel.pipeline > 1:
        yield Recompute(mode="budget", budget_gib=room / budget.GIB)
    yield as_recompute(operations)


def cheap(shape: ModelShape) -> tuple[Operation, ...]:
    """What costs no matrix product, and the core only where it keeps whole scores."""
    operations: list[Operation] = ["norm", "activation"]
    if shape.hidden_dropout or shape.attention_dropout:
        operations.append("dropout")
    if shape.attention_dropout:
        # Otherwise it is one kernel that keeps four bytes for each head and token.
        operations.append("attention_core")
    return tuple(operations)


def as_recompute(replayed: frozenset[Operation]) -> Recompute:
    """What a run says that replays these."""
    if not replayed:
        return Recompute(mode="none")
    if replayed == {"layer"}:
        return Recompute(mode="full")
    return Recompute(mode="selective", operations=tuple(sorted(replayed)))


def divisors(number: int) -> list[int]:
    """From 1 on."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


def as_size(size: float) -> str:
    """Bytes as a person reads them."""
    unit, size = ("GiB", size / 2**30) if size >= 2**30 else ("MiB", size / 2**20)
    return f"{size:,.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"


def _valid(parallel: Parallel, step: Step) -> bool:
    try:
        parallel.check(step.shape, seq_len=step.seq_len)
    except ValueError:
        return False
    return True
