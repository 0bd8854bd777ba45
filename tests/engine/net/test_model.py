"""The decoder on one rank: the gradients of `transformers`, isolation of documents, recomputation."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from engine import mesh
from engine.batch import IGNORE, Batch
from engine.families import config_of
from engine.model import Decoder
from tests.engine.net import nets


def twin(model: Decoder) -> LlamaForCausalLM:
    """The same model in transformers."""
    config = config_of(model.shape, bos_id=None, eos_id=None, pad_id=None, dtype="float32")
    theirs = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager"))
    theirs.load_state_dict({name: p.detach() for name, p in model.named_parameters()}, strict=False)
    theirs.tie_weights()
    return theirs


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_loss_and_every_gradient_are_those_of_transformers(tied: bool) -> None:
    model = nets.decoder(nets.shape(tie_embeddings=tied), chunk_logits=7 * 96)
    theirs = twin(model)
    batch = nets.batch()
    loss, gradients = nets.trained(model, batch)
    logits = theirs(batch.tokens_BT).logits
    expected = cross_entropy(logits.flatten(0, 1), batch.labels_BT.flatten(), ignore_index=IGNORE)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert gradients.keys() == {name for name, _ in theirs.named_parameters()}
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        assert nets.distance(gradients[name], parameter.grad) <= 2e-6, name


def test_weights_of_labels_scale_their_loss_and_gradient() -> None:
    model = nets.decoder(nets.shape())
    batch = nets.batch()
    plain = model.loss(batch)
    double = model.loss(replace(batch, weights_BT=torch.full(batch.labels_BT.shape, 2.0)))
    assert double.loss_sum.item() == pytest.approx(2 * plain.loss_sum.item(), rel=1e-6)
    assert torch.equal(double.label_count, plain.label_count)
    assert plain.label_count.item() == (batch.labels_BT != IGNORE).sum().item()


def test_correct_counts_labels_that_are_the_likeliest_token() -> None:
    model = nets.decoder(nets.shape())
    batch = nets.batch()
    likeliest = model.logits(batch.tokens_BT).argmax(-1)
    labels = likeliest.clone()
    labels[0, :3] = (labels[0, :3] + 1) % 96
    labels[1, 5] = IGNORE
    parts = model.loss(replace(batch, labels_BT=labels))
    assert parts.correct.item() == 32 - 3 - 1
    assert parts.label_count.item() == 32 - 1


def test_a_batch_without_labels_has_no_loss_and_zero_gradients() -> None:
    model = nets.decoder(nets.shape())
    batch = nets.batch()
    parts = model.loss(replace(batch, labels_BT=torch.full_like(batch.labels_BT, IGNORE)))
    parts.loss_sum.backward()
    assert parts.loss_sum.item() == 0
    assert parts.label_count.item() == 0
    assert all(not gradient.any() for gradient in nets.gradients(model).values())


def test_evaluation_has_the_loss_of_training() -> None:
    model = nets.decoder(nets.shape())
    with torch.no_grad():
        evaluated = model.loss(nets.batch())
    assert torch.equal(evaluated.loss_sum, model.loss(nets.batch()).loss_sum)
    assert not evaluated.loss_sum.requires_grad


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_gradients_are_bitwise_equal_whatever_is_recomputed(mode: str, packed: bool) -> None:
    batch = nets.batch(packed=packed)
    loss, expected = nets.trained(nets.decoder(nets.shape()), batch)
    got_loss, got = nets.trained(nets.decoder(nets.shape(), recompute=mode), batch)
    assert got_loss == loss
    assert all(torch.equal(got[name], expected[name]) for name in expected)


class Operations(TorchDispatchMode):
    """Counts what is run."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        return sum(self.count[name] for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm"))

    @property
    def cores(self) -> int:
        return sum(count for name, count in self.count.items() if "attention" in name and "backward" not in name)


def ran_in_backward(mode: str) -> Operations:
    model = nets.decoder(nets.shape(), recompute=mode)
    loss = model.loss(nets.batch()).loss_sum
    with Operations() as operations:
        loss.backward()
    return operations


def test_selective_recompute_replays_the_attention_core_and_no_other_product() -> None:
    none, selective, full = (ran_in_backward(mode) for mode in ("none", "selective", "full"))
    assert (none.cores, selective.cores, full.cores) == (0, 2, 2)
    assert selective.products == none.products
    # The seven matrices of each of the two layers.
    assert full.products == none.products + 2 * 7


def doubled(batch: Batch, row: int) -> Batch:
    """`batch` with other tokens in document 0 of each row."""
    tokens = batch.tokens_BT.clone()
    assert batch.documents_BT is not None
    changed = batch.documents_BT == 0
    tokens[changed] = (tokens[changed] + row) % 96
    return replace(batch, tokens_BT=tokens)


def only(batch: Batch, document: int) -> Batch:
    """`batch` with labels in one document."""
    assert batch.documents_BT is not None
    return replace(batch, labels_BT=batch.labels_BT.masked_fill(batch.documents_BT != document, IGNORE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_changing_one_document_leaves_the_loss_of_the_others_bitwise(dtype: torch.dtype) -> None:
    model = nets.decoder(nets.shape(), dtype=dtype)
    batch = nets.batch(tokens=48, packed=True)
    other = doubled(batch, 17)
    for document in (1, 2):
        before, after = (model.loss(only(b, document)).loss_sum for b in (batch, other))
        assert before.item() > 0
        assert torch.equal(before, after)
    assert not torch.equal(model.loss(only(batch, 0)).loss_sum, model.loss(only(other, 0)).loss_sum)


def test_packed_documents_have_the_loss_and_gradients_of_rows_of_their_own() -> None:
    packed = nets.batch(rows=1, packed=True)
    loss, gradients = nets.trained(nets.decoder(nets.shape()), packed)
    assert packed.documents_BT is not None
    apart = nets.decoder(nets.shape())
    total = torch.zeros(())
    for document in range(3):
        here = packed.documents_BT[0] == document
        alone = Batch(packed.tokens_BT[:, here], packed.labels_BT[:, here], packed.positions_BT[:, here])
        total = total + apart.loss(alone).loss_sum
    mean = total / (packed.labels_BT != IGNORE).sum()
    mean.backward()
    assert loss == pytest.approx(mean.item(), rel=1e-6)
    unpacked = nets.gradients(apart)
    assert all(nets.distance(gradients[name], unpacked[name]) <= 2e-6 for name in gradients)


class Largest(TorchDispatchMode):
    """The most elements that one floating tensor had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.is_floating_point():
            self.elements = max(self.elements, made.numel())
        return made


def test_logits_of_all_tokens_never_exist() -> None:
    model = nets.decoder(nets.shape(vocab_size=1000), chunk_logits=10 * 1000)
    batch = nets.batch(1000, tokens=64)
    with Largest() as largest:
        model.loss(batch).loss_sum.backward()
    # The embedding's gradient, 1000 x 32, is the largest; the logits of the 128 tokens would be 128 x 1000.
    assert largest.elements == 1000 * 32


@pytest.mark.parametrize(
    ("mode", "elements", "statistics"),
    [
        # x, norm, q, k, v (rotated or not, once), attention out; x again, norm, gate, up and their product.
        pytest.param("none", 2 * 32 + 32 + 2 * 16 + 32 + 2 * 32 + 3 * 48, 2 + 4, id="none"),
        # The core's log-sum-exp per head goes; its output stays, being the input of the output projection.
        pytest.param("selective", 2 * 32 + 32 + 2 * 16 + 32 + 2 * 32 + 3 * 48, 2, id="selective"),
        pytest.param("full", 32, 0, id="full"),
    ],
)
def test_a_layer_saves_no_more_than_its_formula(mode: str, elements: int, statistics: int) -> None:
    tokens = 2 * 16
    assert nets.saved_by_a_layer(mesh.alone(nets.CPU), mode) == tokens * (2 * elements + 4 * statistics)


def test_a_seed_gives_small_weights_into_the_residual() -> None:
    model = nets.decoder(nets.shape(num_layers=8, hidden_size=64, init_std=0.02))
    gate = model.get_parameter("model.layers.3.mlp.gate_proj.weight")
    down = model.get_parameter("model.layers.3.mlp.down_proj.weight")
    assert gate.std().item() == pytest.approx(0.02, rel=0.05)
    assert down.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert not torch.equal(gate, model.get_parameter("model.layers.2.mlp.gate_proj.weight"))
