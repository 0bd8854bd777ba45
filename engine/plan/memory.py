"""Bytes that each rank needs, counted from the run's numbers: weights, gradients, optimizer, activations, logits.

What is counted is what the engine keeps at the end of a forward pass; temporary buffers are covered by `MARGIN`. What a
layer keeps is `engine.plan.recompute`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from engine.config import Lora, ModelShape, Parallel, Recompute
from engine.plan import budget
from engine.plan.flops import matrices
from engine.plan.recompute import ELEMENTS, FP32, Setting, keys_per_rank
from engine.plan.stages import Stage, stages
from engine.plan.turns import most_in_flight, room

MARGIN = 0.10
"""Share of a device's memory left to the allocator, temporary buffers and the runtime."""
CHUNK_LOGITS = 2**24
"""Logits that exist at once in the loss, in elements: 32 MiB in bf16."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that needs most."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def itemised(self) -> dict[str, int]:
        """Each item and the total, for a plan that is stored."""
        return {**asdict(self), "total": self.total}

    @property
    def largest(self) -> str:
        """The item that takes most."""
        items = asdict(self)
        return max(items, key=items.__getitem__)


def parameters(shape: ModelShape) -> int:
    """Weights of the whole model, each counted once."""
    # The last of the matrices is the output layer, which is the embedding where the two are tied.
    embedding = 0 if shape.tie_embeddings else shape.vocab_size * shape.hidden_size
    embedding += _positions(shape)
    return sum(matrix.weights for matrix in matrices(shape)) + vectors_per_rank(shape, tensor=1) + embedding


def adapter_parameters(shape: ModelShape, lora: Lora) -> int:
    """Weights of the adapters."""
    return sum(matrix.adapter_weights for matrix in matrices(shape, lora))


def parameters_per_rank(shape: ModelShape, *, tensor: int, stages: Sequence[Stage] | None = None) -> int:
    """Weights of one tensor rank: its share of each matrix, the vocabulary padded to divide evenly, and its vectors.

    `stages` are the rank's own; None: the whole model.
    """
    layers, first, last = _extent(shape, stages)
    padded = -(-shape.vocab_size // tensor) * tensor
    # Both ends hold a tied embedding.
    vocabulary = padded * shape.hidden_size * ((first or last) if shape.tie_embeddings else first + last)
    of_layers = layers * sum(matrix.weights for matrix in matrices(shape)[: len(shape.family.matrices)])
    copied = layers * 2 * shape.hidden_size * copied_keys(shape, tensor=tensor)
    vectors = vectors_per_rank(shape, tensor=tensor, stages=stages)
    return (of_layers + vocabulary) // tensor + copied + first * _positions(shape) + vectors


def _extent(shape: ModelShape, stages: Sequence[Stage] | None) -> tuple[int, bool, bool]:
    """Number of layers, and whether the first and the last stage are among `stages`; None: the whole model."""
    if stages is None:
        return shape.num_layers, True, True
    layers = sum(len(stage.layers) for stage in stages)
    return layers, any(stage.first for stage in stages), any(stage.last for stage in stages)


def copied_keys(shape: ModelShape, *, tensor: int) -> int:
    """Width of a rank's keys beyond its even share, where there are fewer key-value heads than ranks."""
    return keys_per_rank(shape, tensor=tensor) - shape.num_kv_heads * shape.head_dim // tensor


def _positions(shape: ModelShape) -> int:
    """Weights of learned positions, which each rank has all of."""
    return shape.max_seq_len * shape.hidden_size if shape.family.positions == "learned" else 0


def vectors_per_rank(shape: ModelShape, *, tensor: int, stages: Sequence[Stage] | None = None) -> int:
    """Weights of norms and biases of one tensor rank: biases follow the outputs that a rank has, all else is whole."""
    layers, first, last = _extent(shape, stages)
    hidden, heads = shape.hidden_size, shape.num_heads + 2 * shape.num_kv_heads
    inward = len({"gate", "up"} & set(shape.family.matrices))
    shared = (shape.attention_bias != "none") * heads * shape.head_dim + shape.mlp_bias * inward * shape.ffn_hidden_size
    biases = (shape.attention_bias == "all") + shape.mlp_bias
    copied = (shape.attention_bias != "none") * 2 * copied_keys(shape, tensor=tensor)
    norm = (2 if shape.family.norm == "layer" else 1) * hidden
    whole = 2 * norm + biases * hidden + shape.qk_norm * 2 * shape.head_dim
    return layers * (shared // tensor + copied + whole) + (last + first * shape.family.embed_norm) * norm


def adapter_parameters_per_rank(
    shape: ModelShape, lora: Lora, *, tensor: int, stages: Sequence[Stage] | None = None
) -> int:
    """Weights of the adapters on one tensor rank: of each pair, the side that follows the host matrix is shared out."""
    total = 0
    columns = {"q", "k", "v", "gate", "up"}
    layers, _, _ = _extent(shape, stages)
    of_a_layer = matrices(shape, lora)[: len(shape.family.matrices)]
    for name, matrix in zip(shape.family.matrices, of_a_layer, strict=True):
        shared, whole = (matrix.outputs, matrix.inputs) if name in columns else (matrix.inputs, matrix.outputs)
        copied = copied_keys(shape, tensor=tensor) if name in ("k", "v") else 0
        total += layers * matrix.adapter_rank * (shared // tensor + copied + whole)
    return total


@dataclass(frozen=True)
class States:
    """Bytes of one rank that do not depend on how many tokens there are."""

    weights: int
    gradients: int
    optimizer: int


def weights_per_rank(
    shape: ModelShape, lora: Lora | None, *, tensor: int, stages: Sequence[Stage] | None = None
) -> tuple[int, int]:
    """Weights that one tensor rank has, of these stages or of the whole model, and how many of them train."""
    weights = parameters_per_rank(shape, tensor=tensor, stages=stages)
    if lora is None:
        return weights, weights
    adapters = adapter_parameters_per_rank(shape, lora, tensor=tensor, stages=stages)
    return weights + adapters, adapters


def states_per_rank(setting: Setting, own: Sequence[Stage]) -> States:
    """Weights, gradients, masters and moments of a rank that has these stages, shared out among replicas as asked."""
    shape, parallel, lora, element = setting.shape, setting.parallel, setting.lora, setting.element
    weights, trainable = weights_per_rank(shape, lora, tensor=parallel.tensor, stages=own)
    replicas = parallel.data * parallel.context
    if not parallel.is_shared_out:
        shards = replicas if parallel.shard_optimizer else 1
        # fp32 weights are their own masters; two moments always; the summed gradients where they are shared out.
        kept = (2 if element == FP32 else 3) + (1 if shards > 1 else 0)
        return States(weights * element, trainable * FP32, -(-trainable // shards) * FP32 * kept)
    deeper = shape.model_copy(update={"num_layers": shape.num_layers + 1})
    both = (weights_per_rank(model, lora, tensor=parallel.tensor) for model in (deeper, shape))
    layer, layer_trainable = (more - less for more, less in zip(*both, strict=True))
    layers, _, _ = _extent(shape, own)
    # What is no layer's is whole throughout; a layer is gathered while the one before it runs.
    gathered = weights - max(0, layers - 2) * layer if parallel.shard_weights else weights
    # The same of gradients, but for one layer at a time, and once more in fp32 on their way to be summed.
    arising = trainable - max(0, layers - 1) * layer_trainable
    frozen, share = -(-(weights - trainable) // replicas), -(-trainable // replicas)
    return States(
        weights=(gathered + frozen) * element,
        gradients=arising * (element + FP32) + share * FP32,
        # Masters, which are none of the gathered weights, and two moments.
        optimizer=share * FP32 * 3,
    )


def beyond_its_share(
    shape: ModelShape, *, seq_len: int, micro_batch: int, parallel: Parallel, element: int, passes: int = 1
) -> int:
    """Bytes that a context rank needs besides what belongs to its tokens.

    Keys and values of all ranks, for one layer at a time: as they arrive and in the order of the row, and so their
    gradients on the way back. And masks, for all layers of each of the `passes` that wait for their backward pass: a
    rank's two chunks look at 2C + 1 chunks of keys.
    """
    keys = 4 * seq_len * 2 * keys_per_rank(shape, tensor=parallel.tensor)
    chunk = seq_len // (2 * parallel.context)
    masks = (2 * parallel.context + 1) * chunk**2
    return element * micro_batch * (keys + passes * masks)


def estimate(
    shape: ModelShape,
    *,
    seq_len: int,
    micro_batch: int,
    precision: str,
    parallel: Parallel,
    recompute: Recompute,
    lora: Lora | None = None,
    micro_batches: int = 1,
) -> Memory:
    """What the rank that needs most needs when it holds most.

    `micro_batches` are those of a step, of one replica; they matter in a pipeline, where several wait for their
    backward pass. Raises ValueError where `recompute` sets a budget that is too small.
    """
    setting = Setting(shape, seq_len, micro_batch, ELEMENTS[precision], parallel, lora)
    virtual = stages(shape, parallel)
    # Of ranks with stages alike the first needs most, for it has most micro-batches waiting.
    telling: dict[tuple[tuple[int, bool, bool], ...], int] = {}
    for rank in range(parallel.pipeline):
        own = virtual[rank :: parallel.pipeline]
        telling.setdefault(tuple((len(stage.layers), stage.first, stage.last) for stage in own), rank)
    needs = (
        _of_rank(
            setting,
            virtual[rank :: parallel.pipeline],
            in_flight=most_in_flight(
                ranks=parallel.pipeline,
                rank=rank,
                chunks=parallel.virtual,
                micro_batches=micro_batches,
                layers=[len(stage.layers) for stage in virtual[rank :: parallel.pipeline]],
            ),
            on_the_way=2 * room(ranks=parallel.pipeline, chunks=parallel.virtual, micro_batches=micro_batches),
            recompute=recompute,
        )
        for rank in telling.values()
    )
    return max(needs, key=lambda memory: memory.total)


def _of_rank(
    setting: Setting,
    own: Sequence[Stage],
    *,
    in_flight: Mapping[int, int],
    on_the_way: int,
    recompute: Recompute,
) -> Memory:
    """What a pipeline rank needs that has these stages.

    `in_flight` are the micro-batches of each that wait for their backward pass, `on_the_way` the hidden states and
    gradients that are kept until a neighbour has them.
    """
    shape, parallel, element = setting.shape, setting.parallel, setting.element
    states = states_per_rank(setting, own)
    layers = sum(len(own[chunk].layers) * count for chunk, count in in_flight.items())
    operations = budget.chosen(recompute, setting, layers=layers)
    activations = budget.activations(setting, operations, layers=layers)
    # The embedding's output, and the last norm's; of other stages, what comes next.
    hidden = 2 + (on_the_way if parallel.pipeline > 1 else 0)
    activations += hidden * element * setting.own_tokens * shape.hidden_size
    if parallel.context > 1:
        activations += beyond_its_share(
            shape,
            seq_len=setting.seq_len,
            micro_batch=setting.micro_batch,
            parallel=parallel,
            element=element,
            passes=sum(in_flight.values()),
        )
    share = -(-shape.vocab_size // parallel.tensor)
    return Memory(
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.optimizer,
        activations=activations,
        # Logits and their gradient, in fp32, a chunk at a time.
        logits=2 * FP32 * min(CHUNK_LOGITS, setting.tokens * share) if own[-1].last else 0,
    )
