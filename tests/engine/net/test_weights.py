"""Folders in Hugging Face's layout: the same logits as `transformers`, and the same bits back."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine import inventory, weights
from engine.config import Parallel
from engine.families import config_of
from engine.inventory import InvalidWeights
from engine.model import Decoder
from tests.engine.net import nets, ranks
from tests.worlds import World

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS = [
    pytest.param({}, id="untied, no groups"),
    pytest.param({"num_key_value_heads": 2}, id="groups"),
    pytest.param({"tie_word_embeddings": True}, id="tied"),
    pytest.param({"head_dim": 16, "num_key_value_heads": 1}, id="wide heads"),
    pytest.param({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, id="linear"),
    pytest.param({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, id="llama3"),
    pytest.param({"rope_parameters": {**YARN, "rope_theta": 1e4}}, id="yarn"),
    pytest.param(
        {"rope_parameters": {**YARN, "beta_fast": 16, "mscale": 1.0, "mscale_all_dim": 0.5, "rope_theta": 1e4}},
        id="yarn with every knob",
    ),
    pytest.param(
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 16},
        id="dynamic, beyond the trained length",
    ),
]


def llama(folder: Path, *, dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    """A random model, saved to `folder` by transformers."""
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "attn_implementation": "eager",
    }
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).to(dtype)
    model.save_pretrained(folder)
    return model


def exported(model: Decoder, folder: Path) -> Path:
    """`model` in `folder`, with its config."""
    weights.save(model, folder, model.dtype)
    config = config_of(model.shape, bos_id=1, eos_id=2, pad_id=None, dtype=str(model.dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("changes", CONFIGS)
def test_logits_are_those_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    theirs = llama(tmp_path, **changes)
    ids = nets.batch(97, tokens=40).tokens_BT
    with torch.no_grad():
        expected = theirs(ids).logits
    torch.testing.assert_close(nets.loaded(tmp_path).logits(ids), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_folder_comes_back_bit_for_bit_and_loads_in_transformers(
    dtype: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    llama(tmp_path / "theirs", dtype=dtype, tie_word_embeddings=tied, rope_parameters={**LLAMA3, "rope_theta": 5e5})
    ours = exported(nets.loaded(tmp_path / "theirs"), tmp_path / "ours")
    assert_same_bits(tensors(ours), tensors(tmp_path / "theirs"))
    again = AutoModelForCausalLM.from_pretrained(ours)
    assert again.dtype == dtype
    assert again.config.rope_parameters["factor"] == 8.0


def test_pieces_with_an_index_are_read_and_written(tmp_path: Path) -> None:
    theirs = llama(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "pieces", max_shard_size="20KB")
    model = nets.loaded(tmp_path / "pieces")
    weights.write(model, tmp_path / "ours", weights.whole_state(model), torch.float32, shard_bytes=20_000)
    index = json.loads((tmp_path / "ours" / inventory.INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in theirs.state_dict().values())
    assert_same_bits(tensors(tmp_path / "ours"), tensors(tmp_path / "whole"))
    (tmp_path / "ours" / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    assert_same_bits(AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict(), theirs.state_dict())


def test_an_extra_output_tensor_of_a_tied_model_is_fine_where_it_is_the_embedding(tmp_path: Path) -> None:
    llama(tmp_path, tie_word_embeddings=True)
    stored = load_file(tmp_path / inventory.SINGLE)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, tmp_path / inventory.SINGLE, metadata={"format": "pt"})
    assert nets.loaded(tmp_path).lm_head is None
    stored["lm_head.weight"] += 1
    save_file(stored, tmp_path / inventory.SINGLE, metadata={"format": "pt"})
    with pytest.raises(InvalidWeights, match=r"lm_head\.weight differs"):
        nets.loaded(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(lambda stored: stored.pop("lm_head.weight"), r"lm_head\.weight is missing.*tie", id="no head"),
        pytest.param(lambda stored: stored.update(odd=torch.ones(1)), "odd is not part of the model", id="unknown"),
        pytest.param(
            lambda stored: stored.update({"model.norm.weight": torch.ones(3)}), r"norm\.weight has shape", id="shape"
        ),
    ],
)  # fmt: skip
def test_tensors_that_are_not_the_models_are_refused_by_name(spoil: Any, message: str, tmp_path: Path) -> None:
    llama(tmp_path)
    stored = load_file(tmp_path / inventory.SINGLE)
    spoil(stored)
    save_file(stored, tmp_path / inventory.SINGLE, metadata={"format": "pt"})
    with pytest.raises(InvalidWeights, match=message) as refusal:
        nets.loaded(tmp_path)
    assert str(tmp_path) not in str(refusal.value), "users are told the folder, not where it lies on the host"


def test_weights_that_are_no_numbers_are_told_by_name_and_not_left_to_the_data(tmp_path: Path) -> None:
    llama(tmp_path)
    stored = load_file(tmp_path / inventory.SINGLE)
    # A row that nothing looks up does no harm.
    stored["model.embed_tokens.weight"][3] = torch.nan
    save_file(stored, tmp_path / inventory.SINGLE, metadata={"format": "pt"})
    nets.loaded(tmp_path)
    stored["model.layers.1.mlp.up_proj.weight"][2, 1] = torch.inf
    save_file(stored, tmp_path / inventory.SINGLE, metadata={"format": "pt"})
    with pytest.raises(InvalidWeights, match=r"layers\.1\.mlp\.up_proj\.weight has NaN or infinity"):
        nets.loaded(tmp_path)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    llama(tmp_path)
    path = tmp_path / inventory.SINGLE
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InvalidWeights, match=r"model\.safetensors is damaged or cut short") as refusal:
        nets.loaded(tmp_path)
    assert str(tmp_path) not in str(refusal.value)


def test_the_index_is_the_authority(tmp_path: Path) -> None:
    llama(tmp_path).save_pretrained(tmp_path / "pieces", max_shard_size="20KB")
    save_file({"stray": torch.ones(1)}, tmp_path / "pieces" / "stray.safetensors")
    assert nets.loaded(tmp_path / "pieces").shape.num_layers == 2
    first = min((tmp_path / "pieces").glob("model-*.safetensors"))
    first.rename(tmp_path / "moved.safetensors")
    with pytest.raises(InvalidWeights, match=f"{first.name} is not there"):
        nets.loaded(tmp_path / "pieces")
    index = tmp_path / "pieces" / inventory.INDEX
    index.write_text(index.read_text().replace(first.name, "../moved.safetensors"))
    with pytest.raises(InvalidWeights, match="not a file of the folder"):
        nets.loaded(tmp_path / "pieces")
    for damaged in ("{", "[]", "{}"):
        index.write_text(damaged)
        with pytest.raises(InvalidWeights, match=r"index\.json is damaged"):
            nets.loaded(tmp_path / "pieces")


@pytest.mark.parametrize(
    "parallel",
    [Parallel(tensor=2), Parallel(data=2), Parallel(pipeline=2)],
    ids=["tensor 2", "data 2", "pipeline 2"],
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_two_ranks_give_back_the_same_bits_at_the_true_size(
    world2: World, tied: bool, parallel: Parallel, tmp_path: Path
) -> None:
    llama(tmp_path, tie_word_embeddings=tied)
    world2.run(ranks.there_and_back, tmp_path, parallel)
    assert_same_bits(tensors(tmp_path / "ours"), tensors(tmp_path))


def test_a_full_disk_is_told_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "piece-0.safetensors.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as full:
        exported(nets.decoder(nets.shape()), tmp_path)
    assert full.value.errno == errno.ENOSPC


def test_a_rank_that_cannot_write_does_not_leave_the_others_gathering(world2: World, tmp_path: Path) -> None:
    first, second = world2.run(ranks.written_where_a_piece_cannot_be, tmp_path, seconds=45)
    assert first not in ("nothing", "LostContact")
    assert second == "LostContact"


DATA = os.environ.get("TRAINSHED_TEST_DATA")


@pytest.mark.skipif(DATA is None, reason="TRAINSHED_TEST_DATA names no folder with models/stories260k")
def test_a_real_model_has_the_logits_of_transformers_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    assert DATA is not None
    folder = Path(DATA) / "models" / "stories260k"
    ids = nets.batch(512, tokens=60).tokens_BT
    model = nets.loaded(folder)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")(ids).logits
    torch.testing.assert_close(model.logits(ids), expected, rtol=0, atol=1e-4)
    assert_same_bits(tensors(exported(model, tmp_path)), tensors(folder))
