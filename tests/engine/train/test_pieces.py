"""Rectangles of flat runs, against a tensor of numbers."""

from itertools import combinations

import pytest
import torch

from engine.pieces import Rectangle, cover, globally, without_padding
from engine.placement import shard


@pytest.mark.parametrize(("start", "stop"), list(combinations(range(13), 2)))
def test_a_run_is_at_most_three_rectangles_which_hold_its_elements_in_order(start, stop):
    whole = torch.arange(12).view(3, 4)
    parts = cover((3, 4), start, stop)
    held = [whole[part.within(Rectangle((0, 0), (3, 4)))].flatten() for part in parts]
    assert len(parts) <= 3
    assert torch.cat(held).tolist() == list(range(start, stop))


def test_a_run_of_a_vector_is_one_rectangle():
    assert cover((7,), 2, 5) == [Rectangle((2,), (3,))]


def test_padding_of_a_short_last_shard_is_left_out():
    # 5 rows over 2 ranks: 3 and 2, so that rank 1's local tensor has a row of padding.
    placement = shard((5, 4), dim=0, rank=1, size=2)
    assert without_padding(Rectangle((1, 0), (2, 4)), placement) == Rectangle((1, 0), (1, 4))
    assert without_padding(Rectangle((2, 1), (1, 2)), placement) is None


def test_a_local_box_lies_after_the_ranks_before_it():
    placement = shard((4, 6), dim=1, rank=1, size=2)
    assert globally(Rectangle((2, 1), (1, 2)), placement) == Rectangle((2, 4), (1, 2))


def test_boxes_that_only_touch_do_not_overlap():
    assert Rectangle((0, 0), (2, 2)).overlap(Rectangle((2, 0), (2, 2))) is None
    assert Rectangle((0, 0), (2, 3)).overlap(Rectangle((1, 1), (5, 5))) == Rectangle((1, 1), (1, 2))
