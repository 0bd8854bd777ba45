"""What a run may be laid out over: devices in nodes, how fast each computes and remembers, and what links them."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import log
from types import MappingProxyType
from typing import Any

REACHED = 0.8
"""Share of what a data sheet says of memory and links that real use of them reaches, about: copies on an A100 come to
1.6 of its 2.0 TB/s, rings over NVLink to 240 of 300 GB/s."""
FABRIC = 25e9 * REACHED
"""Bytes a second between two nodes, for each device, where nobody says: one port of 200 Gbit/s each."""


@dataclass(frozen=True)
class Link:
    """What one rank reaches over it, one way, while its neighbours use theirs."""

    bytes_per_second: float
    latency: float = 0.0
    """Seconds that a message takes however short it is."""


Curve = Sequence[Sequence[float]]
"""(size, rate) at some sizes, smallest first."""


def rate_at(curve: Curve, size: float) -> float:
    """Between two sizes that were measured on a line of their logarithms in size; beyond them as at the last."""
    place = bisect(curve, size, key=lambda point: point[0])
    if place in (0, len(curve)):
        return curve[max(0, place - 1)][1]
    (less, slow), (more, fast) = curve[place - 1 : place + 1]
    share = (log(size) - log(less)) / (log(more) - log(less))
    return slow + share * (fast - slow)


@dataclass(frozen=True)
class Host:
    """What makes cores differ from a GPU, which is measured at sizes of a training step. By precision."""

    products: Mapping[str, Curve]
    """FLOP/s of a matrix's three products, by the narrower of its sides."""
    attention: Mapping[str, Curve]
    """FLOP/s of attention cores, forward and backward, by the tokens of a row; masked places count."""
    traffic: Mapping[str, float]
    """Bytes a second that layers read and write between their products, most of them in caches."""
    logits: Mapping[str, float]
    """The same of the loss, a chunk of whose logits is in caches altogether."""
    updates: float
    """Bytes a second of the optimizer's step."""
    ends: float
    """Seconds that a micro-batch takes before and behind its layers, however small it is."""

    def times(self, share: int, *, most: float) -> Host:
        """Of so many slots' cores, where memory gives no more than `most` bytes a second."""

        def faster(curves: Mapping[str, Curve]) -> dict[str, Curve]:
            return {name: [(size, share * rate) for size, rate in curve] for name, curve in curves.items()}

        def wider(rates: Mapping[str, float]) -> dict[str, float]:
            return {name: max(rate, min(share * rate, most)) for name, rate in rates.items()}

        return replace(
            self,
            products=faster(self.products),
            attention=faster(self.attention),
            traffic=wider(self.traffic),
            logits=wider(self.logits),
        )


@dataclass(frozen=True)
class Device:
    """One slot: a GPU, or a share of a host's cores."""

    name: str
    flops: Mapping[str, float]
    """Most FLOP/s of matrix products, by precision: what the maker says, or what was measured."""
    bandwidth: float
    """Bytes a second that it reads and writes of its own memory in elementwise work."""
    memory_bytes: int | None = None
    efficiency: float = 0.75
    """Share of `flops` that the matrix products of a training step reach. As fitted to the 175B row of Korthikanti et
    al. 2022, table 5; of a measured device, whose `flops` were reached, it is 1."""
    launch: float = 0.0
    """Seconds that an operation takes however small it is."""
    measured: bool = False
    """The numbers are those of this very device; else they are from a table."""
    host: Host | None = None
    """What is known besides of a share of a host's cores. Messages take those cores, so that nothing hides them."""


@dataclass(frozen=True)
class Cluster:
    """Nodes all alike. Ranks next to one another are in the same node as long as there is room."""

    device: Device
    node_size: int
    """Devices of a node."""
    inside: Link
    """Between devices of a node."""
    between: Link = Link(FABRIC, 10e-6)
    """Between nodes, for each device."""

    def link(self, span: int) -> Link:
        """What ranks use whose numbers lie within `span` of one another, if the whole cluster is cut into such spans.

        The slowest hop of a ring is what it goes by: a group that leaves a node goes by the link between nodes.
        """
        return self.inside if span <= self.node_size and self.node_size % span == 0 else self.between


def _table(*rows: tuple[str, float, float, float, int, float]) -> Mapping[str, tuple[Device, Link]]:
    return MappingProxyType(
        {
            name: (
                Device(
                    name,
                    MappingProxyType({"bf16": bf16, "fp32": fp32}),
                    bandwidth * REACHED,
                    memory_bytes=gib * 2**30,
                    launch=5e-6,
                ),
                Link(link * REACHED, 6e-6),
            )
            for name, bf16, fp32, bandwidth, gib, link in rows
        }
    )


KNOWN: Mapping[str, tuple[Device, Link]] = _table(
    # From NVIDIA's data sheets: dense FLOP/s in bf16 (fp16 where a GPU has none) and fp32, bytes a second of memory,
    # GiB of it, and bytes a second, one way, between GPUs of a host: NVLink's half where there is one, else PCIe's.
    ("V100", 125e12, 15.7e12, 0.90e12, 32, 150e9),
    ("T4", 65e12, 8.1e12, 0.30e12, 15, 12e9),
    ("A10", 125e12, 31.2e12, 0.60e12, 22, 25e9),
    ("A30", 165e12, 10.3e12, 0.93e12, 24, 25e9),
    ("A40", 149.7e12, 37.4e12, 0.70e12, 45, 25e9),
    ("A100", 312e12, 19.5e12, 2.04e12, 80, 300e9),
    ("L4", 121e12, 30.3e12, 0.30e12, 22, 25e9),
    ("L40S", 362e12, 91.6e12, 0.86e12, 45, 25e9),
    ("H100 PCIe", 756e12, 51e12, 2.0e12, 80, 50e9),
    ("H100", 989e12, 67e12, 3.35e12, 80, 450e9),
    ("H200", 989e12, 67e12, 4.8e12, 141, 450e9),
    ("H20", 148e12, 44e12, 4.0e12, 96, 450e9),
    ("B200", 2250e12, 75e12, 7.7e12, 180, 900e9),
)
"""Device and the link within a node, by a part of the name that `nvidia-smi` gives it."""


def known(name: str) -> tuple[Device, Link] | None:
    """The device whose entry fits `name` best: "H200" is no "H20"."""
    fitting = [part for part in KNOWN if part in name]
    return KNOWN[max(fitting, key=len)] if fitting else None


def described(name: str, *, node_size: int = 8, between: Link | None = None) -> Cluster:
    """Nodes of a device of the table. Raises ValueError, saying which there are, where it has none of that name."""
    found = known(name)
    if found is None:
        raise ValueError(f"there are no figures of the device {name!r}; there are those of {', '.join(KNOWN)}")
    device, inside = found
    return Cluster(device, node_size, inside, between or Link(FABRIC, 10e-6))


def as_facts(device: Device, inside: Link) -> dict[str, Any]:
    """A device and the link to its neighbours, for a row or a file; `from_facts` reads it."""
    plain = asdict(replace(device, flops={}, host=None))
    host = device.host and {each.name: getattr(device.host, each.name) for each in fields(Host)}
    return {**plain, "flops": dict(device.flops), "host": host, "inside": asdict(inside)}


def from_facts(facts: Mapping[str, Any], *, memory_bytes: int | None, node_size: int) -> Cluster:
    """Nodes of the device that `as_facts` wrote down, with what is known of each slot's memory."""
    said = {each.name: facts[each.name] for each in fields(Device) if each.name in facts}
    if said.get("host"):
        said["host"] = Host(**said["host"])
    return Cluster(Device(**said | {"memory_bytes": memory_bytes}), node_size, Link(**facts["inside"]))
