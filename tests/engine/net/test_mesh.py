"""The mesh: who is whose neighbour."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from engine import mesh
from engine.config import Parallel
from engine.together import together
from tests.worlds import RankFailed, World


def test_tensor_ranks_are_neighbours_and_data_ranks_are_apart() -> None:
    parallel = Parallel(tensor=2, data=2)
    assert mesh.members(parallel, "tensor") == [[0, 1], [2, 3]]
    assert mesh.members(parallel, "data") == [[0, 2], [1, 3]]
    assert mesh.coordinates(parallel, 3) == {"tensor": 1, "context": 0, "data": 1, "pipeline": 0}


def test_groups_are_named_by_what_their_ranks_share() -> None:
    groups: dict[str, list[list[int]]] = {}
    parallel = Parallel.model_construct(tensor=4, context=1, data=2, pipeline=2)
    for name, ranks in mesh.groups_of(parallel):
        groups.setdefault(name, []).append(ranks)
    assert (
        groups["replicas"] == groups["data"] == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    )
    assert groups["model"] == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert groups["ends"] == groups["pipeline"] == [[rank, rank + 8] for rank in range(8)]
    assert groups["tensor/2"] == [[first, first + 1] for first in range(0, 16, 2)]
    assert groups["tensor/4"] == groups["tensor"]


def test_ends_are_the_first_and_the_last_stage() -> None:
    parallel = Parallel.model_construct(tensor=1, context=1, data=1, pipeline=4)
    assert [ranks for name, ranks in mesh.groups_of(parallel) if name == "ends"] == [[0, 3]]


def test_replicas_are_numbered_with_context_fastest() -> None:
    parallel = Parallel.model_construct(tensor=2, context=2, data=2, pipeline=1)
    grid = [mesh.Mesh(parallel, rank, torch.device("cpu")) for rank in range(8)]
    assert [one.rank("replicas") for one in grid] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [one.size("replicas") for one in grid] == [4] * 8


def test_a_mesh_of_another_size_than_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="asks for 2 ranks"):
        mesh.build(Parallel(tensor=2))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(f"cuda:{torch.cuda.device_count()}", "torch sees", id="one too many"),
        pytest.param("gpu", "use cpu, cuda or cuda:N", id="no such kind"),
        pytest.param("meta", "use cpu, cuda or cuda:N", id="a kind that holds no numbers"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_what_is(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh.device_named(name)


@pytest.mark.parametrize("queues", ["1", "8", "many"])
def test_a_pipeline_whose_streams_share_few_queues_is_refused(monkeypatch: pytest.MonkeyPatch, queues: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    with pytest.raises(ValueError, match=f"CUDA_DEVICE_MAX_CONNECTIONS={queues} .* unset it, or set it to 32"):
        mesh.build(Parallel(pipeline=2), "cuda")


def test_queues_of_a_device_are_enough_unless_the_environment_says_otherwise() -> None:
    for enough in (None, "32"):
        mesh.check_queues(enough)


def sum_over_tensor() -> float:
    grid = mesh.build(Parallel(tensor=2))
    x = torch.tensor([float(grid.rank("tensor") + 1)])
    dist.all_reduce(x, group=grid.group("tensor"))
    grid.barrier()
    grid.close()
    return x.item()


def test_ranks_of_a_group_hear_each_other(world2: World) -> None:
    assert world2.run(sum_over_tensor) == [3.0, 3.0]


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("lost")
    dist.barrier()


def leave_while_rank_0_is_still_forming(notes: str) -> None:
    store = dist.FileStore(notes, 2)
    form = dist.new_group

    def slowly(*args: object, **kwargs: object) -> object:
        group = form(*args, **kwargs)
        with pytest.raises(RuntimeError, match=r"(?i)timeout"):
            store.wait(["rank 1 is done"], timedelta(milliseconds=300))
        return group

    if dist.get_rank() == 0:
        with patch.object(dist, "new_group", slowly):
            mesh.build(Parallel(tensor=2)).close()
    else:
        built = mesh.build(Parallel(tensor=2))
        store.set("rank 1 is done", "")
        built.close()


def test_no_rank_leaves_before_each_has_formed_its_groups(world2: World, tmp_path: Path) -> None:
    world2.run(leave_while_rank_0_is_still_forming, str(tmp_path / "notes"))


def test_a_failing_rank_is_named_and_the_next_case_runs_in_a_new_world(world2: World) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2 raised[\s\S]*KeyError: 'lost'"):
        world2.run(fail_on_rank_1)
    assert world2.run(sum_over_tensor) == [3.0, 3.0]


def full_device_on_rank_1() -> str:
    """What each rank raises where rank 1's device can't hold another number; one on "meta" never can."""
    grid = mesh.build(Parallel(data=2))
    try:
        with together(replace(grid, device=torch.device("meta"))):
            if grid.world_rank == 1:
                raise torch.OutOfMemoryError("full")
    except Exception as error:
        return type(error).__name__
    finally:
        grid.close()
    return "nothing"


def test_all_ranks_learn_that_one_failed_though_its_device_does_nothing_any_more(world2: World) -> None:
    assert world2.run(full_device_on_rank_1) == ["LostContact", "OutOfMemoryError"]
