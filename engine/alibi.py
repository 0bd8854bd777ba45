"""Attention with linear biases: a score falls with the distance of the two tokens (Press et al. 2021, section 3).

H heads of this rank, Q queries, K keys in sight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.comm import TensorAxis


def slopes(heads: int, axis: TensorAxis, device: torch.device) -> Tensor:
    """How fast the scores of each of this rank's heads fall, fp32 H, by the head's number in the whole model.

    2^(-8 i / n) for the i-th of n heads; where n is no power of two, the slopes of the next smaller one, and then every
    second of the next larger one, as in the paper's code.
    """
    power = 1 << (heads.bit_length() - 1)
    every = [_slope(head, power) for head in range(1, power + 1)]
    every += [_slope(head, 2 * power) for head in range(1, 2 * (heads - power), 2)]
    own = heads // axis.size
    return torch.tensor(every[axis.rank * own : (axis.rank + 1) * own], dtype=torch.float32, device=device)


def bias(slopes_H: Tensor, queries: range, keys: range) -> Tensor:
    """What is added to each score, fp32 H Q K, of `queries` and `keys` by their places in the row.

    Distance within a row is distance within a document, so that packed documents need no more than what parts them. A
    score of a later key is of no meaning.
    """
    at_Q = torch.arange(queries.start, queries.stop, device=slopes_H.device)
    at_K = torch.arange(keys.start, keys.stop, device=slopes_H.device)
    return -slopes_H[:, None, None] * (at_Q[:, None] - at_K)


def _slope(head: int, heads: int) -> float:
    return float(2 ** (-8 * head / heads))
