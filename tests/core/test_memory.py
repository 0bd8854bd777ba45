"""Bytes that a rank needs, against counts made by hand and published sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.presets import PRESETS
from engine.config import Lora, ModelShape, Parallel, Recompute
from engine.plan import memory, passing, saved
from engine.plan.holdings import holdings
from engine.plan.recompute import Setting, cost
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
    assert holdings(make.shape(tie_embeddings=tied), tensor=1).elements() == count


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
    assert holdings(shape, tensor=2).elements() == 2 * (LAYER // 2 + 32) + 16 + 131 * 16


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
    two = holdings(TINY, tensor=2).elements() + 2 * (shared // 2 + whole)
    assert holdings(shape, tensor=2).elements() == two


def test_adapters_are_counted_on_both_sides_of_each_matrix() -> None:
    lora = Lora(rank=2, targets=("q", "down"))
    # q: 16 in, 16 out; down: 32 in, 16 out; two layers.
    assert memory.adapter_parameters(TINY, lora) == 2 * 2 * ((16 + 16) + (32 + 16))
    # On two ranks q's outputs and down's inputs are shared out.
    assert holdings(TINY, lora, tensor=2).elements(is_adapter=True) == 2 * 2 * ((8 + 16) + (16 + 16))


def test_a_rank_holds_a_whole_key_value_head_where_there_are_fewer_than_ranks() -> None:
    # Two heads of 4 for four ranks: a quarter of k's and v's 8 outputs would be 2, a head is 4.
    beyond = 2 * 2 * 16 * (4 - 2)
    assert holdings(TINY, tensor=4).elements() == (memory.parameters(TINY) - 5 * 16) // 4 + 5 * 16 + beyond
    lora = Lora(rank=2, targets=("k",))
    assert holdings(TINY, lora, tensor=4).elements(is_adapter=True) == 2 * 2 * (16 + 4)


def held(
    shape: ModelShape = TINY,
    *,
    micro_batch: int = 1,
    precision: str = "bf16",
    recompute: Recompute | None = None,
    lora: Lora | None = None,
    micro_batches: int = 1,
    packed: bool = False,
    on_host: bool = False,
    **parallel: object,
) -> memory.Memory:
    """Of rows of eight tokens."""
    return memory.estimate(
        shape, seq_len=8, micro_batch=micro_batch, precision=precision, parallel=Parallel.model_validate(parallel),
        recompute=recompute or Recompute(), lora=lora, micro_batches=micro_batches, packed=packed, on_host=on_host,
    )  # fmt: skip


def test_activations_are_those_of_all_layers_and_of_what_stands_around_them() -> None:
    # Per token: 4 x 16 around the matrices, q 16 + k 8 + v 8, core 16, 3 x 32 in the feed-forward, two bytes each; the
    # core's sums for four heads and two norms' statistics in fp32.
    layer = 8 * (2 * (64 + 32 + 16 + 96) + 4 * (4 + 2))
    # Ids of eight bytes; four angles; the last norm's input and statistic, and the loss's gradient.
    ends = 8 * (8 + 2 * 4 + 2 * 16 + 4 + 2 * 16)
    full, norms = 8 * 2 * 16, 8 * 2 * 2 * 16

    def of(recompute: Recompute) -> tuple[int, int]:
        needs = held(recompute=recompute)
        return needs.of("activations", "backward"), needs.of("recomputed", "backward")

    assert of(Recompute(mode="none")) == (2 * layer + ends, 0)
    assert of(Recompute(mode="full")) == (2 * full + ends, layer - full)
    # The norms' outputs are gone from both, and there in the one that is at work.
    assert of(Recompute(operations=("norm",))) == (2 * (layer - norms) + ends, norms)


def test_a_plan_says_what_is_needed_in_each_phase_and_what_most() -> None:
    needs = held(on_host=True, precision="fp32")
    phases = needs.by_phase()
    assert list(phases) == ["steady", "forward", "backward", "optimizer", "checkpoint"]
    assert phases["checkpoint"] == needs.total == max(phases.values())
    assert phases["checkpoint"] == max(phases["forward"], phases["backward"]) + 12 * memory.parameters(TINY)
    assert needs.itemised()["snapshot"] == 12 * memory.parameters(TINY)
    assert needs.largest == "snapshot"
    # On a device the copy lies elsewhere, and nothing is as large as a step's work.
    assert held().by_phase()["checkpoint"] == held().by_phase()["steady"]
    assert held().peak in ("forward", "backward")


def test_a_device_has_room_for_what_leaves_a_tenth_of_it_free() -> None:
    needs = held()
    enough = needs.total + needs.margin
    assert needs.margin == pytest.approx(0.1 * enough, abs=1)
    assert needs.fits(enough + 2)
    assert not needs.fits(enough - 2)


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
    needs = held(precision=precision, data=data, shard_optimizer=shard)
    # Each replica's share begins on a cache line of 16 numbers.
    line = 16 * (data if shard else 1)
    elements = -(-memory.parameters(TINY) // line) * line
    states = [needs.of(item, "steady") for item in ("parameters", "gradients", "optimizer")]  # type: ignore[arg-type]
    assert sum(states) == elements * per_parameter
    assert needs.total == sum(value for name, value in needs.itemised().items() if name != "total")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_replicas_that_share_weights_hold_three_fp32_numbers_of_their_share_and_what_is_gathered(
    precision: str,
) -> None:
    layers, size = 10, 2 if precision == "bf16" else 4
    deep = make.shape(num_layers=layers)
    ends, layer = 16 + 260 * 16, LAYER + 32
    everything = ends + layers * layer

    def bytes_with(**shared: bool) -> tuple[int, ...]:
        needs = held(deep, precision=precision, data=4, **shared)
        told = (needs.of("optimizer"), needs.of("gradients", "steady"), needs.of("gradients"), needs.of("gathered"))
        return needs.of("parameters"), *told

    # Master and two moments of a quarter; gradients of a quarter, and of the ends and a layer before they are summed.
    arising = everything // 4 * 4 + (ends + layer) * (size + 4)
    assert bytes_with(shard_gradients=True) == (0, everything // 4 * 12, 0, arising, everything * size)
    # The layer that runs and the next.
    gathered = (ends + 2 * layer) * size
    assert bytes_with(shard_weights=True) == (0, everything // 4 * 12, 0, arising, gathered)


def test_replicas_that_share_weights_share_a_frozen_base_too() -> None:
    lora = Lora(rank=2)
    deep = make.shape(num_layers=10)
    needs = held(deep, lora=lora, data=4, shard_weights=True)
    adapters = memory.adapter_parameters(deep, lora)
    assert needs.of("parameters") == 2 * memory.parameters(deep) // 4
    assert needs.of("gathered") == 2 * (16 + 260 * 16 + 2 * (LAYER + 32 + adapters // 10))
    # A of two rows leaves two of four replicas without one; the first has a whole one. B has as many as a matrix.
    rows = 10 * (7 * 16 + 32 - 16) + 10 * 2 * (16 + 8 + 8 + 16 + 32 + 32 + 16) // 4
    assert needs.of("optimizer") == 12 * rows
    assert needs.of("gradients", "backward") == 4 * rows + 6 * adapters // 10


def test_lora_trains_the_adapters_only() -> None:
    lora = Lora(rank=2)
    needs = held(lora=lora)
    assert needs.of("gradients") == 4 * memory.adapter_parameters(TINY, lora)
    assert needs.of("parameters") == 2 * memory.parameters(TINY)
    assert needs.of("adapters") == 2 * memory.adapter_parameters(TINY, lora)


def test_context_ranks_share_activations_and_the_optimizer_and_have_all_keys_of_a_layer_for_a_while() -> None:
    one, two = held(), held(context=2)
    # Chunks of two tokens look at one and four, or at two and three, chunks of keys: five of 2 x 2 have a mask.
    assert two.of("activations") == one.of("activations") // 2 + 2 * 5 * 2 * 2
    # Keys and values of 8 tokens are 16 wide, in two bytes; as they arrive and in order, and their gradients.
    assert two.of("gathered") == 2 * 4 * 8 * 16
    # Masters and moments are halved, and beside the gradients stands a reduced copy of them, in cache lines.
    elements = -(-memory.parameters(TINY) // 32) * 32
    assert two.of("parameters") == 2 * elements
    assert two.of("optimizer") == elements * 12 // 2
    assert two.of("gradients") == elements * 4 * 3 // 2


def of_scores(shape: ModelShape, *, micro_batch: int = 1, packed: bool = False, **parallel: int) -> int:
    """Activations beyond those of the same model whose core makes no masks and no scores."""
    plain = shape.model_copy(update={"architecture": "llama", "attention_dropout": 0.0, "sliding_window": None})
    one, other = (
        held(
            model, micro_batch=micro_batch, recompute=Recompute(mode="full"), micro_batches=4,
            packed=model is shape and packed, **parallel,
        ).of("activations", "backward")
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
    assert saved.masks(setting) == 2 * 2 * 8 * 8
    assert saved.masks(replace(setting, packed=True)) == 3 * 2 * 2 * 8 * 8
    assert passing.making_scores(setting) == 4 * 2 * 8 * 8


def test_a_gpu_that_is_given_a_mask_keeps_keys_and_values_for_each_query_head() -> None:
    # Two key heads of 4 for four query heads: without a mask 8 numbers a token, with one 16, of keys and of values.
    own = Setting(TINY, 8, 3, 2, on_cuda=True)
    packed = replace(own, packed=True)
    assert cost(packed, ()).saved - cost(own, ()).saved == 2 * 3 * 8 * 2 * (16 - 8)
    on_host = replace(packed, on_cuda=False)
    assert cost(on_host, ()).saved == cost(own, ()).saved
    # What is replayed keeps them as they were.
    assert cost(packed, {"attention_core"}).saved == cost(on_host, {"attention_core"}).saved
    # Context ranks gather all, and keep their own besides: chunks of two tokens see one and four chunks of keys.
    shared = replace(packed, parallel=Parallel(context=2))
    beyond = cost(shared, ()).saved - cost(replace(shared, on_cuda=False), ()).saved
    assert beyond == 2 * 3 * (5 * 2) * 2 * 16


def test_where_probabilities_are_dropped_two_more_score_matrices_exist_for_a_moment() -> None:
    gpt2 = make.shape(architecture="gpt2", num_kv_heads=4)
    setting = Setting(gpt2.model_copy(update={"attention_dropout": 0.1}), 8, 3, 2, Parallel(tensor=2))
    # Two heads of a rank, three rows of 8 x 8 pairs; two numbers of two bytes come and go.
    assert passing.making_scores(setting) == 2 * 2 * 2 * 3 * 8 * 8
    assert passing.making_scores(replace(setting, shape=gpt2)) == 0


def test_on_a_cpu_a_checkpoint_is_written_from_a_copy_of_what_a_rank_saves() -> None:
    def snapshot(on_host: bool, lora: Lora | None = None, **parallel: object) -> int:
        return held(precision="fp32", lora=lora, on_host=on_host, **parallel).of("snapshot", "checkpoint")

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
    return held(shape, recompute=Recompute(mode="full"), micro_batches=micro_batches, **parallel)


def test_the_first_stage_keeps_its_layers_for_as_many_micro_batches_as_ranks_come_after() -> None:
    # Fully recomputed, a layer keeps its input: 8 tokens of width 16 in two bytes. With a vocabulary of two it is the
    # first rank that needs most.
    kept, shape, even = 8 * 16 * 2, make.shape(num_layers=8, vocab_size=2), (2, 2, 2, 2)
    # Besides, ids of eight bytes and four angles of two of each pass.
    ids, angles = 8 * 8, 8 * 2 * 4

    def first(count: int, **parallel: object) -> int:
        parallel = {"pipeline": 4, **parallel}
        setting = Setting(shape, 8, 1, 2, Parallel.model_validate(parallel))
        rank = memory.by_rank(setting, Recompute(mode="full"), micro_batches=count)[0]
        return rank.of("activations", "backward")

    two, four, nine = (first(count, stages=even) for count in (2, 4, 9))
    assert four - two == 2 * (2 * kept + ids + angles)
    assert nine == four == 8 * kept + 4 * (ids + angles)
    # Interleaved: 1 + (p - 1) / (p v) times all layers (Korthikanti et al. 2022, 4.2.3), where plain 1F1B keeps all.
    interleaved = first(8, virtual=2, stages=(1,) * 8)
    # When eight passes through the first of the two stages wait, and three through the second, which has no ids.
    assert interleaved == 8 * (1 + 3 / 8) * kept + 11 * angles + 8 * ids


def test_a_stage_holds_its_own_weights_and_both_ends_a_tied_embedding() -> None:
    embedding, layer = 260 * 16, LAYER + 32
    # The last rank also has the norm.
    needs = staged(4, pipeline=2, stages=(4, 4))
    assert needs.of("parameters") in (2 * (4 * layer + embedding), 2 * (4 * layer + embedding + 16))
    inner = holdings(DEEP, stages=[Stage(range(4, 6), first=False, last=False)]).elements()
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
    assert needs.of("activations") > 10_000 * 2 * 8 * 16
