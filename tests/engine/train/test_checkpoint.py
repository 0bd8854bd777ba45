"""Checkpoints: whole or not there, and the same state in whatever layout they are loaded."""

import hashlib
import json
import os
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import checkpoint
from engine.checkpoint import BadCheckpoint, Facts
from engine.config import Parallel
from engine.failure import LostContact
from engine.mesh import alone, build
from tests.engine.train.toy import SHAPES, backward, gradients, ours, save, train

FACTS = Facts(step=3, tokens=96, rows=12, seed=7)
LAYOUTS = {
    "one": Parallel(),
    "tensor": Parallel(tensor=2),
    "data": Parallel(data=2),
    "context": Parallel(context=2),
    "data-not-sharded": Parallel(data=2, shard_optimizer=False),
}
CPU = torch.device("cpu")


def whole_state(optimizer):
    """The boxes that this rank holds of each global state."""
    return [
        (piece.parameter, key, piece.box, tensor.clone())
        for piece in optimizer.pieces()
        for key, tensor in piece.tensors.items()
    ]


def assemble(ranks):
    """Global states from the boxes of all ranks, which must agree where several hold the same."""
    states = {(name, key): torch.full(shape, torch.nan) for name, shape in SHAPES.items()
              for key in ("weight", "average", "square")}  # fmt: skip
    for name, key, box, tensor in (entry for held in ranks for entry in held):
        where = tuple(slice(first, first + size) for first, size in zip(box.offset, box.size, strict=True))
        seen = states[name, key][where]
        assert torch.equal(seen[~seen.isnan()], tensor[~seen.isnan()])
        states[name, key][where] = tensor
    return states


def train_and_save(parallel, folder):
    mesh = alone(CPU) if parallel.ranks == 1 else build(parallel)
    _, _, optimizer = train(mesh, 3, shard_optimizer=parallel.shard_optimizer)
    save(folder, optimizer, FACTS)
    mesh.close()
    return whole_state(optimizer)


def load(parallel, path):
    mesh = alone(CPU) if parallel.ranks == 1 else build(parallel)
    parameters, optimizer = ours(mesh, shard_optimizer=parallel.shard_optimizer)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.zero_()
    facts = checkpoint.load(path, optimizer, base=None)
    assert (facts, optimizer.steps) == (FACTS, 3)
    mesh.close()
    return whole_state(optimizer)


def on(world2, parallel, case, *args):
    return [case(parallel, *args)] if parallel.ranks == 1 else world2.run(case, parallel, *args)


@pytest.mark.parametrize(("saved", "loaded"), [pair for pair in product(LAYOUTS, repeat=2)])
def test_any_layout_loads_what_any_other_saved(world2, tmp_path, saved, loaded):
    before = assemble(on(world2, LAYOUTS[saved], train_and_save, tmp_path))
    after = assemble(on(world2, LAYOUTS[loaded], load, tmp_path / "step-00000003"))
    assert before.keys() == after.keys()
    for key, state in before.items():
        assert not state.isnan().any()
        assert torch.equal(state, after[key]), key


def save_alone(folder, step=3, *, keep=3):
    _, _, optimizer = train(alone(CPU), 1)
    return save(folder, optimizer, Facts(step, 0, 0, 0), keep=keep)


def load_alone(path, *, base=None):
    _, optimizer = ours(alone(CPU))
    return checkpoint.load(path, optimizer, base=base)


def test_the_manifest_has_the_sha256_of_every_other_file_and_plain_safetensors_hold_the_state(tmp_path):
    path = save_alone(tmp_path)
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert {file["path"] for file in files} == {file.name for file in path.iterdir()} - {"manifest.json"}
    for file in files:
        content = (path / file["path"]).read_bytes()
        assert file["sha256"] == hashlib.sha256(content).hexdigest()
        assert file["bytes"] == len(content)
    held = load_file(path / "rank-00000.safetensors")
    assert held["weight/embed/0-0"].shape == (7, 6)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000003"]


def damage(path):
    file = path / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        pytest.param(damage, "rank-00000.safetensors is damaged", id="a-flipped-bit"),
        pytest.param(lambda path: (path / "rank-00000.safetensors").unlink(), "is missing", id="a-missing-file"),
        pytest.param(lambda path: (path / "index.json").write_text("{}"), "has 2 bytes where", id="a-short-file"),
        pytest.param(shutil.rmtree, "it is not there", id="no-folder"),
        pytest.param(lambda path: (path / "manifest.json").unlink(), "never finished", id="no-manifest"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_words(tmp_path, harm, says):
    path = save_alone(tmp_path)
    harm(path)
    with pytest.raises(BadCheckpoint, match=says):
        load_alone(path)


def test_a_checkpoint_of_other_base_weights_is_refused(tmp_path):
    with pytest.raises(BadCheckpoint, match="other base weights"):
        load_alone(save_alone(tmp_path), base="another")


@pytest.mark.parametrize("changed", ["q", "v"])
def test_a_base_that_differs_in_one_matrix_has_another_fingerprint(tmp_path, changed):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        matrices = {matrix: torch.ones(600, 600) for matrix in "qv"}
        if name == "other":
            matrices[changed] += 1
        save_file(matrices, tmp_path / name / "model.safetensors")
    assert checkpoint.fingerprint(tmp_path / "one") != checkpoint.fingerprint(tmp_path / "other")
    assert checkpoint.fingerprint(tmp_path / "one") == checkpoint.fingerprint(tmp_path / "one")


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save_alone(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_folder_that_somebody_put_among_the_checkpoints_stays_and_ends_no_run(tmp_path):
    (tmp_path / "step-of-mine").mkdir()
    for step in (1, 2):
        save_alone(tmp_path, step, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-of-mine"]


def test_what_a_killed_run_left_goes_with_the_next_save(tmp_path):
    for left in (".step-00000001.unfinished", ".step-00000002.going"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "rank-00000.safetensors").touch()
    save_alone(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000003"]


def test_every_file_and_folder_is_synced_before_a_checkpoint_has_its_name(tmp_path, monkeypatch):
    synced, published = [], []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(
        os, "fsync", lambda file: (synced.append(os.path.realpath(f"/proc/self/fd/{file}")), fsync(file))
    )
    monkeypatch.setattr(Path, "rename", lambda path, to: (published.append(set(synced)), rename(path, to)))

    def beside(folder):
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "tokenizer.json").write_text("{}")

    _, _, optimizer = train(alone(CPU), 1)
    path = save(tmp_path / "checkpoints", optimizer, FACTS, beside=beside)
    unfinished = path.with_name(f".{path.name}.unfinished")
    below = {str(unfinished / inner.relative_to(path)) for inner in path.rglob("*")}
    (before,) = published
    assert below | {str(unfinished), str(tmp_path)} <= before
    assert str(path.parent) in synced


def test_a_checkpoint_saved_twice_is_the_second(tmp_path):
    path = save_alone(tmp_path)
    (path / "mark").touch()
    save_alone(tmp_path)
    assert not (path / "mark").exists()
    assert load_alone(path).step == 3


def fail_on_rank_1(folder):
    mesh = build(Parallel(data=2))
    _, _, optimizer = train(mesh, 1)
    if mesh.world_rank == 1:
        optimizer.pieces = lambda: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    try:
        save(folder, optimizer, FACTS)
    except (OSError, LostContact) as error:
        return type(error).__name__
    finally:
        mesh.close()


def test_when_one_rank_cannot_save_none_goes_on_and_nothing_is_left(world2, tmp_path):
    assert world2.run(fail_on_rank_1, tmp_path) == ["LostContact", "OSError"]
    assert list(tmp_path.iterdir()) == []


def go_on(parameters, optimizer):
    for step in range(9, 12):
        for part in range(2) if optimizer.mesh.size("replicas") == 1 else [optimizer.mesh.rank("replicas")]:
            backward(parameters, gradients(step, part))
        optimizer.update(lr=0.01, norm=optimizer.sum_gradients())


def train_on_twice(parallel, folder, dtype):
    """Three steps more after three steps, and after loading what was saved of them."""
    mesh = alone(CPU) if parallel.ranks == 1 else build(parallel)
    options = {"shard_optimizer": parallel.shard_optimizer, "dtype": dtype}
    straight, _, through = train(mesh, 3, **options)
    save(folder, through, FACTS)
    resumed, optimizer = ours(mesh, **options)
    checkpoint.load(folder / "step-00000003", optimizer, base=None)
    go_on(straight, through)
    go_on(resumed, optimizer)
    mesh.close()
    for name in SHAPES:
        assert torch.equal(straight[name], resumed[name]), name
    for (name, key, _, was), (_, _, _, now) in zip(whole_state(through), whole_state(optimizer), strict=True):
        assert torch.equal(was, now), (name, key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_bitwise_from_a_checkpoint_in_weights_and_moments(world2, tmp_path, layout, dtype):
    on(world2, LAYOUTS[layout], train_on_twice, tmp_path, dtype)
