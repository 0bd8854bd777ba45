"""What each operation of a layer is worth recomputing: bytes that it frees and FLOPs that it adds, on one rank.

A layer is written down once, as the tensors that its backward pass reads and the recipes that can make them again
(Korthikanti et al. 2022, section 4, counted anew for our layers); bytes and FLOPs of any choice follow from that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from engine.config import Lora, ModelShape, Operation, Parallel, RunConfig
from engine.plan.flops import MULTIPLY_ADD, model_flops

FP32 = 4
ELEMENTS = {"bf16": 2, "fp32": FP32}
"""Bytes of an activation, by `training.precision`."""
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
NORM, ACTIVATION, MASK = 5, 8, 20
"""FLOPs an element, about: they order what costs no matrix product, and weigh next to nothing beside one."""


@dataclass(frozen=True)
class Setting:
    """One micro-batch on one rank."""

    shape: ModelShape
    seq_len: int
    micro_batch: int
    element: int
    """Bytes of an activation."""
    parallel: Parallel = field(default_factory=Parallel)
    lora: Lora | None = None
    reached: bool = True
    """The layer's input needs a gradient: not in the first layer, where only adapters learn."""
    attended: int | None = None
    """(token, token attended to) of a rank, as `plan.flops` counts them; None: rows are one document each."""

    @classmethod
    def of(cls, run: RunConfig, shape: ModelShape) -> Setting:
        """One micro-batch of a run."""
        return cls(
            shape,
            seq_len=run.data.seq_len,
            micro_batch=run.training.micro_batch,
            element=ELEMENTS[run.training.precision],
            parallel=run.parallel,
            lora=run.lora,
        )

    @property
    def tokens(self) -> int:
        """Tokens that a rank's matrices see."""
        return self.seq_len * self.micro_batch // self.parallel.context

    @property
    def own_tokens(self) -> int:
        """Tokens that a rank holds between the matrices."""
        return self.tokens // self.parallel.tensor if self.parallel.sequence else self.tokens

    @property
    def scores(self) -> int:
        """Places in the score matrices of a head, where the core makes such."""
        context = self.parallel.context
        if context == 1:
            return self.micro_batch * self.seq_len**2
        # A rank's two chunks look at 2C + 1 chunks of keys.
        return self.micro_batch * (2 * context + 1) * (self.seq_len // (2 * context)) ** 2

    @property
    def pairs(self) -> int:
        """Tokens, each times the tokens that it attends to."""
        if self.attended is not None:
            return self.attended
        return self.tokens * min(self.seq_len, self.shape.sliding_window or self.seq_len)


@dataclass(frozen=True)
class Recipe:
    """How tensors are made again."""

    operation: Operation
    inputs: tuple[str, ...]
    products: int
    """FLOPs of matrix products."""
    elementwise: int = 0
    """FLOPs of everything else, about."""


@dataclass
class Layer:
    """A layer's backward pass: what it reads, how large that is, and which of it can be made again."""

    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each tensor."""
    recipes: dict[str, Recipe] = field(default_factory=dict)
    made_by: dict[str, str] = field(default_factory=dict)
    """Tensor to recipe."""
    read: list[str] = field(default_factory=list)
    """Tensors that backward reads, whatever is replayed."""
    core_reads: list[str] = field(default_factory=list)
    """Tensors that the attention core's backward reads besides, unless the core is replayed from `core_inputs`."""
    core_inputs: tuple[str, ...] = ()
    core_products: int = 0
    products: int = 0
    """FLOPs of the whole layer's matrix products, forward."""


@dataclass(frozen=True)
class Cost:
    """Of one layer and one micro-batch, on one rank."""

    saved: int
    """Bytes kept from the forward pass to the backward pass."""
    products: int
    """FLOPs of matrix products that are done once more."""
    elementwise: int
    """Other FLOPs that are done once more, about."""

    @property
    def flops(self) -> int:
        return self.products + self.elementwise


def cost(setting: Setting, operations: Collection[Operation]) -> Cost:
    """What a layer keeps and repeats where `operations` are replayed."""
    layer = layer_of(setting)
    if "layer" in operations:
        elementwise = sum(recipe.elementwise for recipe in layer.recipes.values())
        return Cost(layer.sizes["x"], layer.products, elementwise)
    reads = list(layer.read)
    core = "attention_core" in operations
    reads += layer.core_inputs if core else layer.core_reads
    kept: set[str] = set()
    replayed: dict[str, Recipe] = {}
    while reads:
        name = reads.pop()
        by = layer.made_by.get(name, "")
        if by in replayed:
            continue
        if by and layer.recipes[by].operation in operations:
            replayed[by] = layer.recipes[by]
            reads += replayed[by].inputs
        else:
            kept.add(name)
    return Cost(
        saved=sum(layer.sizes[name] for name in kept),
        products=sum(recipe.products for recipe in replayed.values()) + core * layer.core_products,
        elementwise=sum(recipe.elementwise for recipe in replayed.values()),
    )


@dataclass(frozen=True)
class Worth:
    """What replaying one operation changes in a layer that keeps everything else."""

    freed: int
    """Bytes."""
    flops: int
    """Added, of matrix products."""


def worth(setting: Setting) -> dict[Operation, Worth]:
    """Each operation by itself."""
    all_kept = cost(setting, ()).saved
    alone = {operation: cost(setting, {operation}) for operation in OPERATIONS}
    return {operation: Worth(all_kept - one.saved, one.products) for operation, one in alone.items()}


def hardware_flops(
    shape: ModelShape,
    *,
    tokens: int,
    pairs: int,
    replayed: Iterable[Collection[Operation]],
    lora: Lora | None = None,
    equation_8: bool = False,
) -> int:
    """`model_flops` and the matrix products done again, where `replayed` says of each layer which operations are.

    A replayed attention core costs two products, as the text of Korthikanti et al. 2022 (appendix A) says. With
    `equation_8` it costs six, a whole forward and backward pass, as their equation 8 prints and their table 5 shows.
    Whole layers replayed are equation 3 of Narayanan et al. 2021. What a fused core repeats within its own backward
    pass is not counted.
    """
    setting = Setting(shape, seq_len=tokens, micro_batch=1, element=1, lora=lora, attended=pairs)
    total = model_flops(shape, tokens=tokens, pairs=pairs, lora=lora)
    for some, layers in Counter(map(frozenset, replayed)).items():
        total += layers * cost(setting, some).products
        if equation_8 and "attention_core" in some:
            total += layers * 2 * layer_of(setting).core_products
    return total


def layer_of(setting: Setting) -> Layer:
    """The layer that the engine runs, tensor by tensor."""
    shape, element = setting.shape, setting.element
    t, lora = setting.parallel.tensor, setting.lora
    tokens, own = setting.tokens, setting.own_tokens
    width, inner = shape.hidden_size, shape.ffn_hidden_size // t
    queries = shape.num_heads * shape.head_dim // t
    keys = keys_per_rank(shape, tensor=t)
    family = shape.family
    adapted = frozenset(lora.targets_in(shape)) if lora is not None else frozenset()
    layer = Layer()

    def tensor(name: str, size: int, by: str | None = None) -> None:
        layer.sizes[name] = size
        if by is not None:
            layer.made_by[name] = by

    def norm(name: str, of: str, *, reached: bool) -> None:
        tensor(f"{name}.statistics", (2 if family.norm == "layer" else 1) * FP32 * own)
        layer.recipes[name] = Recipe("norm", (of,), 0, NORM * own * width)
        tensor(name, element * own * width, name)
        if reached:
            layer.read += [of, f"{name}.statistics"]

    def mask(name: str, elements: int) -> str:
        """The name of a mask of a byte each."""
        layer.recipes[f"{name}.mask"] = Recipe("dropout", (), 0, MASK * elements)
        tensor(f"{name}.mask", elements, f"{name}.mask")
        return f"{name}.mask"

    def product(inputs: int, outputs: int, target: str) -> int:
        rank = lora.rank if lora is not None and target in adapted else 0
        return MULTIPLY_ADD * tokens * (inputs * outputs + rank * (inputs + outputs))

    def matrices(of: str, size: int, outputs: Mapping[str, tuple[int, int]], inner_tokens: int) -> int:
        """Note what matrices of one input read; FLOPs of their products."""
        for target in outputs:
            if lora is None:
                layer.read.append(of)
            elif target in adapted:
                read = of
                if lora.dropout:
                    read = f"{target}.dropped"
                    layer.recipes[read] = Recipe("dropout", (of,), 0, MASK * size // element)
                    tensor(read, size, read)
                # What travels between A and B.
                tensor(f"{target}.adapter", element * inner_tokens * lora.rank)
                layer.read += [read, f"{target}.adapter"]
        flops = sum(product(inputs, size, target) for target, (inputs, size) in outputs.items())
        layer.products += flops
        return flops

    tensor("x", element * own * width)
    norm("norm1", "x", reached=setting.reached)

    sizes = {"q": (width, queries), "k": (width, keys), "v": (width, keys)}
    flops = matrices("norm1", element * own * width, sizes, tokens)
    layer.recipes["qkv"] = Recipe("qkv", ("norm1",), flops)
    for name, elements in (("q", queries), ("k", keys)):
        source = "qkv"
        if shape.qk_norm:
            # Heads as they were before, and one statistic for each.
            tensor(f"{name}.raw", element * tokens * elements, "qkv")
            tensor(f"{name}.scale", FP32 * tokens * elements // shape.head_dim)
            if setting.reached or name in adapted:
                layer.read += [f"{name}.raw", f"{name}.scale"]
            layer.recipes[source := name] = Recipe("qkv", (f"{name}.raw",), 0, NORM * tokens * elements)
        tensor(name, element * tokens * elements, source)
    tensor("v", element * tokens * keys, "qkv")

    tensor("mixed", element * tokens * queries)
    layer.core_inputs = ("q", "k", "v")
    if reached := setting.reached or bool(adapted & {"q", "k", "v"}):
        if shape.attention_dropout:
            # Copies of queries, keys and values as the products read them (of one row's, the tensors themselves), the
            # probabilities, and what dropout leaves of them: 5 bytes a score (Korthikanti et al. 2022, section 4.1).
            scores = setting.scores * shape.num_heads // t
            tensor("q.scaled", layer.sizes["q"])
            tensor("chances", element * scores)
            layer.recipes["dropped"] = Recipe("dropout", ("chances",), 0, MASK * scores)
            tensor("dropped", element * scores, "dropped")
            layer.core_reads = ["q.scaled", "chances", "dropped", mask("chances", scores)]
            for name in ("k", "v"):
                tensor(f"{name}.read", layer.sizes[name], layer.made_by[name] if setting.micro_batch == 1 else None)
                layer.core_reads.append(f"{name}.read")
        else:
            # The logarithm of each row's sum, and the output, which the matrix behind it reads too.
            tensor("core.sums", FP32 * tokens * shape.num_heads // t)
            layer.core_reads = ["q", "k", "v", "core.sums", "mixed"]
    layer.core_products = 2 * MULTIPLY_ADD * setting.pairs * queries
    layer.products += layer.core_products
    matrices("mixed", element * tokens * queries, {"o": (queries, width)}, own)

    tensor("x2", element * own * width)
    reached = reached or "o" in adapted
    drops = shape.hidden_dropout and "branches" in family.drops
    if drops and reached:
        layer.read.append(mask("branch1", own * width))
    norm("norm2", "x2", reached=reached)
    inward = [name for name in family.matrices if name in ("gate", "up")]
    flops = matrices("norm2", element * own * width, {name: (width, inner) for name in inward}, tokens)
    layer.recipes["up"] = Recipe("up_projection", ("norm2",), flops)
    for name in inward:
        tensor(name, element * tokens * inner, "up")
    layer.recipes["activation"] = Recipe("activation", tuple(inward), 0, ACTIVATION * tokens * inner)
    tensor("active", element * tokens * inner, "activation")
    if reached := reached or not adapted.isdisjoint(inward):
        layer.read += inward
    matrices("active", element * tokens * inner, {"down": (inner, width)}, own)
    if drops and (reached or "down" in adapted):
        layer.read.append(mask("branch2", own * width))
    return layer


def keys_per_rank(shape: ModelShape, *, tensor: int) -> int:
    """Outputs of the key projection on one rank: where heads are fewer than ranks, neighbours hold the same head."""
    return max(1, shape.num_kv_heads // tensor) * shape.head_dim
