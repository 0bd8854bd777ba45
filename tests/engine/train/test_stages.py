"""Layers are dealt out to the stages of a pipeline so that the slowest is as fast as can be."""

from __future__ import annotations

from itertools import product

import pytest

from engine.config import Parallel
from engine.plan.stages import chunks, output_in_layers, split, stages
from tests.engine.net.nets import shape


def every_deal(layers: int, count: int) -> list[tuple[int, ...]]:
    """All ways to give `count` stages `layers` layers, where only the last may go without."""
    return [deal for deal in product(range(layers + 1), repeat=count) if sum(deal) == layers and 0 not in deal[:-1]]


@pytest.mark.parametrize("output", [0.0, 0.4, 1.0, 2.5, 9.0])
@pytest.mark.parametrize(("layers", "pipeline", "virtual"), [(5, 2, 1), (6, 2, 2), (7, 3, 1), (4, 4, 1), (9, 2, 2)])
def test_no_deal_has_a_smaller_largest_stage(output: float, layers: int, pipeline: int, virtual: int) -> None:
    def largest(deal: tuple[int, ...]) -> float:
        return max(*deal[:-1], deal[-1] + output)

    deal = split(layers, Parallel(pipeline=pipeline, virtual=virtual), output=output)
    assert largest(deal) == min(map(largest, every_deal(layers, pipeline * virtual)))


def test_layers_that_weigh_alike_are_shared_evenly_with_the_surplus_on_ranks_that_keep_less() -> None:
    assert split(8, Parallel(pipeline=4), output=0.1) == (2, 2, 2, 2)
    assert split(10, Parallel(pipeline=4), output=0.1) == (2, 3, 3, 2)
    # Stages 0 and 2 are one rank's, 1 and 3 the other's, which has the output.
    assert split(5, Parallel(pipeline=2, virtual=2), output=0.1) == (1, 1, 2, 1)


def test_an_output_as_heavy_as_its_share_stands_alone() -> None:
    assert split(24, Parallel(pipeline=4), output=9.0) == (8, 8, 8, 0)


def test_the_output_weighs_as_many_layers_as_its_matrix_has_their_weights() -> None:
    # 32 x 96 against 32 x (32 + 16 + 16 + 32) + 3 x 32 x 48 in each layer.
    assert output_in_layers(shape()) == pytest.approx(32 * 96 / (32 * 96 + 3 * 32 * 48))


def test_a_rank_has_every_nth_stage_and_the_ends_have_the_ends() -> None:
    parallel = Parallel(pipeline=2, virtual=2, stages=(1, 3, 2, 0))
    first, second = (chunks(shape(num_layers=6), parallel, rank=rank) for rank in range(2))
    assert [(list(chunk.layers), chunk.first, chunk.last) for chunk in first] == [
        ([0], True, False),
        ([4, 5], False, False),
    ]
    assert [(list(chunk.layers), chunk.first, chunk.last) for chunk in second] == [
        ([1, 2, 3], False, False),
        ([], False, True),
    ]


def test_one_rank_has_all_of_the_model() -> None:
    (only,) = stages(shape(), Parallel())
    assert (list(only.layers), only.first, only.last) == ([0, 1], True, True)


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        pytest.param({"pipeline": 4}, r"pipeline=4 makes 4 stages of num_layers=2.* try pipeline=2", id="stages"),
        pytest.param({"pipeline": 2, "virtual": 2}, r"virtual=2 makes 4 stages.* try virtual=1", id="virtual"),
        pytest.param({"virtual": 2}, "needs a pipeline", id="virtual stages of one"),
        pytest.param({"pipeline": 2, "stages": [2]}, r"stages=\[2\] must be 2 numbers", id="count"),
        pytest.param({"pipeline": 2, "stages": [2, 1]}, "sum up to num_layers=2", id="sum"),
        pytest.param({"pipeline": 2, "stages": [0, 2]}, "only the last may be 0", id="nothing in front"),
    ],
)
def test_what_cannot_be_cut_into_stages_is_refused_with_what_can(parallel: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Parallel.model_validate(parallel).check(shape(), seq_len=16)
