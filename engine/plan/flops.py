"""FLOPs that a model needs, whatever the hardware really does: matrix products only, recomputation left out.

After Narayanan et al. 2021 (appendix) and Korthikanti et al. 2022, equation 7, generalised from their GPT layer to
grouped-query attention, gated feed-forward layers, packed documents, sliding windows and frozen weights. As there, a
causal mask is not discounted: a token of a document of `n` tokens attends to `n`, or to as many as its window has.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import Lora, ModelShape

MULTIPLY_ADD = 2


@dataclass(frozen=True)
class Matrix:
    """One matrix product that each token goes through."""

    inputs: int
    outputs: int
    adapter_rank: int = 0
    """Of the low-rank pair beside it; 0 is none."""

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs

    @property
    def adapter_weights(self) -> int:
        return self.adapter_rank * (self.inputs + self.outputs)


def layer_matrices(shape: ModelShape, lora: Lora | None = None) -> dict[str, Matrix]:
    """The matrices of one layer, by the names that `Lora.targets` has for them."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {
        "q": (shape.hidden_size, queries),
        "k": (shape.hidden_size, keys),
        "v": (shape.hidden_size, keys),
        "o": (queries, shape.hidden_size),
        "gate": (shape.hidden_size, shape.ffn_hidden_size),
        "up": (shape.hidden_size, shape.ffn_hidden_size),
        "down": (shape.ffn_hidden_size, shape.hidden_size),
    }
    adapted = lora.targets_in(shape) if lora is not None else ()
    rank = lora.rank if lora is not None else 0
    return {name: Matrix(*sizes[name], adapter_rank=rank if name in adapted else 0) for name in shape.family.matrices}


def matrices(shape: ModelShape, lora: Lora | None = None) -> list[Matrix]:
    """Every matrix that a token goes through, the output layer last. Looking up an embedding costs nothing."""
    layer = list(layer_matrices(shape, lora).values())
    return layer * shape.num_layers + [Matrix(shape.hidden_size, shape.vocab_size)]


def attention_per_pair(shape: ModelShape) -> int:
    """Forward operations for one token that attends to one other: the score and the weighted sum, over all layers."""
    return 2 * MULTIPLY_ADD * shape.num_layers * shape.num_heads * shape.head_dim


def model_flops(shape: ModelShape, *, tokens: int, pairs: int, lora: Lora | None = None) -> int:
    """Operations to train on `tokens`, forward and backward.

    `pairs` is the number of (token, token attended to): the sum of n * min(n, window) over documents of n
    tokens.
    Backward is one product for a matrix's input and one for its weights; frozen weights need only the first.
    """
    each = 0
    for matrix in matrices(shape, lora):
        each += MULTIPLY_ADD * matrix.weights * (3 if lora is None else 2)
        each += MULTIPLY_ADD * matrix.adapter_weights * 3
    return tokens * each + 3 * pairs * attention_per_pair(shape)
