"""Files of families that name, turn and fuse their tensors otherwise: what may lie in a folder, and who reads what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine import alibi, inventory, weights
from engine import lora as adapters
from engine.comm import TensorAxis
from engine.config import Lora, Parallel
from engine.inventory import InvalidWeights
from engine.placement import shard
from engine.plan import memory
from engine.weights import Folder
from tests.engine.net import nets, ranks
from tests.engine.net.test_traits import OTHERS, theirs
from tests.engine.net.test_weights import assert_same_bits, tensors
from tests.worlds import World

# peft reads a property that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

FAMILIES = ["gpt2", "bloom"]
LAYER = {"gpt2": "transformer.h.0.attn", "bloom": "transformer.h.0.self_attention"}
EMBEDDING = {"gpt2": "wte", "bloom": "word_embeddings"}
FUSED = {"gpt2": "c_attn", "bloom": "query_key_value"}


def restored(folder: Path, change: Any) -> None:
    """Write the folder's tensors anew, changed."""
    stored = load_file(folder / inventory.SINGLE)
    save_file(change(stored), folder / inventory.SINGLE, metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_names_without_the_prefix_and_old_buffers_are_read(family: str, tmp_path: Path) -> None:
    theirs(tmp_path, family)
    ids = nets.batch(97).tokens_BT
    expected = nets.loaded(tmp_path).logits(ids)

    def older(stored: dict[str, Tensor]) -> dict[str, Tensor]:
        plain = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
        if family == "gpt2":
            plain |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.1.attn.masked_bias": torch.tensor(-1e4)}
        return plain | {"lm_head.weight": stored[f"transformer.{EMBEDDING[family]}.weight"]}

    restored(tmp_path, lambda stored: {name: x.clone() for name, x in older(stored).items()})
    assert torch.equal(nets.loaded(tmp_path).logits(ids), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_of_another_shape_is_refused_by_the_name_in_the_file(family: str, tmp_path: Path) -> None:
    theirs(tmp_path, family)
    name = f"{LAYER[family]}.{FUSED[family]}.bias"
    restored(tmp_path, lambda stored: stored | {name: torch.ones(32)})
    with pytest.raises(InvalidWeights, match=rf"{name} has shape \[32\]; config.json says \[96\]"):
        nets.loaded(tmp_path)
    restored(tmp_path, lambda stored: {key: x for key, x in stored.items() if key != name})
    with pytest.raises(InvalidWeights, match=f"tensor {name} is missing"):
        nets.loaded(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_reads_no_more_than_what_holds_its_piece(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs(tmp_path, family)
    read: list[int] = []
    window = Folder._window

    def counted(self: Folder, name: str, dim: int, start: int, length: int) -> Tensor:
        tensor = window(self, name, dim, start, length)
        read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(Folder, "_window", counted)
    with Folder(tmp_path, weights.read_shape(tmp_path)) as folder:
        folder.piece("model.layers.0.self_attn.k_proj.weight", shard((32, 32), dim=0, rank=1, size=2))
    # Half of the keys; where heads have their three side by side, those of the same heads.
    assert read == [32 * 16 * (1 if family == "gpt2" else 3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_back_the_same_bits(world2: World, family: str, tmp_path: Path) -> None:
    theirs(tmp_path, family)
    world2.run(ranks.there_and_back, tmp_path, Parallel(tensor=2))
    assert_same_bits(tensors(tmp_path / "ours"), tensors(tmp_path))


@pytest.mark.parametrize(("family", "changes"), OTHERS)
def test_the_plan_counts_the_parameters_that_transformers_counts(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    count = theirs(tmp_path, family, **changes).num_parameters()
    assert memory.parameters(weights.read_shape(tmp_path)) == count


@pytest.mark.parametrize(
    "targets", [None, ("q", "v", "down"), ("k",), ("o", "up")], ids=["all", "q v down", "k", "o up"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_load_in_peft_with_the_same_logits_and_come_back(family: str, targets: Any, tmp_path: Path) -> None:
    check_against_peft(family, Lora(rank=4, alpha=6.0, targets=targets), tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_adapters_scaled_by_the_root_of_their_rank_load_in_peft_as_such(family: str, tmp_path: Path) -> None:
    check_against_peft(family, Lora(rank=4, alpha=3.0, rslora=True), tmp_path)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["use_rslora"] is True


def check_against_peft(family: str, by: Lora, tmp_path: Path) -> None:
    theirs(tmp_path / "base", family)
    model = nets.adapted(nets.loaded(tmp_path / "base"), by)
    adapters.save_adapter(model, by, tmp_path / "adapter", base_name="base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ids = nets.batch(97).tokens_BT
    with torch.no_grad():
        bare = base(ids).logits
        reference = PeftModel.from_pretrained(base, tmp_path / "adapter")
        expected = reference(input_ids=ids).logits
    torch.testing.assert_close(model.logits(ids), expected, rtol=0, atol=1e-4)
    assert (expected - bare).abs().max() > 1e-2
    again = nets.loaded(tmp_path / "base")
    adapters.adapt(again, by, seed=9)
    adapters.load_adapter(again, tmp_path / "adapter")
    assert torch.equal(again.logits(ids), model.logits(ids))
    merged = dict(adapters.merged_state(model, tmp_path / "base"))
    whole = nets.loaded(tmp_path / "base")
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(merged[name])
    torch.testing.assert_close(whole.logits(ids), expected, rtol=0, atol=1e-4)


def test_an_adapter_that_mixes_queries_keys_and_values_is_refused(tmp_path: Path) -> None:
    base = theirs(tmp_path / "base", "bloom")
    mixed = LoraConfig(r=12, lora_alpha=18.0, target_modules=["query_key_value"], init_lora_weights=False)
    get_peft_model(base, mixed).save_pretrained(tmp_path / "adapter")
    model = nets.loaded(tmp_path / "base")
    adapters.adapt(model, Lora(rank=4, alpha=6.0, targets=("q", "k", "v")), seed=1)
    with pytest.raises(InvalidWeights, match="mixes queries, keys and values"):
        adapters.load_adapter(model, tmp_path / "adapter")


def test_a_gate_is_refused_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="gpt2 has no 'gate'; choose from q, k, v, o, up, down"):
        adapters.adapt(nets.decoder(nets.shape(architecture="gpt2", num_kv_heads=4)), Lora(targets=("gate",)), seed=1)


def test_more_tokens_than_positions_are_refused() -> None:
    model = nets.decoder(nets.shape(architecture="gpt2", num_kv_heads=4, max_seq_len=8))
    cache = model.cache(rows=2, tokens=16)
    model.logits(nets.batch(tokens=8).tokens_BT, cache)
    with pytest.raises(ValueError, match="9 tokens are more than the model's 8 positions"):
        model.logits(nets.batch(tokens=1).tokens_BT, cache)


@pytest.mark.parametrize(
    ("heads", "exponents"),
    # Press et al. 2021: 8 heads have 1/2, 1/4, ... 1/256; 6 have those of 4, then every second of 8.
    [(8, range(1, 9)), (6, [2, 4, 6, 8, 1, 3]), (1, [8])],
)
def test_slopes_are_those_of_the_paper_whoever_has_the_heads(heads: int, exponents: Any) -> None:
    expected = [2.0**-exponent for exponent in exponents]
    for size in (size for size in (1, 2) if heads % size == 0):
        shares = [alibi.slopes(heads, TensorAxis(size, rank, None, False), nets.CPU) for rank in range(size)]
        assert torch.cat(shares).tolist() == expected


def test_twelve_heads_have_the_same_logits_on_one_two_and_four_ranks(world2: World, world4: World) -> None:
    changes = {"architecture": "bloom", "num_heads": 12, "num_kv_heads": 12, "head_dim": 4, "hidden_size": 48}
    changes |= {"ffn_hidden_size": 192}
    expected = nets.decoder(nets.shape(**changes)).logits(nets.batch().tokens_BT)
    for logits in world2.run(ranks.logits_of, changes) + world4.run(ranks.logits_of, changes):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
