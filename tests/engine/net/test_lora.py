"""Adapters: the outputs and the files of `peft`, and the same in every layout."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from engine import lora as adapters
from engine import mesh, weights
from engine.config import Lora, Parallel
from engine.model import Decoder
from tests.engine.net import nets, ranks
from tests.engine.net.test_weights import exported, llama, tensors
from tests.worlds import World

# peft reads a property that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

LAYOUTS = [pytest.param(False, id="tensor"), pytest.param(True, id="tensor and sequence")]


def test_logits_are_those_of_peft_with_our_files(tmp_path: Path) -> None:
    llama(tmp_path / "base")
    model = nets.adapted(nets.loaded(tmp_path / "base"))
    adapters.save_adapter(model, nets.LORA, tmp_path / "adapter", base_name="base")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    ids = nets.batch(97).tokens_BT
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        bare = nets.loaded(tmp_path / "base").logits(ids)
    torch.testing.assert_close(model.logits(ids), expected, rtol=0, atol=1e-4)
    assert (expected - bare).abs().max() > 0.1


def test_an_adapter_that_peft_wrote_is_read(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    theirs = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=6.0, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    with warnings.catch_warnings(action="ignore"):  # peft looks for the base on a hub
        theirs.save_pretrained(tmp_path / "adapter")
    model = nets.loaded(tmp_path / "base")
    adapters.adapt(model, Lora(rank=4, alpha=6.0, targets=("q", "down")), seed=1)
    adapters.load_adapter(model, tmp_path / "adapter")
    ids = nets.batch(97).tokens_BT
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
    torch.testing.assert_close(model.logits(ids), expected, rtol=0, atol=1e-4)


def test_merged_weights_have_the_logits_of_the_adapted_model(tmp_path: Path) -> None:
    llama(tmp_path / "base")
    model = nets.adapted(nets.loaded(tmp_path / "base"))
    merged = dict(adapters.merged_state(model, tmp_path / "base"))
    plain = nets.loaded(tmp_path / "base")
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(merged[name])
    ids = nets.batch(97).tokens_BT
    torch.testing.assert_close(plain.logits(ids), model.logits(ids), rtol=0, atol=1e-4)
    # The base itself stays as it was.
    assert_base = tensors(exported(model, tmp_path / "ours"))
    assert all(torch.equal(tensor, assert_base[name]) for name, tensor in tensors(tmp_path / "base").items())


def test_a_base_is_merged_as_it_is_stored_though_it_trains_in_bf16(tmp_path: Path) -> None:
    llama(tmp_path / "base")
    model = Decoder(weights.read_shape(tmp_path / "base"), mesh.alone(nets.CPU), dtype=torch.bfloat16)
    weights.load(model, tmp_path / "base")
    nets.adapted(model)
    adapters.save_adapter(model, nets.LORA, tmp_path / "adapter", base_name="base")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    expected = theirs.merge_and_unload().state_dict()
    for name, tensor in adapters.merged_state(model, tmp_path / "base"):
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6, msg=name)


def test_a_fresh_adapter_changes_nothing_and_a_is_spread_as_in_peft() -> None:
    model = nets.decoder(nets.shape())
    ids = nets.batch().tokens_BT
    before = model.logits(ids)
    adapters.adapt(model, Lora(rank=16), seed=1)
    assert torch.equal(model.logits(ids), before)
    down = model.get_parameter("model.layers.0.self_attn.q_proj.adapter.lora_A.weight")
    # peft: kaiming_uniform(a=sqrt 5), which is uniform within 1 / sqrt(inputs), here 32.
    assert down.abs().max() <= 32**-0.5
    assert down.std().item() == pytest.approx((32 * 3) ** -0.5, rel=0.05)


def test_only_adapters_train() -> None:
    model = nets.adapted(nets.decoder(nets.shape()))
    _, gradients = nets.trained(model, nets.batch())
    assert len(gradients) == 2 * 7 * 2
    assert all(".adapter." in name for name in gradients)
    assert all(p.grad is None for name, p in model.named_parameters() if ".adapter." not in name)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("sequence", LAYOUTS)
def test_two_ranks_have_the_adapters_gradients_of_one(world2: World, sequence: bool, dropout: float) -> None:
    first, second = world2.run(ranks.adapters_against_one_rank, sequence, "full" if dropout else "none", dropout)
    for loss, gradient, complete, _ in (first, second):
        assert complete
        assert loss <= 5e-7
        assert gradient <= 2e-6
    assert len(first[3]) == 2 * 7
    assert all(torch.equal(first[3][name], second[3][name]) for name in first[3])


def test_ranks_that_share_a_key_value_head_have_the_adapters_gradients_of_one(world4: World) -> None:
    for loss, gradient, complete, _ in world4.run(ranks.adapters_against_one_rank, True, "none", 0.3):
        assert complete
        assert loss <= 5e-7
        assert gradient <= 2e-6


def test_dropout_depends_on_the_step_and_is_off_in_evaluation() -> None:
    model = nets.adapted(nets.decoder(nets.shape()), Lora(rank=4, dropout=0.5))
    batch = nets.batch()
    later = type(batch)(batch.tokens_BT, batch.labels_BT, batch.positions_BT, step=1)
    first, again, other = (model.loss(b).loss_sum.item() for b in (batch, batch, later))
    assert first == again != other
    model.eval()
    assert model.loss(batch).loss_sum.item() == model.loss(later).loss_sum.item()


@pytest.mark.parametrize("parallel", [Parallel(data=2), Parallel(pipeline=2)], ids=str)
def test_an_adapter_that_one_rank_can_not_read_is_loaded_by_none(
    world2: World, tmp_path: Path, parallel: Parallel
) -> None:
    llama(tmp_path / "base")
    raised = world2.run(ranks.adapter_read_where_one_rank_can_not, tmp_path / "adapter", tmp_path / "base", parallel)
    assert raised == ["LostContact", "SafetensorError"]


@pytest.mark.parametrize("parallel", [Parallel(tensor=2, sequence=True), Parallel(pipeline=2)], ids=str)
def test_two_ranks_write_the_adapter_and_the_merged_model_of_one(
    world2: World, tmp_path: Path, parallel: Parallel
) -> None:
    llama(tmp_path / "base")
    one = nets.adapted(nets.loaded(tmp_path / "base"))
    adapters.save_adapter(one, nets.LORA, tmp_path / "one", base_name="base")
    expected = dict(adapters.merged_state(one, tmp_path / "base"))
    for merged, is_loaded_again in world2.run(ranks.adapter_saved, tmp_path / "two", tmp_path / "base", parallel):
        assert is_loaded_again
        assert list(merged) == list(expected)
        assert all(torch.equal(merged[name], expected[name]) for name in expected)
    first, second = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
