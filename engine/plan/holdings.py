"""Every parameter that a rank holds: its local size, as the engine's modules make it, and whether it trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from engine.config import Lora, ModelShape
from engine.plan.stages import Stage

COLUMNS = frozenset({"q", "k", "v", "gate", "up"})
"""Matrices whose outputs tensor ranks share; of the others they share the inputs."""
ALIGNMENT = 16
"""Elements of a flat buffer that a parameter's run begins at a multiple of; `engine.optimizer` lays it out so."""


@dataclass(frozen=True)
class Holding:
    """One parameter of a rank."""

    name: str
    size: tuple[int, ...]
    """Of the local tensor, padding included."""
    trains: bool = True
    is_adapter: bool = False

    @property
    def elements(self) -> int:
        return prod(self.size)

    def rows_of(self, replicas: int) -> int:
        """Elements of the first replica's rows, where they are shared out among so many."""
        return -(-self.size[0] // replicas) * prod(self.size[1:])


@dataclass(frozen=True)
class Holdings:
    """All that a rank holds: layers are alike, and stand here once."""

    layer: tuple[Holding, ...]
    layers: int
    ends: tuple[Holding, ...]
    """What stands before the first layer of the model and behind the last, as far as the rank has it."""

    def __iter__(self) -> Iterator[tuple[Holding, int]]:
        """Each, and how many there are of it."""
        yield from ((holding, self.layers) for holding in self.layer)
        yield from ((holding, 1) for holding in self.ends)

    def elements(self, *, trains: bool | None = None, is_adapter: bool | None = None) -> int:
        """Of all, or of those that are so."""
        return sum(
            count * holding.elements
            for holding, count in self
            if trains in (None, holding.trains) and is_adapter in (None, holding.is_adapter)
        )

    def buffer(self, shards: int) -> int:
        """Elements of the flat buffer of what trains: aligned, and so long that so many shares are equal."""
        end = sum(count * -(-holding.elements // ALIGNMENT) for holding, count in self if holding.trains)
        return max(1, -(-end // shards)) * shards * ALIGNMENT


def holdings(
    shape: ModelShape, lora: Lora | None = None, *, tensor: int = 1, stages: Sequence[Stage] | None = None
) -> Holdings:
    """What one tensor rank holds of these stages; None: of the whole model."""
    if stages is None:
        return Holdings(_layer(shape, lora, tensor), shape.num_layers, _ends(shape, lora, tensor, True, True))
    first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
    layers = sum(len(stage.layers) for stage in stages)
    return Holdings(_layer(shape, lora, tensor), layers, _ends(shape, lora, tensor, first, last))


def keys_per_rank(shape: ModelShape, *, tensor: int) -> int:
    """Outputs of the key projection on one rank: where heads are fewer than ranks, neighbours hold the same head."""
    return max(1, shape.num_kv_heads // tensor) * shape.head_dim


def _layer(shape: ModelShape, lora: Lora | None, tensor: int) -> tuple[Holding, ...]:
    hidden, inner = shape.hidden_size, shape.ffn_hidden_size // tensor
    queries, keys = shape.num_heads * shape.head_dim // tensor, keys_per_rank(shape, tensor=tensor)
    widths = {"q": queries, "k": keys, "v": keys, "o": queries, "gate": inner, "up": inner, "down": inner}
    adapted = lora.targets_in(shape) if lora is not None else ()
    made: list[tuple[str, tuple[int, ...]]] = [*_norm(shape, "norm1"), *_norm(shape, "norm2")]
    adapters: list[Holding] = []
    for name in shape.family.matrices:
        inputs, outputs = (hidden, widths[name]) if name in COLUMNS else (widths[name], hidden)
        made.append((name, (outputs, inputs)))
        of_attention = shape.attention_bias == "all" or (shape.attention_bias == "qkv" and name != "o")
        if of_attention if name in ("q", "k", "v", "o") else shape.mlp_bias:
            made.append((f"{name}.bias", (outputs,)))
        if lora is not None and name in adapted:
            adapters.append(Holding(f"{name}.A", (lora.rank, inputs), is_adapter=True))
            adapters.append(Holding(f"{name}.B", (outputs, lora.rank), is_adapter=True))
    if shape.qk_norm:
        made += [("q.norm", (shape.head_dim,)), ("k.norm", (shape.head_dim,))]
    return (*(Holding(name, size, trains=lora is None) for name, size in made), *adapters)


def _ends(shape: ModelShape, lora: Lora | None, tensor: int, first: bool, last: bool) -> tuple[Holding, ...]:
    table = (-(-shape.vocab_size // tensor), shape.hidden_size)
    made: list[tuple[str, tuple[int, ...]]] = []
    # Both ends hold a tied embedding.
    if first or (last and shape.tie_embeddings):
        made.append(("embedding", table))
    if first and shape.family.positions == "learned":
        made.append(("positions", (shape.max_seq_len, shape.hidden_size)))
    if first and shape.family.embed_norm:
        made += _norm(shape, "embed_norm")
    if last:
        made += _norm(shape, "norm")
    if last and not shape.tie_embeddings:
        made.append(("output", table))
    return tuple(Holding(name, size, trains=lora is None) for name, size in made)


def _norm(shape: ModelShape, name: str) -> list[tuple[str, tuple[int, ...]]]:
    weight = (name, (shape.hidden_size,))
    return [weight, (f"{name}.bias", (shape.hidden_size,))] if shape.family.norm == "layer" else [weight]
