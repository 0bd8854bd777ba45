"""What each operation of a layer is worth recomputing: bytes that it frees and FLOPs that it adds, on one rank.

A layer is written down once, as the tensors that its backward pass reads and the recipes that can make them again
(Korthikanti et al. 2022, section 4, counted anew for our layers); bytes and FLOPs of any choice follow from that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from engine.config import Lora, ModelShape, Operation, Parallel, RunConfig
from engine.plan.flops import MULTIPLY_ADD, model_flops
from engine.plan.holdings import COLUMNS, keys_per_rank

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
    packed: bool = False
    """Rows may hold several documents, which do not see one another."""
    on_cuda: bool = False
    """Kernels are those of a CUDA device."""
    context_rank: int | None = None
    """Which of the ranks that share a row; None: the one with the most places in its scores."""

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
            packed=run.data.format == "preference" or (run.data.packing and run.data.format != "text"),
            on_cuda=run.device == "cuda",
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
        return self.micro_batch * self._in_a_row(lambda queries, keys: queries * keys)

    @property
    def keys_in_sight(self) -> int:
        """Tokens whose keys the core is given, of all rows and runs of queries."""
        return self.micro_batch * self._in_a_row(lambda queries, keys: keys)

    def _in_a_row(self, count: Callable[[int, int], int]) -> int:
        """Sum of `count` over the runs of queries that a rank has of a row."""
        ranks = range(self.parallel.context) if self.context_rank is None else [self.context_rank]
        return max(sum(count(*run) for run in self.runs(rank)) for rank in ranks)

    def runs(self, rank: int) -> list[tuple[int, int]]:
        """Queries that a context rank has side by side, and the keys that it gives them, of each run in a row."""
        context = self.parallel.context
        if context == 1:
            return [(self.seq_len, self.seq_len)]
        # A rank has two chunks, one from either side of the row's middle; its keys begin where the window does.
        each, window = self.seq_len // (2 * context), self.shape.sliding_window or self.seq_len
        return [
            (each, (chunk + 1) * each - max(0, chunk * each - window + 1)) for chunk in (rank, 2 * context - 1 - rank)
        ]

    @property
    def has_mask(self) -> bool:
        """Something is added to scores: rows that are one document have no mask, unless a window is narrower."""
        window = self.shape.sliding_window
        narrow = window is not None and window < self.seq_len
        return self.packed or self.shape.family.positions == "alibi" or narrow or self.parallel.context > 1

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


@dataclass(frozen=True)
class Cost:
    """Of one layer and one micro-batch, on one rank."""

    saved: int
    """Bytes kept from the forward pass to the backward pass."""
    products: int
    """FLOPs of matrix products that are done once more."""
    elementwise: int
    """Other FLOPs that are done once more, about."""
    traffic: int = 0
    """Bytes that are read and written for it."""

    @property
    def flops(self) -> int:
        return self.products + self.elementwise


def cost(setting: Setting, operations: Collection[Operation]) -> Cost:
    """What a layer keeps and repeats where `operations` are replayed."""
    layer = Layer(setting)
    if "layer" in operations:
        elementwise = sum(recipe.elementwise for recipe in layer.recipes.values())
        return Cost(layer.sizes["x"], layer.products, elementwise, sum(layer.sizes.values()))
    kept, replayed = _split(layer, operations)
    core = bool(layer.core_inputs) and "attention_core" in operations
    # What is read and written: inputs of what is repeated, and what is made.
    passing = {name for recipe in replayed.values() for name in recipe.inputs} | set(layer.core_inputs if core else ())
    passing |= {name for name, by in layer.made_by.items() if by in replayed} | ({"mixed"} if core else set())
    return Cost(
        saved=sum(layer.sizes[name] for name in kept),
        products=_repeated(layer, operations, replayed),
        elementwise=sum(recipe.elementwise for recipe in replayed.values()),
        traffic=sum(layer.sizes[name] for name in passing),
    )


def kept(setting: Setting, operations: Collection[Operation]) -> dict[str, int]:
    """Bytes of each tensor that a layer keeps where `operations` are replayed, by the layer's names for them."""
    layer = Layer(setting)
    names = {"x"} if "layer" in operations else _split(layer, operations)[0]
    return {name: layer.sizes[name] for name in sorted(names)}


def _split(layer: Layer, operations: Collection[Operation]) -> tuple[set[str], dict[str, Recipe]]:
    """Which tensors are kept, and which recipes are followed."""
    reads = [*layer.read, *(layer.core_inputs if "attention_core" in operations else layer.core_read)]
    names: set[str] = set()
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
            names.add(name)
    return names, replayed


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
    of: Setting | None = None,
) -> int:
    """`model_flops` and the matrix products done again, where `replayed` says of each layer which operations are.

    `of` is one micro-batch of the run, whose size and layout decide what a replay must make; None: it is all tokens.

    A replayed attention core costs two products, as the text of Korthikanti et al. 2022 (appendix A) says. With
    `equation_8` it costs six, a whole forward and backward pass, as their equation 8 prints and their table 5 shows.
    Whole layers replayed are equation 3 of Narayanan et al. 2021. What a fused core repeats within its own backward
    pass is not counted.
    """
    setting = Setting(shape, seq_len=tokens, micro_batch=1, element=1, lora=lora, attended=pairs)
    total = model_flops(shape, tokens=tokens, pairs=pairs, lora=lora)
    layer, made_of = Layer(setting), Layer(of or setting)
    for some, layers in Counter(map(frozenset, replayed)).items():
        total += layers * _repeated(layer, some, _split(made_of, some)[1])
        if equation_8 and "attention_core" in some:
            total += layers * 2 * layer.core_products
    return total


def _repeated(layer: Layer, operations: Collection[Operation], recipes: Iterable[str]) -> int:
    """FLOPs of the matrix products that are done once more, where these recipes are followed."""
    if "layer" in operations:
        return layer.products
    core = bool(layer.core_inputs) and "attention_core" in operations
    return sum(layer.recipes[name].products for name in recipes) + core * layer.core_products


class Layer:
    """A layer's backward pass: what it reads, how large that is, and which of it can be made again."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.shape, self.element = setting, setting.shape, setting.element
        self.lora, self.ranks = setting.lora, setting.parallel.tensor
        self.adapted = frozenset(self.lora.targets_in(self.shape)) if self.lora is not None else frozenset()
        self.sizes: dict[str, int] = {}
        """Bytes of each tensor."""
        self.made_by: dict[str, str] = {}
        """Tensor to the recipe that can make it."""
        self.recipes: dict[str, Recipe] = {}
        self.read: list[str] = []
        """Tensors that backward reads, whatever is replayed."""
        self.core_read: list[str] = []
        """Tensors that the attention core's backward reads besides, unless the core is replayed from `core_inputs`."""
        self.core_inputs: tuple[str, ...] = ()
        self.core_products = 0
        self.products = 0
        """FLOPs of the whole layer's matrix products, forward."""
        self._between("x")
        self._feed_forward(self._attention(setting.reached))

    def _attention(self, reached: bool) -> bool:
        """From `x` to `x2`; whether these need a gradient, given that of the first."""
        shape, tokens = self.shape, self.setting.tokens
        self._norm("norm1", "x", reached)
        width, queries = shape.hidden_size, shape.num_heads * shape.head_dim // self.ranks
        outputs = {name: keys_per_rank(shape, tensor=self.ranks) for name in ("q", "k", "v")} | {"q": queries}
        products = self._matrices("norm1", {name: (width, size) for name, size in outputs.items()}, whole=tokens)
        self.recipes["qkv"] = Recipe("qkv", ("norm1",), products)
        for name, size in outputs.items():
            by = "qkv"
            if shape.qk_norm and name != "v":
                by = self._head_norm(name, size, reached or name in self.adapted)
            self._tensor(name, self.element * tokens * size, by)
        self._tensor("mixed", self.element * tokens * queries)
        self.core_products = 2 * MULTIPLY_ADD * self.setting.pairs * queries
        self.products += self.core_products
        learn = {name for name in outputs if reached or name in self.adapted}
        if reached := bool(learn):
            self._core(learn)
        self._matrices("mixed", {"o": (queries, width)}, whole=self.setting.own_tokens)
        reached = reached or "o" in self.adapted
        self._branch_mask("mixed", reached)
        self._between("x2")
        return reached

    def _core(self, learn: Collection[str]) -> None:
        """What softmax(Q K^T) V keeps where these of the three need a gradient."""
        heads = self.shape.num_heads // self.ranks
        self.core_inputs = ("q", "k", "v")
        shares = self.setting.parallel.context > 1
        if not self.shape.attention_dropout:
            # The logarithm of each row's sum, and the output, which the matrix behind it reads too.
            self._tensor("core.sums", FP32 * self.setting.tokens * heads)
            self.core_read = [*self.core_inputs, "core.sums", "mixed"]
            if self._repeats_keys():
                # Copies of all keys in sight, one for each query head. Context ranks keep their own keys besides.
                own = self.core_inputs if shares else ("q",)
                for name in ("k", "v"):
                    self._tensor(
                        f"{name}.repeated", self.element * self.setting.keys_in_sight * heads * self.shape.head_dim
                    )
                self.core_read = [*own, "k.repeated", "v.repeated", "core.sums", "mixed"]
            return
        # The probabilities, their mask and what it leaves of them: 5 bytes a score (Korthikanti et al. 2022, section
        # 4.1). Products read copies of queries, keys and values; of one row or head, keys and values themselves.
        scores, width = heads * self.setting.scores, keys_per_rank(self.shape, tensor=self.ranks)
        self._tensor("chances", self.element * scores)
        self.recipes["dropped"] = Recipe("dropout", ("chances",), 0, MASK * scores)
        self._tensor("dropped", self.element * scores, "dropped")
        scores_learn = not {"q", "k"}.isdisjoint(learn)
        self.core_read = ["chances", self._mask("chances", scores)] if scores_learn else []
        # A product's gradient by one side needs the other.
        self.core_read += ["dropped"] if "v" in learn else []
        if shares:
            # A context rank keeps its own keys and values, and gathers the others' again; and what became of all.
            self.core_read += ["k", "v", "mixed"]
        for name, is_read in {"q": "k" in learn, "k": "q" in learn, "v": scores_learn}.items():
            is_copy = name == "q" or (self.setting.micro_batch > 1 and width > self.shape.head_dim)
            if not is_read or (shares and not is_copy):
                continue
            size = self.sizes[name]
            if shares and name != "q":
                size = self.element * self.setting.keys_in_sight * width
            self._tensor(f"{name}.read", size, None if is_copy else self.made_by[name])
            self.core_read.append(f"{name}.read")

    def _repeats_keys(self) -> bool:
        """The CUDA kernel that takes a mask knows no groups of heads, and is given a copy for each head."""
        grouped = self.sizes["k"] < self.sizes["q"]
        return self.setting.on_cuda and self.setting.has_mask and grouped

    def _feed_forward(self, reached: bool) -> None:
        """From `x2` on."""
        tokens, width = self.setting.tokens, self.shape.hidden_size
        inner = self.shape.ffn_hidden_size // self.ranks
        self._norm("norm2", "x2", reached)
        inward = tuple(name for name in self.shape.family.matrices if name in ("gate", "up"))
        products = self._matrices("norm2", dict.fromkeys(inward, (width, inner)), whole=tokens)
        self.recipes["up"] = Recipe("up_projection", ("norm2",), products)
        for name in inward:
            self._tensor(name, self.element * tokens * inner, "up")
        self.recipes["active"] = Recipe("activation", inward, 0, ACTIVATION * tokens * inner)
        self._tensor("active", self.element * tokens * inner, "active")
        if reached := reached or not self.adapted.isdisjoint(inward):
            self.read += inward
        self._matrices("active", {"down": (inner, width)}, whole=self.setting.own_tokens)
        self._branch_mask("inner", reached or "down" in self.adapted)

    def _matrices(self, of: str, outputs: Mapping[str, tuple[int, int]], *, whole: int) -> int:
        """What matrices of one input read, by name with their inputs and outputs; FLOPs of their products.

        `whole` are the tokens of what travels between an adapter's two.
        """
        products = 0
        for name, (inputs, size) in outputs.items():
            rank = self.lora.rank if self.lora is not None and name in self.adapted else 0
            # Beside a column layer A reads a rank's own tokens, beside a row layer B makes them.
            above, below = (self.setting.own_tokens, self.setting.tokens)[:: 1 if name in COLUMNS else -1]
            products += MULTIPLY_ADD * self.setting.tokens * inputs * size
            products += MULTIPLY_ADD * rank * (above * inputs + below * size)
            if self.lora is None:
                self.read.append(of)
            if not rank:
                continue
            read = of
            if self.lora is not None and self.lora.dropout:
                read = f"{name}.dropped"
                self.recipes[read] = Recipe("dropout", (of,), 0, MASK * self.sizes[of] // self.element)
                self._tensor(read, self.sizes[of], read)
            self._tensor(f"{name}.adapter", self.element * whole * rank)
            self.read += [read, f"{name}.adapter"]
        self.products += products
        return products

    def _norm(self, name: str, of: str, reached: bool) -> None:
        elements = self.setting.own_tokens * self.shape.hidden_size
        statistics = 2 if self.shape.family.norm == "layer" else 1
        self._tensor(f"{name}.statistics", FP32 * self.setting.own_tokens * statistics)
        self.recipes[name] = Recipe("norm", (of,), 0, NORM * elements)
        self._tensor(name, self.element * elements, name)
        if reached:
            self.read += [of, f"{name}.statistics"]

    def _head_norm(self, name: str, size: int, reached: bool) -> str:
        """Of queries or keys, which are kept as they were before, with one statistic for each head; the recipe."""
        elements = self.setting.tokens * size
        self._tensor(f"{name}.raw", self.element * elements, "qkv")
        self._tensor(f"{name}.statistics", FP32 * elements // self.shape.head_dim)
        self.recipes[name] = Recipe("qkv", (f"{name}.raw",), 0, NORM * elements)
        if reached:
            self.read += [f"{name}.raw", f"{name}.statistics"]
        return name

    def _branch_mask(self, name: str, reached: bool) -> None:
        """Of dropout on what is added to the residual, where there is such."""
        if reached and self.shape.hidden_dropout and "branches" in self.shape.family.drops:
            self.read.append(self._mask(name, self.setting.own_tokens * self.shape.hidden_size))

    def _mask(self, name: str, elements: int) -> str:
        """A mask of a byte each, drawn again from nothing; its name."""
        name = f"{name}.mask"
        self.recipes[name] = Recipe("dropout", (), 0, MASK * elements)
        self._tensor(name, elements, name)
        return name

    def _between(self, name: str) -> None:
        """A residual."""
        self._tensor(name, self.element * self.setting.own_tokens * self.shape.hidden_size)

    def _tensor(self, name: str, size: int, by: str | None = None) -> None:
        self.sizes[name] = size
        if by is not None:
            self.made_by[name] = by
