"""What ranks hold alike is compared in real runs: a flipped bit is named, and nothing else is."""

import os

import pytest
import torch

from engine import trainer
from engine.failure import RunFailure
from engine.replicas import CHUNK, checksum
from engine.stop import StopWish
from tests.engine.train import runs


def flip(x, place=0):
    """Change the last bit of the mantissa of one number."""
    with torch.no_grad():
        x.view(-1).view(torch.int32)[place] ^= 1


CASES = {
    "a-norm-over-tensor": (
        {"tensor": 2, "sequence": True},
        "model.norm.weight",
        "model.norm.weight differs between ranks that must hold the same, [0] and [1]; so do 1 more",
    ),
    "a-key-head-held-twice": (
        {"tensor": 2},
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.self_attn.k_proj.weight (dim 0 from 0) differs between ranks that must hold the same, [0] and "
        "[1]; so do 1 more",
    ),
    "a-matrix-over-data": (
        {"data": 2},
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight (dim 0 from 0) differs between ranks that must hold the same, [0] and [1]",
    ),
}


def flipped_on_rank_1(run_dir, run, name):
    """What each rank said when rank 1's weight lost a bit after the second step."""
    take_step = trainer.Work.take_step

    def and_flip(work, *args):
        take_step(work, *args)
        if work.step == 2 and int(os.environ["RANK"]) == 1:
            flip(dict(work.decoder.named_parameters())[name].data)

    trainer.Work.take_step = and_flip
    seen = []
    try:
        trainer.train(run, run_dir, seen.append, StopWish())
    except RunFailure as error:
        return error.code, len(runs.losses(seen)), str(error)
    finally:
        trainer.Work.take_step = take_step


@pytest.mark.parametrize(("parallel", "name", "says"), CASES.values(), ids=CASES)
def test_a_flipped_bit_is_named_on_every_rank(world2, tmp_path, parallel, name, says):
    run = runs.config(
        model=runs.SHAPE | {"num_kv_heads": 1}, parallel=parallel, training={"steps": 3, "check_replicas_every": 1}
    )
    runs.write(tmp_path, run)
    failed = world2.run(flipped_on_rank_1, tmp_path, run, name)
    assert [entry[:2] for entry in failed] == [("internal", 2)] * 2
    assert {said for _, _, said in failed} == {says}
    assert not (tmp_path / "checkpoints").exists()


def test_what_differs_is_not_saved(world2, tmp_path):
    run = runs.config(parallel={"tensor": 2}, training={"steps": 2, "check_replicas_every": None})
    runs.write(tmp_path, run)
    failed = world2.run(flipped_on_rank_1, tmp_path, run, "model.norm.weight")
    assert [entry[:2] for entry in failed] == [("internal", 2)] * 2
    assert not (tmp_path / "checkpoints").exists()


def drifted_moment(run_dir, run):
    take_step = trainer.Work.take_step

    def and_drift(work, *args):
        take_step(work, *args)
        if work.step == 2 and int(os.environ["RANK"]) == 1:
            flip(work.optimizer.averages_S, 40)

    trainer.Work.take_step = and_drift
    try:
        trainer.train(run, run_dir, lambda event: None, StopWish())
    except RunFailure as error:
        return str(error)
    finally:
        trainer.Work.take_step = take_step


def test_a_moment_that_drifts_is_seen_before_the_weights_differ(world2, tmp_path):
    run = runs.config(
        parallel={"data": 2, "shard_optimizer": False},
        training={"steps": 3, "check_replicas_every": 1, "precision": "bf16"},
    )
    runs.write(tmp_path, run)
    said = world2.run(drifted_moment, tmp_path, run)
    assert said[0] == said[1]
    assert "(optimizer's average" in said[0]
    assert said[0].endswith("[0] and [1]")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_of_bits_sees_a_flip_anywhere_and_a_swap(dtype):
    x = torch.randn(CHUNK + 100, generator=torch.Generator().manual_seed(1)).to(dtype)
    bits = x.view(torch.int32 if dtype is torch.float32 else torch.int16)
    seen = {int(checksum(x))}
    for place in (0, 77, CHUNK - 1, CHUNK, CHUNK + 99):
        for bit in (0, 7, 15):
            bits[place] ^= 1 << bit if bit < 15 else -(1 << 15)
            seen.add(int(checksum(x)))
            bits[place] ^= 1 << bit if bit < 15 else -(1 << 15)
    assert len(seen) == 16
    x[[3, 4]] = x[[4, 3]]
    assert int(checksum(x)) not in seen
