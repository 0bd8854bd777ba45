"""FLOPs against the papers' printed formulas and a model counted by hand."""

import pytest

from engine.config import Lora, ModelShape, Operation, Parallel
from engine.plan.flops import model_flops
from engine.plan.recompute import hardware_flops
from engine.rates import speeds
from engine.stopwatch import PARTS
from tests.engine.train import runs

# A GPT layer has 12h^2 weights: four of h x h in attention, two of h x 4h behind it. A llama layer with a gated
# feed-forward of 8h/3 has the same: 4h^2 + 3 x 8h^2/3.
GPT3_LIKE = ModelShape(
    num_layers=96, hidden_size=12288, num_heads=96, num_kv_heads=96, head_dim=128, ffn_hidden_size=32768,
    max_seq_len=2048, vocab_size=51200,
)  # fmt: skip


GPT3 = GPT3_LIKE.model_copy(update={"architecture": "gpt2", "ffn_hidden_size": 4 * 12288})


@pytest.mark.parametrize("shape", [GPT3_LIKE, GPT3], ids=["llama of the same size", "GPT-3"])
def test_model_flops_are_equation_7_of_the_paper(shape: ModelShape) -> None:
    batch, seq, hidden, layers, vocab = 4, 2048, 12288, 96, 51200
    paper = 72 * batch * layers * seq * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * hidden * layers))
    assert abs(model_flops(shape, tokens=batch * seq, pairs=batch * seq * seq) / paper - 1) < 1e-12


def test_grouped_queries_and_packed_documents_cost_less():
    shape = ModelShape(
        num_layers=1, hidden_size=4, num_heads=2, num_kv_heads=1, head_dim=2, ffn_hidden_size=8, max_seq_len=8,
        vocab_size=10,
    )  # fmt: skip
    # q 4x4, k and v 4x2, o 4x4, gate up down 4x8, output 4x10: 184 weights, 6 FLOPs each; 4 x (2 heads x 2) x 3 a pair.
    assert model_flops(shape, tokens=8, pairs=3 * 3 + 5 * 5) == 8 * 6 * 184 + 34 * 48


def test_frozen_weights_have_no_weight_gradient():
    shape = GPT3_LIKE.model_copy(update={"num_layers": 1, "vocab_size": 2})
    lora = Lora(rank=8, targets=("q", "down"))
    frozen = 12 * 12288**2 + 2 * 12288
    adapters = 8 * (12288 + 12288) + 8 * (32768 + 12288)
    assert model_flops(shape, tokens=1, pairs=0, lora=lora) == 4 * frozen + 6 * adapters


PEAK_A100 = 312e12

TABLE_5 = [
    pytest.param(6144, 48, 64, 8, 4, 1.10, 41.5, 42.37, 43.7, id="22B"),
    pytest.param(12288, 96, 96, 64, 64, 13.75, 51.4, 51.85, 52.8, id="175B"),
    pytest.param(20480, 105, 128, 280, 280, 37.83, 56.0, 56.35, 57.0, id="530B"),
    pytest.param(25600, 128, 160, 512, 512, 71.49, 56.3, 56.51, 57.0, id="1T"),
]
"""Korthikanti et al. 2022: hidden size, layers, heads, GPUs, batch, seconds, printed MFU; HFU by the paper's text, and
the printed one, which follows equation 8 and counts the replayed core three times."""


@pytest.mark.parametrize(("hidden", "layers", "heads", "gpus", "batch", "seconds", "mfu", "hfu", "printed"), TABLE_5)
def test_utilisation_is_that_of_the_papers_table_5(hidden, layers, heads, gpus, batch, seconds, mfu, hfu, printed):
    shape = ModelShape(
        architecture="gpt2", num_layers=layers, hidden_size=hidden, num_heads=heads, num_kv_heads=heads,
        head_dim=hidden // heads, ffn_hidden_size=4 * hidden, max_seq_len=2048, vocab_size=51200,
    )  # fmt: skip
    run = runs.config(
        model=shape.model_dump(), data={"seq_len": 2048}, peak_flops_per_rank=PEAK_A100, parallel={"data": 2},
        recompute={"mode": "selective"},
    ).model_copy(update={"parallel": Parallel(data=gpus)})  # fmt: skip
    work = {"tokens": batch * 2048, "pairs": batch * 2048**2}
    selective: list[set[Operation]] = [{"attention_core"}] * layers
    parts = dict.fromkeys(PARTS, 0.0) | {"compute": seconds, "checkpoint": 99.0}
    speed = speeds(run, shape, **work, replayed=selective, parts=parts)
    assert speed["tokens_per_second"] == pytest.approx(batch * 2048 / seconds)
    assert (100 * speed["mfu"], 100 * speed["hfu"]) == pytest.approx((mfu, hfu), abs=0.2)
    by_equation_8 = hardware_flops(shape, **work, replayed=selective, equation_8=True)
    assert 100 * by_equation_8 / (seconds * gpus * PEAK_A100) == pytest.approx(printed, abs=0.2)


def test_full_recomputation_is_one_more_forward_pass_of_the_layers():
    # Narayanan et al. 2021, equation 3: the output layer is not replayed.
    batch, seq, hidden, layers, vocab = 4, 2048, 12288, 96, 51200
    paper = 96 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    hardware = hardware_flops(GPT3_LIKE, tokens=batch * seq, pairs=batch * seq * seq, replayed=[{"layer"}] * layers)
    assert abs(hardware / paper - 1) < 1e-12


def test_selective_recomputation_is_the_core_once_more():
    batch, seq, hidden, layers = 4, 2048, 12288, 96
    once = {"tokens": batch * seq, "pairs": batch * seq * seq}
    hardware = hardware_flops(GPT3_LIKE, **once, replayed=[{"attention_core"}] * layers)
    assert hardware - model_flops(GPT3_LIKE, **once) == 4 * batch * seq**2 * hidden * layers
    assert hardware_flops(GPT3_LIKE, **once, replayed=[()] * layers) == model_flops(GPT3_LIKE, **once)


def test_what_is_replayed_twice_over_counts_once_and_what_is_no_product_not_at_all():
    shape = ModelShape(
        num_layers=3, hidden_size=4, num_heads=2, num_kv_heads=1, head_dim=2, ffn_hidden_size=8, max_seq_len=8,
        vocab_size=10,
    )  # fmt: skip
    model = model_flops(shape, tokens=8, pairs=64)
    # q 4x4, k and v 4x2; gate and up 4x8; o 4x4 and down 8x4; the core 2 products of 2 heads of 2.
    qkv, up, rest, core = 8 * 2 * 32 * 3, 8 * 2 * 64 * 3, 8 * 2 * 48 * 3, 64 * 2 * 2 * 4 * 3
    for replayed, again in {
        ("norm", "activation", "dropout"): 0,
        ("qkv",): qkv,
        ("up_projection", "attention_core"): up + core,
        ("layer", "qkv", "attention_core"): qkv + up + rest + core,
    }.items():
        assert hardware_flops(shape, tokens=8, pairs=64, replayed=[replayed] * 3) == model + again


def test_each_layer_counts_for_what_it_replays():
    shape = GPT3_LIKE.model_copy(update={"num_layers": 2})
    # q, k and v are 3h^2; gate and up 2 x 8h^2/3.
    again = 2 * 10 * (3 * 12288**2 + 2 * 12288 * 32768)
    hardware = hardware_flops(shape, tokens=10, pairs=100, replayed=[{"qkv"}, {"up_projection"}])
    assert hardware == model_flops(shape, tokens=10, pairs=100) + again
