"""What families have beyond llama: biases, norms, windows, positions, other layers; as `transformers` computes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine import lora as adapters
from engine.batch import IGNORE, Batch
from engine.config import Lora
from engine.fused import to_files
from engine.model import whole_shapes
from engine.naming import shapes_of
from engine.optimizer import kind_of
from engine.plan.holdings import holdings
from engine.sampling import Sampling, choose
from tests.engine.net import nets, ranks
from tests.engine.net.test_weights import assert_same_bits, exported, tensors
from tests.worlds import World

# peft reads a property that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

WINDOW = 8
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS = [
    pytest.param("mistral", {"sliding_window": WINDOW, "head_dim": 16}, id="mistral"),
    pytest.param("mistral", {"sliding_window": None}, id="mistral without a window"),
    pytest.param("qwen2", {"tie_word_embeddings": True}, id="qwen2"),
    pytest.param("qwen2", QWEN_WINDOW, id="qwen2 with a window"),
    pytest.param("qwen3", {"head_dim": 16}, id="qwen3"),
    pytest.param("qwen3", {"head_dim": 8, "attention_bias": True, **QWEN_WINDOW}, id="qwen3 with all"),
    pytest.param("llama", {"attention_bias": True, "mlp_bias": True}, id="llama with biases"),
    pytest.param("gpt2", NO_DROPOUT, id="gpt2"),
    pytest.param("gpt2", {**NO_DROPOUT, "n_inner": 48, "tie_word_embeddings": False}, id="gpt2 with all"),
    pytest.param("bloom", {}, id="bloom"),
    pytest.param("bloom", {"n_head": 6, "hidden_size": 48, "tie_word_embeddings": False}, id="bloom with six heads"),
]
OTHERS = [config for config in CONFIGS if config.values[0] in ("gpt2", "bloom")]
WINDOWED = [config for config in CONFIGS if WINDOW in config.values[1].values()]  # type: ignore[union-attr]
SHAPES: list[dict[str, Any]] = [
    {"architecture": "llama", "attention_bias": "all", "mlp_bias": True},
    {"architecture": "mistral", "sliding_window": 4},
    {"architecture": "qwen2", "tie_embeddings": False},
    {"architecture": "qwen3", "head_dim": 16, "attention_bias": "all", "sliding_window": 4},
]
SHAPES += [
    {"architecture": "gpt2", "num_kv_heads": 4},
    {"architecture": "bloom", "num_heads": 6, "num_kv_heads": 6, "hidden_size": 48, "ffn_hidden_size": 192},
]
NAMES = [shape["architecture"] for shape in SHAPES]
DROPPING: list[dict[str, Any]] = [
    {"architecture": "gpt2", "num_kv_heads": 4, "hidden_dropout": 0.2, "attention_dropout": 0.3},
    {**SHAPES[-1], "hidden_dropout": 0.2, "attention_dropout": 0.3},
    {"architecture": "mistral", "sliding_window": 4, "attention_dropout": 0.3},
]
DROPPING_NAMES = [f"{shape['architecture']} with dropout" for shape in DROPPING]


LLAMA_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SIZES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), LLAMA_SIZES),
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
}


def theirs(folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A random model, its norms and biases too, saved to `folder` by transformers."""
    sizes = {"vocab_size": 97, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, **SIZES[family]}
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **{**sizes, **changes})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("family", "changes"), CONFIGS)
def test_logits_loss_and_every_gradient_are_those_of_transformers(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    reference = theirs(tmp_path, family, **changes)
    model = nets.loaded(tmp_path)
    batch = nets.batch(97, tokens=40)
    logits = reference(batch.tokens_BT).logits
    torch.testing.assert_close(model.logits(batch.tokens_BT), logits.detach(), rtol=0, atol=1e-4)
    expected = cross_entropy(logits.flatten(0, 1), batch.labels_BT.flatten(), ignore_index=IGNORE)
    expected.backward()
    loss, gradients = nets.trained(model, batch)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    in_their_files = dict(to_files(model.shape, gradients.items()))
    of_theirs = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert nets.apart(in_their_files, of_theirs) <= 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("family", "changes"), CONFIGS)
def test_a_folder_comes_back_bit_for_bit_with_the_same_config(
    family: str, changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    theirs(tmp_path / "theirs", family, dtype, **changes)
    ours = exported(nets.loaded(tmp_path / "theirs"), tmp_path / "ours")
    assert_same_bits(tensors(ours), tensors(tmp_path / "theirs"))
    reference, again = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "theirs", ours))
    assert type(again) is type(reference)
    told, was = again.config.to_dict(), reference.config.to_dict()
    # An inner width that is the usual one is said all the same.
    for key in set(was) - {"_name_or_path", "bos_token_id", "eos_token_id", "max_window_layers", "n_inner"}:
        assert told[key] == was[key], key
    ids = nets.batch(97, tokens=40).tokens_BT
    with torch.no_grad():
        assert torch.equal(again(ids).logits, reference(ids).logits)


@pytest.mark.parametrize(("family", "changes"), WINDOWED + OTHERS)
def test_greedy_tokens_also_beyond_the_window_are_those_of_transformers(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    reference = theirs(tmp_path, family, **changes)
    ids = nets.batch(97, rows=1, tokens=5).tokens_BT
    expected = reference.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, eos_token_id=None, pad_token_id=0
    )[0, 5:]
    model = nets.loaded(tmp_path)
    cache = model.cache(rows=1, tokens=30)
    got: list[int] = []
    pending = ids
    for _ in range(20):
        logits = model.logits(pending, cache, last_only=True)[0, -1]
        got.append(choose(logits, Sampling(temperature=0), Random()))
        pending = torch.tensor([got[-1:]])
    assert got == expected.tolist()


@pytest.mark.parametrize("changes", SHAPES, ids=NAMES)
def test_the_service_knows_the_tensors_that_a_decoder_has(changes: dict[str, Any]) -> None:
    shape = nets.shape(**changes)
    assert shapes_of(shape) == whole_shapes(shape)


@pytest.mark.parametrize("changes", SHAPES, ids=NAMES)
def test_the_cache_gives_the_logits_of_one_pass_however_it_is_filled(changes: dict[str, Any]) -> None:
    model = nets.uneven(nets.decoder(nets.shape(**changes)))
    ids = nets.batch().tokens_BT
    cache = model.cache(rows=2, tokens=16)
    parts = [model.logits(piece, cache) for piece in ids.split([3, 6, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model.logits(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", SHAPES, ids=NAMES)
def test_packed_documents_have_the_loss_and_gradients_of_rows_of_their_own(changes: dict[str, Any]) -> None:
    packed = nets.batch(rows=1, tokens=18, packed=True)
    assert packed.documents_BT is not None
    together, apart = (nets.uneven(nets.decoder(nets.shape(**changes))) for _ in range(2))
    parts = together.loss(packed)
    parts.loss_sum.backward()
    total = torch.zeros(())
    for document in range(3):
        here = packed.documents_BT[0] == document
        alone = Batch(packed.tokens_BT[:, here], packed.labels_BT[:, here], packed.positions_BT[:, here])
        total = total + apart.loss(alone).loss_sum
    total.backward()
    assert parts.loss_sum.item() == pytest.approx(total.item(), rel=1e-6)
    assert nets.apart(nets.gradients(together), nets.gradients(apart)) <= 2e-6


@pytest.mark.parametrize("changes", SHAPES + DROPPING, ids=NAMES + DROPPING_NAMES)
def test_another_first_document_leaves_the_loss_of_the_second_bit_for_bit(changes: dict[str, Any]) -> None:
    batch = nets.batch(packed=True)
    assert batch.documents_BT is not None
    model = nets.uneven(nets.decoder(nets.shape(**changes)))
    first = batch.documents_BT == 0
    only_others = replace(batch, labels_BT=batch.labels_BT.masked_fill(first, IGNORE))
    changed = replace(only_others, tokens_BT=torch.where(first, (batch.tokens_BT + 1) % 96, batch.tokens_BT))
    assert model.loss(only_others).loss_sum.item() == model.loss(changed).loss_sum.item()


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("changes", SHAPES + DROPPING, ids=NAMES + DROPPING_NAMES)
def test_gradients_are_bitwise_equal_whatever_is_recomputed(changes: dict[str, Any], mode: str) -> None:
    batch = nets.batch(packed=True)
    _, expected = nets.trained(nets.uneven(nets.decoder(nets.shape(**changes))), batch)
    _, got = nets.trained(nets.uneven(nets.decoder(nets.shape(**changes), recompute=mode)), batch)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "tensor and sequence"])
@pytest.mark.parametrize("changes", SHAPES + DROPPING, ids=NAMES + DROPPING_NAMES)
def test_two_ranks_have_the_loss_and_every_gradient_of_one_and_the_weights_of_the_plan(
    world2: World, changes: dict[str, Any], sequence: bool
) -> None:
    planned = holdings(nets.shape(**changes), tensor=2).elements()
    recompute = "full" if sequence else "none"
    for loss, gradient, held in world2.run(ranks.weights_against_one_rank, changes, sequence, recompute):
        assert loss <= 5e-7
        assert gradient <= 2e-6
        assert held == planned


@pytest.mark.parametrize("changes", SHAPES, ids=NAMES)
def test_adapters_beside_biased_layers_have_the_gradients_of_one_rank(world2: World, changes: dict[str, Any]) -> None:
    first, second = world2.run(ranks.adapters_against_one_rank, True, "none", 0.3, **changes)
    for loss, gradient, complete, _ in (first, second):
        assert complete
        assert loss <= 5e-7
        assert gradient <= 2e-6
    assert all(torch.equal(first[3][name], second[3][name]) for name in first[3])


@pytest.mark.parametrize(("family", "changes"), [("qwen2", {}), ("llama", {"attention_bias": True, "mlp_bias": True})])
def test_adapters_beside_biased_layers_are_those_of_peft(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    reference = get_peft_model(
        theirs(tmp_path / "base", family, **changes),
        LoraConfig(r=4, lora_alpha=6.0, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    model = nets.loaded(tmp_path / "base")
    adapters.adapt(model, Lora(rank=4, alpha=6.0, targets=("q", "down")), seed=1)
    ids = nets.batch(97).tokens_BT
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".adapter." in name:
                parts = name.replace(".adapter.", ".").removesuffix(".weight")
                parameter.copy_(reference.get_parameter(f"{adapters.PREFIX}{parts}.default.weight"))
        expected = reference(input_ids=ids).logits
    torch.testing.assert_close(model.logits(ids), expected, rtol=0, atol=1e-4)
    merged = dict(adapters.merged_state(model, tmp_path / "base"))
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert torch.equal(merged[bias], tensors(tmp_path / "base")[bias])


@pytest.mark.parametrize("changes", SHAPES, ids=NAMES)
def test_matrices_decay_and_norms_and_biases_do_not(changes: dict[str, Any]) -> None:
    for name, parameter in nets.decoder(nets.shape(**changes)).named_parameters():
        assert kind_of(parameter).decays == (not name.endswith(("bias", "norm.weight", "layernorm.weight"))), name
