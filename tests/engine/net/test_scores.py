"""The attention core's plain backward pass has the gradients of torch's fused kernel, whatever a query sees."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine import scores
from engine.attention import fused_core
from engine.scores import plain_core
from tests.engine.net import nets

Q, K = 70, 90


def sees(kind: str) -> Tensor | None:
    """B or 1, H or 1, Q K, as each caller of the core has it."""
    if kind == "causal":
        return None
    past = 0 if kind == "a whole row" else K - Q
    keys = Q + past
    documents_BK = torch.tensor([[0] * 40 + [1] * (keys - 40), [0] * (keys - 5) + [1] * 5])
    before_QK = torch.ones(Q, keys, dtype=torch.bool).tril(past)
    mask = (documents_BK[:, None, past:, None] == documents_BK[:, None, None, :]) & before_QK
    # By head, as slopes are.
    slopes_H11 = torch.arange(4.0)[:, None, None] / 8
    added = -slopes_H11 * torch.arange(keys - 1, -1, -1.0) if kind == "slopes" else torch.zeros(1, 1, keys)
    return added.expand(2, -1, Q, -1).masked_fill(~mask, float("-inf"))


def gradients(core: Callable[..., Tensor], kind: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    mask = sees(kind)
    keys = Q if mask is None else mask.shape[-1]
    q, k, v = (
        torch.randn(2, tokens, heads, 8, generator=generator).requires_grad_()
        for tokens, heads in ((Q, 4), (keys, 2), (keys, 2))
    )
    mixed = core(q, k, v, mask)
    mixed.backward(torch.randn(mixed.shape, generator=generator))
    return [x.grad for x in (q, k, v) if x.grad is not None]


@pytest.mark.parametrize("block", [256, 64, 16], ids=["in one", "in two", "in five"])
@pytest.mark.parametrize("kind", ["causal", "a whole row", "after others", "slopes"])
def test_gradients_are_those_of_the_fused_kernel(kind: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # In fp32, where both are exact to the last digits.
    monkeypatch.setattr(scores, "QUERIES", (block, block))
    expected = gradients(fused_core, kind)
    got = gradients(plain_core, kind)
    assert len(got) == 3
    for ours, theirs in zip(got, expected, strict=True):
        assert nets.distance(ours, theirs) <= 2e-6


def test_scores_of_a_long_row_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "QUERIES", (8, 256))
    monkeypatch.setattr(scores, "SCORES", 2 * 4 * 8 * Q)
    sizes = []
    exp_ = Tensor.exp_

    def noted(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return exp_(x)

    monkeypatch.setattr(Tensor, "exp_", noted)
    gradients(plain_core, "causal")
    assert max(sizes) <= 2 * 4 * 8 * Q
    assert len(sizes) == -(-Q // 8)


@pytest.mark.parametrize("peak", [1, 8])
def test_in_bf16_gradients_stay_near_those_of_fp64_also_where_few_keys_have_the_weight(peak: int) -> None:
    generator = torch.Generator().manual_seed(4)
    # 1 / sqrt(48) is not a number that bf16 has.
    q, k, v = (torch.randn(2, 300, 4, 48, generator=generator).bfloat16() for _ in range(3))
    grad = torch.randn(2, 300, 4 * 48, generator=generator).bfloat16()

    def of(core: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q * peak, k, v)]
        core(*inputs, None).backward(grad.to(dtype))
        return [x.grad.double() for x in inputs if x.grad is not None]

    for ours, exact in zip(of(plain_core, torch.bfloat16), of(fused_core, torch.float64), strict=True):
        assert ((ours - exact).norm() / exact.norm()).item() <= 1e-2
