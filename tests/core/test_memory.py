"""Bytes that a rank needs, against counts made by hand and published sizes."""

from __future__ import annotations

import pytest

from core.presets import PRESETS
from engine.config import Lora, ModelShape, Parallel, Recompute
from engine.plan import memory
from engine.plan.recompute import Setting
from engine.plan.stages import Stage
from tests import make

# 2 layers, width 16, 4 heads of 4, 2 key heads, feed-forward 32, vocabulary 260:
# a layer has 16x16 (q) + 2 x 16x8 (k, v) + 16x16 (o) + 3 x 16x32 = 2304 weights and 2 norms of 16.
LAYER = 256 + 2 * 128 + 256 + 3 * 512
TINY = make.shape()


@pytest.mark.parametrize(
    ("tied", "count"), [(True, 2 * (LAYER + 32) + 16 + 260 * 16), (False, 2 * (LAYER + 32) + 16 + 2 * 260 * 16)]
)
def test_parameters_are_counted_once_each(tied: bool, count: int) -> None:
    assert memory.parameters(make.shape(tie_embeddings=tied)) == count
    assert memory.parameters_per_rank(make.shape(tie_embeddings=tied), tensor=1) == count


@pytest.mark.parametrize(
    ("preset", "billions"),
    # Llama 2's and TinyLlama's published sizes; Korthikanti et al. 2022, table 3.
    # GPT-2's 124M and BLOOM's 559M as `transformers` counts them.
    [
        ("llama-7b", 6.738),
        ("llama-1.1b", 1.100),
        ("22b", 22),
        ("175b", 175),
        ("530b", 530),
        ("1t", 1008),
        ("gpt2", 0.12444),
        ("bloom-560m", 0.559215),
        ("gpt-22b", 22),
        ("gpt-175b", 175),
        ("gpt-530b", 530),
        ("gpt-1t", 1008),
    ],
)
def test_presets_have_the_size_of_their_name(preset: str, billions: float) -> None:
    fields = PRESETS[preset]
    shape = ModelShape.model_validate(fields | {"head_dim": fields["hidden_size"] // fields["num_heads"]})
    assert memory.parameters(shape) / 1e9 == pytest.approx(billions, rel=0.012)


@pytest.mark.parametrize("preset", ["gpt2", "gpt-22b", "gpt-175b", "gpt-530b", "gpt-1t"])
def test_a_gpt_has_the_parameters_of_the_papers_formula(preset: str) -> None:
    fields = PRESETS[preset]
    shape = ModelShape.model_validate(fields | {"head_dim": fields["hidden_size"] // fields["num_heads"]})
    layers, hidden, rows = shape.num_layers, shape.hidden_size, shape.vocab_size + shape.max_seq_len
    # Narayanan et al. 2021, equation 2: 12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h), which leaves out the last norm.
    assert memory.parameters(shape) == 12 * layers * hidden**2 + 13 * layers * hidden + rows * hidden + 2 * hidden


def test_every_preset_is_a_shape_that_eight_ranks_can_share_where_heads_allow_it() -> None:
    for name, fields in PRESETS.items():
        shape = ModelShape.model_validate(fields | {"head_dim": fields["hidden_size"] // fields["num_heads"]})
        if name.removeprefix("gpt-") in {"22b", "175b", "530b", "1t"}:
            Parallel(tensor=8, sequence=True).check(shape, seq_len=2048)


def test_a_tensor_rank_has_its_share_of_matrices_a_padded_vocabulary_and_every_norm() -> None:
    # 261 entries are padded to 262 for two ranks.
    shape = make.shape(vocab_size=261)
    assert memory.parameters_per_rank(shape, tensor=2) == 2 * (LAYER // 2 + 32) + 16 + 131 * 16


@pytest.mark.parametrize(
    ("fields", "shared", "whole"),
    # q, k, v and o have 16, 8, 8 and 16 outputs, gate and up 32 each, down 16; a head is 4 wide.
    [
        pytest.param({"architecture": "llama", "attention_bias": "all", "mlp_bias": True}, 96, 32, id="llama"),
        pytest.param({"architecture": "mistral", "sliding_window": 8}, 0, 0, id="mistral"),
        pytest.param({"architecture": "qwen2"}, 32, 0, id="qwen2"),
        pytest.param({"architecture": "qwen3"}, 0, 8, id="qwen3"),
    ],
)
def test_biases_follow_the_outputs_of_a_rank_and_norms_are_whole(
    fields: dict[str, object], shared: int, whole: int
) -> None:
    shape = make.shape(**fields)
    assert memory.parameters(shape) == memory.parameters(TINY) + 2 * (shared + whole)
    two = memory.parameters_per_rank(TINY, tensor=2) + 2 * (shared // 2 + whole)
    assert memory.parameters_per_rank(shape, tensor=2) == two


def test_adapters_are_counted_on_both_sides_of_each_matrix() -> None:
    lora = Lora(rank=2, targets=("q", "down"))
    # q: 16 in, 16 out; down: 32 in, 16 out; two layers.
    assert memory.adapter_parameters(TINY, lora) == 2 * 2 * ((16 + 16) + (32 + 16))
    # On two ranks q's outputs and down's inputs are shared out.
    assert memory.adapter_parameters_per_rank(TINY, lora, tensor=2) == 2 * 2 * ((8 + 16) + (16 + 16))


def test_a_rank_holds_a_whole_key_value_head_where_there_are_fewer_than_ranks() -> None:
    # Two heads of 4 for four ranks: a quarter of k's and v's 8 outputs would be 2, a head is 4.
    beyond = 2 * 2 * 16 * (4 - 2)
    assert memory.parameters_per_rank(TINY, tensor=4) == (memory.parameters(TINY) - 5 * 16) // 4 + 5 * 16 + beyond
    lora = Lora(rank=2, targets=("k",))
    assert memory.adapter_parameters_per_rank(TINY, lora, tensor=4) == 2 * 2 * (16 + 4)


def activations(recompute: Recompute) -> int:
    return memory.estimate(
        TINY, seq_len=8, micro_batch=1, precision="bf16", parallel=Parallel(), recompute=recompute
    ).activations


def test_activations_are_those_of_all_layers_and_of_one_that_is_made_again() -> None:
    # Per token: 4 x 16 around the matrices, q 16 + k 8 + v 8, core 16, 3 x 32 in the feed-forward, two bytes each; the
    # core's sums for four heads and two norms' statistics in fp32. Two tensors of 16 stand outside the layers.
    layer, ends = 8 * (2 * (64 + 32 + 16 + 96) + 4 * (4 + 2)), 8 * 2 * 2 * 16
    assert activations(Recompute(mode="none")) == 2 * layer + ends
    full = 8 * 2 * 16
    assert activations(Recompute(mode="full")) == 2 * full + (layer - full) + ends
    # The norms' outputs are gone from both, and there in one.
    norms = 8 * 2 * 2 * 16
    assert activations(Recompute(operations=("norm",))) == 2 * (layer - norms) + norms + ends


@pytest.mark.parametrize(
    ("precision", "data", "shard", "per_parameter"),
    [
        ("bf16", 1, True, 2 + 4 + 12),
        ("fp32", 1, True, 4 + 4 + 8),
        ("bf16", 4, False, 2 + 4 + 12),
        # Masters and two moments, and the reduced gradients, a quarter each.
        ("bf16", 4, True, 2 + 4 + 16 / 4),
    ],
)
def test_weights_gradients_and_optimizer_take_what_the_engine_keeps(
    precision: str, data: int, shard: bool, per_parameter: float
) -> None:
    needs = memory.estimate(
        TINY, seq_len=8, micro_batch=1, precision=precision, recompute=Recompute(),
        parallel=Parallel(data=data, shard_optimizer=shard),
    )  # fmt: skip
    assert needs.weights + needs.gradients + needs.optimizer == memory.parameters(TINY) * per_parameter
    assert needs.total == sum(value for name, value in needs.itemised().items() if name != "total")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_replicas_that_share_weights_hold_three_fp32_numbers_of_their_share_and_what_is_gathered(
    precision: str,
) -> None:
    layers, size = 10, 2 if precision == "bf16" else 4
    deep = make.shape(num_layers=layers)
    ends, layer = 16 + 260 * 16, LAYER + 32
    everything = ends + layers * layer

    def bytes_with(**shared: bool) -> int:
        needs = memory.estimate(
            deep, seq_len=8, micro_batch=1, precision=precision, recompute=Recompute(),
            parallel=Parallel(data=4, **shared),  # type: ignore[arg-type]
        )  # fmt: skip
        return needs.weights + needs.gradients + needs.optimizer

    # Master, two moments and gradient of a quarter; gradients of the ends and a layer before they are summed.
    shared = everything // 4 * 16 + (ends + layer) * (size + 4)
    assert bytes_with(shard_gradients=True) == shared + everything * size
    # The layer that runs and the next.
    assert bytes_with(shard_weights=True) == shared + (ends + 2 * layer) * size


def test_replicas_that_share_weights_share_a_frozen_base_too() -> None:
    lora = Lora(rank=2)
    deep = make.shape(num_layers=10)
    needs = memory.estimate(
        deep, seq_len=8, micro_batch=1, precision="bf16", recompute=Recompute(), lora=lora,
        parallel=Parallel(data=4, shard_weights=True),
    )  # fmt: skip
    adapters = memory.adapter_parameters(deep, lora)
    gathered = 16 + 260 * 16 + 2 * (LAYER + 32 + adapters // 10)
    assert needs.weights == 2 * (gathered + memory.parameters(deep) // 4)
    assert needs.optimizer == 12 * adapters // 4
    assert needs.gradients == 4 * adapters // 4 + 6 * adapters // 10


def test_lora_trains_the_adapters_only() -> None:
    lora = Lora(rank=2)
    needs = memory.estimate(
        TINY, seq_len=8, micro_batch=1, precision="bf16", recompute=Recompute(), parallel=Parallel(), lora=lora
    )
    assert needs.gradients == 4 * memory.adapter_parameters(TINY, lora)
    assert needs.weights == 2 * (memory.parameters(TINY) + memory.adapter_parameters(TINY, lora))


def test_context_ranks_share_activations_and_the_optimizer_and_have_all_keys_of_a_layer_for_a_while() -> None:
    def needs(context: int) -> memory.Memory:
        return memory.estimate(
            TINY, seq_len=8, micro_batch=1, precision="bf16", recompute=Recompute(), parallel=Parallel(context=context)
        )

    one, two = needs(1), needs(2)
    # Keys and values of 8 tokens are 16 wide, in two bytes; as they arrive and in order, and their gradients. Chunks of
    # two tokens look at one and four, or at two and three, chunks of keys: five of 2 x 2.
    assert two.activations == one.activations // 2 + 2 * (4 * 8 * 16 + 5 * 2 * 2)
    assert two.logits == one.logits // 2
    assert two.weights == one.weights
    # Masters and moments are halved, and beside them stands a reduced copy of the gradients.
    assert two.optimizer == memory.parameters(TINY) * 16 // 2


def of_scores(shape: ModelShape, *, micro_batch: int = 1, packed: bool = False, **parallel: int) -> int:
    """Activations beyond those of the same model whose core makes no masks and no scores."""
    plain = shape.model_copy(update={"architecture": "llama", "attention_dropout": 0.0, "sliding_window": None})
    one, other = (
        memory.estimate(
            model, seq_len=8, micro_batch=micro_batch, precision="bf16", parallel=Parallel.model_validate(parallel),
            recompute=Recompute(mode="full"), micro_batches=4, packed=model is shape and packed,
        ).activations
        for model in (shape, plain)
    )  # fmt: skip
    return one - other


def test_a_mask_is_kept_for_each_pass_that_waits_where_rows_are_not_whole_documents() -> None:
    assert of_scores(TINY) == 0
    # A number of two bytes for each of 8 x 8 pairs; with documents, of each row.
    mistral = TINY.model_copy(update={"architecture": "mistral", "sliding_window": 4})
    assert of_scores(mistral, micro_batch=3) == 2 * 8 * 8
    assert of_scores(TINY, micro_batch=3, packed=True) == 3 * 2 * 8 * 8
    # The first of two stages has two micro-batches that wait.
    deep = make.shape(num_layers=8, vocab_size=2)
    assert of_scores(deep, packed=True, pipeline=2) == 2 * 2 * 8 * 8


def test_linear_biases_are_kept_for_each_head_and_made_in_fp32() -> None:
    setting = Setting(make.shape(architecture="bloom", num_kv_heads=4, ffn_hidden_size=64), 8, 3, 2, Parallel(tensor=2))
    # Two heads of a rank, 8 x 8 pairs; with documents, of each of three rows.
    assert memory.masks(setting, packed=False) == 2 * 2 * 8 * 8
    assert memory.masks(setting, packed=True) == 3 * 2 * 2 * 8 * 8
    assert memory.making_scores(setting) == 4 * 2 * 8 * 8


def test_where_probabilities_are_dropped_two_more_score_matrices_exist_for_a_moment() -> None:
    gpt2 = make.shape(architecture="gpt2", num_kv_heads=4)
    one, other = (
        memory.estimate(
            gpt2.model_copy(update={"attention_dropout": rate}), seq_len=8, micro_batch=3, precision="bf16",
            parallel=Parallel(tensor=2), recompute=Recompute(mode="full"),
        ).activations
        for rate in (0.1, 0.0)
    )  # fmt: skip
    # Two heads of a rank, three rows of 8 x 8 pairs. The layer that is made again keeps five bytes of each (Korthikanti
    # et al. 2022, section 4.1) and not the sums of 24 tokens in fp32; two numbers of two bytes come and go.
    assert one - other == (5 + 2 * 2) * 2 * 3 * 8 * 8 - 4 * 2 * 24


def test_on_a_cpu_a_checkpoint_is_written_from_a_copy_of_what_a_rank_saves() -> None:
    def snapshot(on_host: bool, lora: Lora | None = None, **parallel: object) -> int:
        needs = memory.estimate(
            TINY, seq_len=8, micro_batch=1, precision="fp32", parallel=Parallel.model_validate(parallel),
            recompute=Recompute(), lora=lora, on_host=on_host,
        )  # fmt: skip
        return needs.snapshot

    # Three fp32 numbers for each weight that trains: itself and two moments.
    everything = 12 * memory.parameters(TINY)
    assert snapshot(on_host=False) == 0
    assert snapshot(on_host=True) == everything
    assert snapshot(on_host=True, data=4) == everything // 4
    assert snapshot(on_host=True, data=4, shard_optimizer=False) == everything
    assert snapshot(on_host=True, data=4, shard_weights=True) == everything // 4
    assert snapshot(on_host=True, lora=Lora(rank=2)) == 12 * memory.adapter_parameters(TINY, Lora(rank=2))


DEEP = make.shape(num_layers=8)


def staged(micro_batches: int, shape: ModelShape = DEEP, **parallel: object) -> memory.Memory:
    return memory.estimate(
        shape,
        seq_len=8,
        micro_batch=1,
        precision="bf16",
        parallel=Parallel.model_validate(parallel),
        recompute=Recompute(mode="full"),
        micro_batches=micro_batches,
    )


def test_the_first_stage_keeps_its_layers_for_as_many_micro_batches_as_ranks_come_after() -> None:
    # Fully recomputed, a layer keeps its input: 8 tokens of width 16 in two bytes. With a vocabulary of two it is the
    # first rank that needs most.
    kept, shape, even = 8 * 16 * 2, make.shape(num_layers=8, vocab_size=2), (2, 2, 2, 2)
    two, four, nine = (staged(count, shape, pipeline=4, stages=even).activations for count in (2, 4, 9))
    assert four - two == 2 * 2 * kept
    assert nine == four
    # Interleaved: 1 + (p - 1) / (p v) times all layers (Korthikanti et al. 2022, 4.2.3), where plain 1F1B keeps all.
    interleaved = staged(8, shape, pipeline=4, virtual=2, stages=(1,) * 8).activations
    assert interleaved - four == 8 * (3 / 8) * kept


def test_a_stage_holds_its_own_weights_and_both_ends_a_tied_embedding() -> None:
    embedding, layer = 260 * 16, LAYER + 32
    # The last rank also has the norm.
    needs = staged(4, pipeline=2, stages=(4, 4))
    assert needs.weights in (2 * (4 * layer + embedding), 2 * (4 * layer + embedding + 16))
    inner = memory.parameters_per_rank(DEEP, tensor=1, stages=[Stage(range(4, 6), first=False, last=False)])
    assert inner == 2 * layer


def test_a_plan_of_thousands_of_stages_and_micro_batches_takes_no_time_to_speak_of() -> None:
    wide = make.shape(num_layers=10_000)
    needs = memory.estimate(
        wide,
        seq_len=8,
        micro_batch=1,
        precision="bf16",
        parallel=Parallel(pipeline=2_500, virtual=4),
        recompute=Recompute(),
        micro_batches=2**40,
    )
    # 11 of 8 layers' worth would be four ranks'; of 2,500 it is all layers, and as many again but one for each chunk.
    assert needs.activations > 10_000 * 2 * 8 * 16
