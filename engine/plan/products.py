"""FLOPs of the matrix products that a rank really runs for one micro-batch, as torch's `FlopCounterMode` counts them.

`engine.plan.flops` says what a model needs by the papers' arithmetic. What runs differs: below the first adapter
nothing needs a gradient, a replay ends with the last tensor that is asked for, and a kernel has its own way to attend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.config import Operation
from engine.plan.flops import MULTIPLY_ADD
from engine.plan.holdings import COLUMNS, keys_per_rank
from engine.plan.recompute import FP32, Layer, Setting, cost
from engine.plan.stages import Stage

CPU_SCORES, CPU_QUERIES = 2**23, (64, 256)
"""Of the blocks in which a CPU attends, going back: most scores, least and most queries."""


def products(
    setting: Setting, own: Sequence[Stage], operations: frozenset[Operation], *, compares: bool = False
) -> int:
    """Forward and backward through these stages. `compares`: under DPO, which needs all logits twice.

    Of ranks that share rows, `setting.context_rank` says which.
    """
    total = 0
    for stage in own:
        reached = len(stage.layers)
        if setting.lora is not None and 0 in stage.layers:
            reached -= 1
            total += of_layer(replace(setting, reached=False), operations)
        total += reached * of_layer(setting, operations)
        total += stage.last * of_output(setting, compares=compares)
    return total


def of_output(setting: Setting, *, compares: bool) -> int:
    """The logits, the gradient of what they are made of, and that of the output's weight where it trains."""
    share = -(-setting.shape.vocab_size // setting.parallel.tensor)
    once = MULTIPLY_ADD * setting.tokens * setting.shape.hidden_size * share
    return once * (2 + (setting.lora is None) + compares)


def of_layer(setting: Setting, operations: frozenset[Operation]) -> int:
    """One layer, what is replayed of it included."""
    layer = _Layer(setting)
    return layer.forward + layer.backward + layer.again(operations)


class _Layer:
    """The products of a layer, in the order in which a token goes through them."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.shape, self.lora = setting, setting.shape, setting.lora
        self.adapted = set(setting.lora.targets_in(setting.shape)) if setting.lora is not None else set()
        self.forward = self.backward = 0
        hidden, ranks = self.shape.hidden_size, setting.parallel.tensor
        self.queries = self.shape.num_heads * self.shape.head_dim // ranks
        keys, inner = keys_per_rank(self.shape, tensor=ranks), self.shape.ffn_hidden_size // ranks
        learn = {
            name
            for name, size in {"q": self.queries, "k": keys, "v": keys}.items()
            if self._matrix(name, hidden, size, reached=setting.reached)
        }
        self.learns_to_attend = bool(learn)
        self._core(learn)
        reached = self._matrix("o", self.queries, hidden, reached=bool(learn)) or setting.reached
        inward = [name for name in self.shape.family.matrices if name in ("gate", "up")]
        found = [self._matrix(name, hidden, inner, reached=reached) for name in inward]
        self._matrix("down", inner, hidden, reached=any(found))

    def _matrix(self, name: str, inputs: int, outputs: int, *, reached: bool) -> bool:
        """Whether what a matrix gives needs a gradient, given whether what it reads does."""
        tokens, own = self.setting.tokens, self.setting.own_tokens
        self._product(MULTIPLY_ADD * tokens * inputs * outputs, by=reached + (self.lora is None))
        if self.lora is None:
            return True
        if name not in self.adapted:
            return reached
        # Beside a column layer A reads a rank's own tokens, beside a row layer B makes them.
        above, below = (own, tokens) if name in COLUMNS else (tokens, own)
        self._product(MULTIPLY_ADD * above * inputs * self.lora.rank, by=1 + reached)
        self._product(MULTIPLY_ADD * below * self.lora.rank * outputs, by=2)
        return True

    def _product(self, flops: int, *, by: int) -> None:
        """Of which so many factors need a gradient."""
        self.forward += flops
        self.backward += by * flops

    def _core(self, learn: set[str]) -> None:
        forward, backward = self._of_core(learn)
        self.core_forward = forward
        self.forward += forward
        self.backward += backward

    def _of_core(self, learn: set[str]) -> tuple[int, int]:
        setting = self.setting
        heads = self.shape.num_heads // setting.parallel.tensor
        product = MULTIPLY_ADD * setting.scores * heads * self.shape.head_dim
        if self.shape.attention_dropout:
            # By way of score matrices: of two products each factor that needs a gradient takes one more.
            scores_learn = not learn.isdisjoint({"q", "k"})
            return 2 * product, product * (scores_learn + len(learn))
        if setting.on_cuda:
            # A fused kernel keeps no scores: going back, it makes them once more.
            return 2 * product, 5 * product * bool(learn)
        # Torch does not count its fused kernels on a CPU, of which fp32 has one each way.
        return 0, 0 if setting.element == FP32 or not learn else self._on_cpu(heads)

    def _on_cpu(self, heads: int) -> int:
        """`engine.scores`, going back: five products over the scores that a block of queries sees."""
        rows, width = self.setting.micro_batch, self.shape.head_dim
        seen = 0
        for queries, keys in self.setting.runs(self.setting.context_rank or 0):
            block = max(CPU_QUERIES[0], min(CPU_QUERIES[1], CPU_SCORES // (rows * heads * keys)))
            for start in range(0, queries, block):
                stop = min(start + block, queries)
                seen += (stop - start) * (keys - queries + stop)
        # Two of them have two columns more, for what is taken off each row.
        return MULTIPLY_ADD * rows * heads * seen * (5 * width + 2 * 2)

    def again(self, operations: frozenset[Operation]) -> int:
        """What is replayed."""
        if "layer" in operations:
            return self.forward - self._behind_the_last()
        core = "attention_core" in operations and self.learns_to_attend
        planned = cost(self.setting, operations).products - core * Layer(self.setting).core_products
        if core:
            # The last product's factors are all that is asked for; a fused kernel has to finish.
            planned += self.core_forward - (self._last_of_core() if self.shape.attention_dropout else 0)
        return planned

    def _last_of_core(self) -> int:
        """The second product of the last queries, where scores are made."""
        queries, keys = self.setting.runs(self.setting.context_rank or 0)[-1]
        return MULTIPLY_ADD * self.setting.micro_batch * queries * keys * self.queries

    def _behind_the_last(self) -> int:
        """Of a layer that is replayed, what follows the last tensor that is asked for."""
        masked = self.shape.hidden_dropout and "branches" in self.shape.family.drops
        if self.lora is None or "down" not in self.adapted or masked:
            return 0
        return MULTIPLY_ADD * self.setting.own_tokens * self.lora.rank * self.shape.hidden_size
