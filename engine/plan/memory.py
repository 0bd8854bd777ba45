"""Bytes that each rank needs, counted from the run's numbers: weights, gradients, optimizer, activations, logits.

What is counted is what the engine keeps at the end of a forward pass, and what it makes of scores on the way; other
temporary buffers are covered by `MARGIN`. What a layer keeps is `engine.plan.recompute`'s business.
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
    snapshot: int
    """Of the state, from which a checkpoint is written while training goes on; 0 where the host holds it for a GPU."""

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


def snapshot_per_rank(setting: Setting, own: Sequence[Stage]) -> int:
    """Master and two moments, in fp32, of the weights that a rank with these stages saves: its share where the replicas
    share their state out, else all that train, which the first of them saves for all.
    """
    shape, parallel = setting.shape, setting.parallel
    _, trainable = weights_per_rank(shape, setting.lora, tensor=parallel.tensor, stages=own)
    shared = parallel.shard_optimizer or parallel.is_shared_out
    return 3 * FP32 * -(-trainable // (parallel.data * parallel.context if shared else 1))


def others_keys(setting: Setting) -> int:
    """Bytes of the keys and values of all context ranks, for one layer at a time: as they arrive and in the order of
    the row, and so their gradients on the way back.
    """
    width = keys_per_rank(setting.shape, tensor=setting.parallel.tensor)
    return setting.element * setting.micro_batch * 4 * setting.seq_len * 2 * width


def masks(setting: Setting, *, packed: bool) -> int:
    """Bytes of what is added to the scores of one pass, for all its layers: a number for each query and key.

    Each row has its own where documents are `packed` into it, and each head under ALiBi. Whole rows that are one
    document have none, unless a window is narrower.
    """
    shape, parallel = setting.shape, setting.parallel
    biased = shape.family.positions == "alibi"
    narrow = shape.sliding_window is not None and shape.sliding_window < setting.seq_len
    if not (packed or biased or narrow or parallel.context > 1):
        return 0
    heads = shape.num_heads // parallel.tensor if biased else 1
    return setting.element * heads * (setting.scores if packed else setting.scores // setting.micro_batch)


def making_scores(setting: Setting) -> int:
    """Bytes that are there for a moment besides what is kept.

    Where probabilities are dropped the core makes whole scores: those before and after the mask is added, and in
    backward two gradients. Under ALiBi the bias is made in fp32, before it is rounded.
    """
    shape = setting.shape
    heads = shape.num_heads // setting.parallel.tensor
    core = 2 * setting.element * heads * setting.scores if shape.attention_dropout else 0
    bias = FP32 * heads * setting.scores // setting.micro_batch if shape.family.positions == "alibi" else 0
    return max(core, bias)


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
    packed: bool = False,
    on_host: bool = False,
) -> Memory:
    """What the rank that needs most needs when it holds most.

    `micro_batches` are those of a step, of one replica; they matter in a pipeline, where several wait for their
    backward pass. `packed`: rows hold several documents. `on_host`: the ranks train on CPUs, so that what a checkpoint
    is written from lies in the same memory. Raises ValueError where `recompute` sets a budget that is too small.
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
            packed=packed,
            on_host=on_host,
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
    packed: bool,
    on_host: bool,
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
    activations += sum(in_flight.values()) * masks(setting, packed=packed) + making_scores(setting)
    if parallel.context > 1:
        activations += others_keys(setting)
    share = -(-shape.vocab_size // parallel.tensor)
    return Memory(
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.optimizer,
        activations=activations,
        # Logits and their gradient, in fp32, a chunk at a time.
        logits=2 * FP32 * min(CHUNK_LOGITS, setting.tokens * share) if own[-1].last else 0,
        snapshot=snapshot_per_rank(setting, own) if on_host else 0,
    )
