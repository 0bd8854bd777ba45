"""FLOPs against the papers' printed formulas and a model counted by hand."""

from engine.config import Lora, ModelShape
from engine.plan.flops import model_flops

# A GPT layer has 12h^2 weights: four of h x h in attention, two of h x 4h behind it. A llama layer with a gated
# feed-forward of 8h/3 has the same: 4h^2 + 3 x 8h^2/3.
GPT3_LIKE = ModelShape(
    num_layers=96, hidden_size=12288, num_heads=96, num_kv_heads=96, head_dim=128, ffn_hidden_size=32768,
    max_seq_len=2048, vocab_size=51200,
)  # fmt: skip


def test_model_flops_are_equation_7_of_the_paper():
    batch, seq, hidden, layers, vocab = 4, 2048, 12288, 96, 51200
    paper = 72 * batch * layers * seq * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * hidden * layers))
    assert abs(model_flops(GPT3_LIKE, tokens=batch * seq, pairs=batch * seq * seq) / paper - 1) < 1e-12


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
