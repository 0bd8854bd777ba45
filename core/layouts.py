"""How long a step takes on the nodes that there are, and which layout a job gets where it leaves that open.

Rates are those that a node measured, else a table's; where there are neither, nothing is said about time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from engine.config import ModelShape, Operation, RunConfig
from engine.plan import search
from engine.plan.cluster import Cluster, from_facts
from engine.plan.search import Found, Wishes
from engine.plan.time import Layout, Step, Timer

if TYPE_CHECKING:
    from core.resolve import ClusterFacts

UNKNOWN = "not calibrated yet: no node has said how fast it is"


@dataclass(frozen=True)
class Alternative:
    """A layout that would do, with its terms."""

    words: str
    parallel: dict[str, Any]
    micro_batch: int
    recomputed: list[str]
    seconds: dict[str, float]
    bytes_per_rank: int


@dataclass(frozen=True)
class Alternatives:
    """What a search over the slots of a job finds."""

    best: list[Alternative] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def described(facts: ClusterFacts, *, ranks: int) -> Cluster | None:
    """The nodes as a plan sees them, for a job of so many ranks; None where nobody knows how fast they are."""
    if facts.rates is None:
        return None
    size = facts.largest_node or ranks
    cluster = from_facts(facts.rates, memory_bytes=facts.slot_memory_bytes, node_size=size)
    if facts.device == "cuda":
        return cluster
    # A host's cores are shared out among the ranks that run, see `engine.launch`; few of them have several slots' each.
    share = max(1, size // ranks)
    device = cluster.device
    flops = {precision: rate * share for precision, rate in device.flops.items()}
    # The memory is the host's, and what one slot reached of it was measured with nobody beside it.
    host = device.host and device.host.times(share, most=device.bandwidth)
    return replace(cluster, device=replace(device, flops=flops, host=host))


def whole_passes(run: RunConfig, batch: int) -> tuple[int, int]:
    """Rows of one pass of a rank, and of all passes of a step, that a step of `batch` rows takes."""
    data = run.parallel.data
    each = min(run.training.micro_batch, ceil(batch / data))
    return each, ceil(batch / (each * data)) * each * data


def step_of(run: RunConfig, shape: ModelShape, *, batch: int, packed: bool = False) -> Step:
    """What a step of a run trains on, with so many rows."""
    training = run.training
    compares = run.objective == "dpo"
    return Step(shape, run.data.seq_len, batch, training.precision, run.lora, packed, compares)


def timed(
    run: RunConfig,
    shape: ModelShape,
    facts: ClusterFacts,
    *,
    replayed: frozenset[Operation],
    steps: int,
    batch: int,
) -> dict[str, Any]:
    """What a plan says of time, with so many rows in a step.

    All None where no node is calibrated, but for `calibration`, which says so.
    """
    cluster = described(facts, ranks=run.parallel.ranks)
    if cluster is None or run.training.precision not in cluster.device.flops:
        nothing = dict.fromkeys(("step_seconds", "seconds_by_term", "tokens_per_second", "eta_seconds"))
        return {**nothing, "calibration": UNKNOWN}
    micro_batch, rows = whole_passes(run, batch)
    terms = Timer(step_of(run, shape, batch=rows), cluster).terms(Layout(run.parallel, micro_batch, replayed))
    return {
        "step_seconds": terms.total,
        "seconds_by_term": {name: seconds for name, seconds in terms.itemised().items() if name != "total"},
        "tokens_per_second": batch * run.data.seq_len / terms.total,
        "eta_seconds": steps * terms.total,
        "calibration": origin(cluster),
    }


def origin(cluster: Cluster) -> str:
    """Where a cluster's rates are from."""
    device = cluster.device
    return f"measured on a node ({device.name})" if device.measured else f"from the data sheet of {device.name}"


def found(step: Step, facts: ClusterFacts, *, ranks: int, wishes: Wishes, explain: bool) -> Found | None:
    """What a search finds; None where it has nothing to go by, or nothing is valid."""
    cluster = described(facts, ranks=ranks)
    if cluster is None or step.precision not in cluster.device.flops:
        return None
    try:
        wishes = replace(wishes, on_host=facts.device == "cpu")
        return search.search(step, cluster, ranks=ranks, wishes=wishes, explain=explain)
    except ValueError:
        return None


def alternatives(
    run: RunConfig, shape: ModelShape, facts: ClusterFacts, *, batch: int, packed: bool = False
) -> Alternatives:
    """The best layouts of a run over as many slots as it takes, and why those that come to mind are not among them."""
    fixed: Mapping[str, int | bool] = {"pipeline": 1} if run.training.samples else {}
    _, rows = whole_passes(run, batch)
    step = step_of(run, shape, batch=rows, packed=packed)
    outcome = found(step, facts, ranks=run.parallel.ranks, wishes=Wishes(fixed=fixed), explain=True)
    if outcome is None:
        return Alternatives()
    best = [
        Alternative(
            words=candidate.words,
            parallel=candidate.layout.parallel.model_dump(mode="json"),
            micro_batch=candidate.layout.micro_batch,
            recomputed=sorted(candidate.layout.replayed),
            seconds=candidate.terms.itemised(),
            bytes_per_rank=candidate.memory.total,
        )
        for candidate in outcome.best
    ]
    return Alternatives(best, [loser.why for loser in outcome.losers])
