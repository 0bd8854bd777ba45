"""Sums and products in fp32 by blocks are those of the whole tensors."""

from __future__ import annotations

import pytest
import torch

from engine import cached
from engine.cached import add_wide, rows_in_cache, scaled, widened


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "ELEMENTS", 100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_part_is_added_without_being_rounded(dtype: torch.dtype) -> None:
    total, part = torch.randn(37, 11), torch.randn(37, 11).to(dtype)
    expected = total + part.float()
    add_wide(total, part)
    assert torch.equal(total, expected)


def test_a_part_may_lie_in_memory_in_another_order() -> None:
    total, part = torch.zeros(37, 11), torch.randn(11, 37).bfloat16().t()
    add_wide(total, part)
    assert torch.equal(total, part.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_product_is_rounded_once(dtype: torch.dtype) -> None:
    x, factor = torch.randn(37, 11).to(dtype), torch.tensor(1 / 3000)
    expected = (x.float() * factor).bfloat16()
    assert torch.equal(scaled(x, factor, torch.bfloat16), expected)


def test_the_caches_keep_at_least_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert rows_in_cache(torch.empty(40, 10)) == 20
    assert rows_in_cache(torch.empty(41, 10)) == 14
    # One more than the caches keep of 202, and no less than a row.
    assert rows_in_cache(torch.empty(20, 101)) == 2
    assert rows_in_cache(torch.empty(50, 102)) == 1
    assert rows_in_cache(torch.empty(5, 10)) == 5
    assert rows_in_cache(torch.empty(5, 1000)) == 1


def test_tensors_side_by_side_come_in_fp32_in_stretches_that_hold_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "WIDENED", 100)
    parts = [torch.randn(size).bfloat16() for size in (30, 70, 250, 1)]
    stretches = [(first, wide_K.clone()) for first, wide_K in widened(parts)]
    assert [(first, len(wide_K)) for first, wide_K in stretches] == [(0, 100), (100, 100), (200, 100), (300, 51)]
    assert torch.equal(torch.cat([wide_K for _, wide_K in stretches]), torch.cat(parts).float())


def test_what_is_fp32_already_comes_as_it_is() -> None:
    parts = [torch.randn(3, 5), torch.randn(7)]
    (zero, first), (fifteen, second) = widened(parts)
    assert (zero, fifteen) == (0, 15)
    assert first.data_ptr() == parts[0].data_ptr()
    assert second.data_ptr() == parts[1].data_ptr()
