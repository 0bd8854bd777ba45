"""Gradients of matrices are sums over tokens, whichever factor is turned for them."""

from __future__ import annotations

import pytest
import torch

from engine import outer
from engine.outer import outer_sums, turned


@pytest.mark.parametrize("gap", [0, 32])
@pytest.mark.parametrize(("rows", "columns"), [(64, 40), (96, 7), (288, 130), (32, 1)])
def test_turning_changes_no_number(rows: int, columns: int, gap: int) -> None:
    x_MK = torch.randn(rows, columns).bfloat16()
    assert torch.equal(turned(x_MK, gap=gap), x_MK.t())
    assert torch.equal(turned(x_MK[:, : columns // 2 + 1], gap=gap), x_MK[:, : columns // 2 + 1].t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("several", [1, 3])
@pytest.mark.parametrize(("tokens", "features"), [(128, 48), (128, 96), (128, 50), (77, 96)])
def test_each_gradient_is_the_sum_of_outer_products(
    tokens: int, features: int, several: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outer, "WIDE", 96)
    torch.manual_seed(0)
    x_ND = torch.randn(tokens, features).to(dtype)
    grads_NE = [torch.randn(tokens, 10 + number).to(dtype) for number in range(several)]
    for got_ED, grad_NE in zip(outer_sums(grads_NE, x_ND), grads_NE, strict=True):
        expected_ED = torch.einsum("ne,nd->ed", grad_NE.double(), x_ND.double())
        assert got_ED.dtype == dtype
        # Rounded once, and summed in fp32.
        torch.testing.assert_close(got_ED.double(), expected_ED, rtol=torch.finfo(dtype).eps, atol=1e-4)
